"""`zbmd bench` for real, with few iterations: valid results, told errors, and nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.processes.children import children_of
from support.processes.polling import wait_until

from zbmd.collectives.communicator.cost_model import ONE_HOST
from zbmd.tools.bench import command as bench_cli
from zbmd.tools.bench.collectives import explain
from zbmd.tools.bench.peer_catalogue import OF_TCP, PEERS, PeerMissing, Site, find_peer
from zbmd.tools.bench.peers.collectives import written_zeros
from zbmd.tools.bench.result import FORMAT, BenchResult, Measurement, table
from zbmd.tools.bench.run import MEMCPY
from zbmd.tools.bench.stats import OURS
from zbmd.tools.bench.workers import CONTROL, ContenderFailed, Workers
from zbmd.tools.entry import zbmd as cli

TIMEOUT_S = 180
NO_RANKS = (*MEMCPY, *OF_TCP)
"""Peers that have no part in `echo` or `frame` over shm."""
CHUNKED = 300 << 10
"""More than one chunk of a foreign buffer, and the last one not full."""


def bench(*arguments: str) -> BenchResult:
    """Run the command to its end, and read its JSON by the documented schema."""
    done = subprocess.run(
        [sys.executable, "-m", "zbmd.tools.entry.zbmd", "bench", *arguments, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b"", "off a terminal there is no bar"
    result = msgspec.json.decode(done.stdout, type=BenchResult)
    assert result.format == FORMAT
    assert result.command.endswith(f"bench {' '.join([*arguments, '--json'])}")
    for row in result.rows:
        assert 0 < row.time_us_p50 <= row.time_us_p99
        assert row.samples > 0
    return result


def told(rows: Sequence[Measurement]) -> list[tuple[str, str, int]]:
    return [(row.case, row.who, row.size_bytes) for row in rows]


def test_p2p_times_every_case_at_every_size_it_can_have() -> None:
    arguments = ["--sizes", f"1,{CHUNKED}", "--rounds", "2", "--iterations", "3"]
    for name in MEMCPY:
        arguments += ["--vs", name]
    result = bench("p2p", *arguments)
    native = [
        (case, who, size)
        for case in ("p2p-arena", "p2p-foreign", "echo")
        for size in (1, CHUNKED)
        for who in (OURS, *MEMCPY)
    ]
    assert told(result.rows) == [*native, ("frame", OURS, 1), ("frame-training", OURS, 1)]
    assert {row.samples for row in result.rows if row.who == OURS} == {2 * 2 * 3}
    assert tuple(peer.name for peer in result.peers) == MEMCPY
    assert all(row.time_ratio is not None for row in result.rows)
    text = table(result)
    assert "busbw" in text
    assert text.count("noise") == 1 + 3 * 2 + 2


def test_put_times_windows_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "put.png"
    result = bench("put", "--sizes", "8,1M", "--rounds", "1", "--iterations", "2", "--plot", str(picture))
    assert told(result.rows) == [
        (case, OURS, size) for case in ("put-arena", "put-foreign") for size in (8, 1 << 20)
    ]
    for row in result.rows:
        assert row.busbw_gbytes_per_s == row.algbw_gbytes_per_s
        assert row.algbw_gbytes_per_s == pytest.approx(row.size_bytes / row.time_us_p50 / 1e3)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_over_tcp_the_protections_take_turns() -> None:
    arguments = ("--transport", "tcp", "--sizes", "8,1M", "--rounds", "1", "--iterations", "2")
    others = ("zbmd-none", "zbmd-tls", "sockets")
    named = [word for name in others for word in ("--vs", name)]
    result = bench("put", *arguments, "--cases", "put-foreign", *named)
    assert told(result.rows) == [
        ("put-foreign", who, size) for size in (8, 1 << 20) for who in (OURS, *others)
    ]
    commands = [peer.command for peer in result.peers]
    assert commands[:2] == ["ZBMD_PROTECTION=none", "ZBMD_PROTECTION=tls"]
    assert "peers.pairs sockets" in commands[2]
    frames = bench("p2p", *arguments, "--cases", "frame", "--cases", "echo", "--cases", "p2p-arena")
    assert told(frames.rows) == [
        *((case, OURS, size) for case in ("p2p-arena", "echo") for size in (8, 1 << 20)),
        ("frame", OURS, 8),
    ]


@pytest.mark.optional
def test_iperf3_is_timed_beside_puts_over_tcp(tmp_path: Path) -> None:
    if not _is_there("iperf3", tmp_path):
        pytest.skip("iperf3 is not installed")
    arguments = ("--transport", "tcp", "--sizes", "8,1M", "--rounds", "1", "--iterations", "1")
    result = bench("put", *arguments, "--cases", "put-arena", "--vs", "iperf3")
    assert told(result.rows) == [
        ("put-arena", OURS, 8),
        ("put-arena", OURS, 1 << 20),
        ("put-arena", "iperf3", 1 << 20),
    ]
    assert "iperf3 -c 127.0.0.1" in result.peers[0].command


def test_detect_kills_victims_and_has_the_floor_beside_it() -> None:
    result = bench("detect", "--sizes", "0,1M", "--trials", "1")
    who = (OURS, "zbmd-wait", "zbmd-loop", "zbmd-eof", "floor-futex", "floor-pidfd", "floor-eof")
    assert told(result.rows) == [
        (f"detect-{load}", name, size)
        for load in ("training", "idle")
        for size in (0, 1 << 20)
        for name in who
    ]


@pytest.mark.optional
def test_the_peers_that_are_there_are_timed_in_the_same_run(tmp_path: Path) -> None:
    there = [name for name in PEERS if name not in NO_RANKS and _is_there(name, tmp_path)]
    if not there:
        pytest.skip("no peer is installed")
    arguments = ["--cases", "echo", "--cases", "frame", "--sizes", "8", "--rounds", "1", "--iterations", "2"]
    for name in there:
        arguments += ["--vs", name]
    result = bench("p2p", *arguments)
    echoed = [("echo", name, 8) for name in (OURS, *there) if name != "xoscar"]
    framed = [("frame", name, 8) for name in (OURS, *there) if name in (OURS, "xoscar")]
    assert told(result.rows) == [*echoed, *framed]
    assert [peer.name for peer in result.peers] == there
    assert all(peer.version and CONTROL in peer.command for peer in result.peers)


def _is_there(name: str, scratch: Path) -> bool:
    try:
        find_peer(name, Site(transport="shm", scratch=scratch))
    except PeerMissing:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("openmpi", "apt-get install openmpi-bin"),
        ("openmpi-c", "apt-get install openmpi-bin"),
        ("mpich", "apt-get install mpich"),
        ("mpich-c", "apt-get install mpich"),
        ("iperf3", "apt-get install iperf3"),
        ("gloo", "pip install 'zbmd[torch]'"),
        ("xoscar", "pip install 'zbmd[bench]'"),
    ],
)
def test_a_missing_peer_is_told_with_the_command_that_installs_it(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PeerMissing, match="not installed") as raised:
        find_peer(name, Site(transport="shm", scratch=tmp_path))
    assert advice in str(raised.value)


def test_a_missing_peer_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["bench", "p2p", "--sizes", "8", "--vs", "openmpi"]) == bench_cli.EXIT_MISSING
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "apt-get install openmpi-bin" in captured.err
    assert cli.main(["bench", "detect", "--trials", "1"]) == bench_cli.EXIT_MISSING
    assert "apt-get install gcc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["p2p", "--sizes", "8:"], "is not a size"),
        (["p2p", "--rounds", "0"], "--rounds: expected 1 to 1,000, got 0"),
        (["p2p", "--iterations", "-1"], "--iterations: expected 1 to 1,000,000, got -1"),
        (["p2p", "--cases", "frame", "--sizes", "1M"], "frames have at most 64K"),
        (["p2p", "--transport", "tcp", "--cases", "p2p-foreign"], "p2p-foreign is one of shm"),
        (["put", "--vs", "zbmd-tls"], "compare it with --transport tcp"),
        (["p2p", "--vs", "iperf3"], "compare it with --transport tcp"),
        (["put", "--vs", "xoscar"], "it can be compared in p2p frame"),
        (["detect", "--trials", "0"], "--trials: expected 1 to 10,000, got 0"),
        (["detect", "--plot", "x.pdf"], "end it in .png or .svg"),
    ],
)
def test_bad_input_is_told_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('no such luck')", "ended before it was ready.*no such luck"),
        ("peer.connect(sys.argv[1], 7)", "said b'7"),
        (
            "peer.serve(sys.argv[1], 0, lambda *asked: 1 / 0)",
            "ended while it measured.*ZeroDivisionError",
        ),
        ("s = peer.connect(sys.argv[1], 0); s.recv(9); s.sendall(b'ns\\n')", "answered b'ns"),
    ],
)
def test_a_program_that_fails_is_told_with_its_last_words(script: str, said: str) -> None:
    code = f"import sys\nfrom zbmd.tools.bench.peers import control as peer\n{script}"
    with (
        pytest.raises(ContenderFailed, match=f"(?s){said}"),
        Workers("peer", [[sys.executable, "-c", code, CONTROL]], ranks=1) as workers,
    ):
        workers.ask("p2p", 8, 1)


def test_a_program_that_does_not_start_is_told(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with (
        pytest.raises(ContenderFailed, match=r"cannot start .*No such file"),
        Workers("peer", [[missing]], ranks=1),
    ):
        pass


def test_a_killed_benchmark_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """The benchmark is killed while its ranks measure; each of them ends."""
    command = [sys.executable, "-m", "zbmd.tools.entry.zbmd", "bench", "p2p", "--cases", "p2p-arena"]
    command += ["--sizes", "8", "--rounds", "1000"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        wait_until(
            lambda: (
                process.poll() is not None
                or (len(_ranks_of(process.pid)) == 2 and not any(tmp_path.iterdir()))
            )
        )
        assert process.poll() is None, "the benchmark ended before it was killed"
        descriptors = [os.pidfd_open(pid) for pid in _ranks_of(process.pid)]
        process.send_signal(signal.SIGKILL)
    try:
        waiting = set(descriptors)
        while waiting:
            ended = select.select(list(waiting), [], [], TIMEOUT_S)[0]
            assert ended, "a rank has outlived its benchmark"
            waiting -= set(ended)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert not any(tmp_path.iterdir())


def _ranks_of(pid: int) -> list[int]:
    return [child for child in children_of(pid) if b"bench.transport.rank" in _command_line(child)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_collectives_are_timed_and_have_their_bus_bandwidth() -> None:
    chosen = ["--cases", "all-reduce", "--cases", "reduce", "--cases", "gather-foreign"]
    turns = ("--rounds", "1", "--iterations", "20")  # three ranks on two cores wait for each other
    result = bench("collectives", "--ranks", "3", "--sizes", "4,64K", *chosen, *turns)
    words = ("all-reduce in place", "reduce to rank 0", "gather to rank 0, of ordinary arrays")
    expected = [(f"{case}, 3 ranks", OURS, size) for case in words for size in (4, 64 << 10)]
    assert told(result.rows) == expected
    assert {row.samples for row in result.rows} == {2 * 20}
    for row, factor in zip(result.rows, (4 / 3, 4 / 3, 1, 1, 2 / 3, 2 / 3), strict=True):
        assert row.algbw_gbytes_per_s and row.busbw_gbytes_per_s
        assert abs(row.busbw_gbytes_per_s / row.algbw_gbytes_per_s - factor) < 1e-6


def _anonymous_bytes() -> int:
    """Bytes in pages of our own; the kernel's page of zeros is none of them (proc_pid_status(5))."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def test_arrays_that_are_timed_lie_in_pages_of_their_own() -> None:
    # Of zeros that nobody has written, the kernel has one page for all: a copy would read from the cache.
    nbytes = 64 << 20
    gc.collect()
    before = _anonymous_bytes()
    timed = written_zeros(2, nbytes // 8)
    assert timed.shape == (2, nbytes // 8) and timed.nbytes == nbytes and not timed.any()
    assert _anonymous_bytes() - before > nbytes * 3 // 4
    del timed
    gc.collect()
    before = _anonymous_bytes()
    assert not np.zeros(nbytes // 4, np.float32).any()
    assert _anonymous_bytes() - before < nbytes // 4, "else the test above shows nothing"


def test_what_is_chosen_is_explained_by_what_the_ranks_have_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "collectives", "--explain", "--sizes", "4,16M"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "as the ranks have measured it" in heading and f"{len(os.sched_getaffinity(0))} cores" in heading
    assert "1.00 us, β 0.100" not in heading, "those are the numbers of a group that has measured nothing"
    found = {tuple(line.split()[:2]): line for line in lines}
    assert "travel with the descriptor" in found["all_reduce", "4"]
    assert "swap" in found["all_reduce", "16M"] and "tree" in found["reduce", "16M"]
    assert "steps, proved offline; " in found["all_reduce", "4"]
    assert cli.main(["bench", "collectives", "--explain", "--sizes", "4", "--hosts", "2"]) == 0
    assert "assumed" in capsys.readouterr().out.splitlines()[0]


def test_what_was_not_proved_offline_is_proved_and_what_that_took_is_told() -> None:
    lines = explain([3 << 20], 23, 1, ONE_HOST)
    found = {line.split()[0]: line for line in lines[1:]}
    assert re.search(r"steps, proved now in \d+\.\d ms; ", found["all_gather"])
    again = {line.split()[0]: line for line in explain([3 << 20], 23, 1, ONE_HOST)[1:]}
    assert again == found, "a proof is kept, with what it took"


def test_ranks_that_do_not_start_are_told_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert cli.main(["bench", "collectives", "--explain", "--sizes", "4"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "bad",
    [["--vs", "magic"], ["--ranks", "0"], ["--sizes", "x"], ["--rounds", "101"], ["--iterations", "0"]],
)
def test_bad_options_of_collectives_are_told(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "collectives", *bad]) == 2
    assert "error" in capsys.readouterr().err
