"""`zbmd inject` on running jobs: a rank is named with its cause, relieved or replaced; all is restored."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from programs import PROGRAMS
from support.jobs.slowed import injected
from support.processes.launcher import marked
from support.processes.polling import until

from zbmd.tools.inject.command import target_in
from zbmd.tools.runs.profile import stragglers_of
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.training.profiler.lines import read_profiles
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running

WORK = str(PROGRAMS / "training/even_work.py")
MORE_S = 180.0
"""Beside other work a step takes many times as long, and what is waited for is a number of steps."""
KNOWN_STEPS = 160
"""After these a rank is compared with its past: short steps are judged several at a time."""
ENDED = r"step \d+ rank 1 is slow: .*; it is ended, as if it had died"
MORE_STEPS = 20
"""No rank is stopped if so many follow."""


@contextmanager
def work(
    launcher: Launcher, out: Path, on_straggler: str = "warn", known: int = KNOWN_STEPS
) -> Generator[Running]:
    """A job that goes on until it is stopped. known: steps that it has made."""
    command = ("run", "-n", "2", "--arena", "64MiB", WORK, str(out), "100000", on_straggler)
    with launcher.start(*command) as running:
        running.deadline_s += MORE_S
        running.until(rf"step {known} loss")
        yield running


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(running: Running) -> None:
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM, running.text


def test_a_rank_that_is_stopped_now_and_then_is_named_and_cleared(launcher: Launcher) -> None:
    out = launcher.directory / "out"
    with work(launcher, out) as running:
        with injected(out, "--rank", "1", "--slow", "1000%"):
            (named,) = running.until(r"step (\d+) rank 1 is slow: .* cause compute: (.*)")
        running.until(r"rank 1 is no longer slow \(cause compute\)")
        stop(running)
    assert "nothing is done about it" in named[2], running.text
    # Other work on the machine may make either rank a slow one: what was said of the stopped one counts.
    lines = [line for life in read_profiles(out) for line in life.stragglers if line.slow == 1]
    assert {(line.cause, line.over) for line in lines} >= {("compute", False), ("compute", True)}
    text = next(line.text for line in lines if line.cause == "compute" and not line.over)
    assert text in "\n".join(stragglers_of(read_profiles(out)))
    with RunDatabase(out) as database:
        database.update()
        rows = database.connection.execute(
            "select rank, text from events where kind = 'straggler'"
        ).fetchall()
    assert (1, text) in rows


def test_a_rank_whose_batches_are_late_is_named_for_its_data(launcher: Launcher) -> None:
    out = launcher.directory / "out"
    with work(launcher, out) as running:
        with injected(out, "--rank", "0", "--data-delay", "500ms"):
            running.until(r"step \d+ rank 0 is slow: .* cause data: it waits for its batches")
        stop(running)


def digests_of(out: Path) -> dict[int, str]:
    """Return the digest of each version in the log of a run."""
    return {record.version: record.digest for record in read_log(out / LOG_NAME)[1]}


def moved_and_stopped(running: Running, out: Path) -> int:
    """Slow a rank until its shards move, and stop the job some steps later; return the last version."""
    with injected(out, "--rank", "1", "--slow", "1000%"):
        shares = "logical shards of ranks are now [567], [123]$"
        (moved,) = running.until(rf"step (\d+) rank 1 is slow: .*; {shares}")
    running.until(rf"step {int(moved[1]) + 3} loss")
    stop(running)
    return max(digests_of(out))


def test_shards_move_away_from_a_slow_rank_and_the_bits_stay(launcher: Launcher) -> None:
    out, calm = launcher.directory / "out", launcher.directory / "calm"
    with work(launcher, out, "rebalance") as running:
        last = moved_and_stopped(running, out)
    with launcher.start("run", "-n", "1", "--arena", "64MiB", WORK, str(calm), str(last), "warn") as alone:
        assert alone.end() == 0, alone.text
    assert digests_of(out) == digests_of(calm)


def test_a_gpt_on_a_mesh_moves_shards_with_the_same_bits(launcher: Launcher) -> None:
    (launcher.directory / "text.txt").write_text("to be or not to be, that is the question. " * 500)
    recipe = ["--data", "text.txt", "--layers", "1", "--width", "64", "--heads", "2", "--context", "64"]
    recipe += ["--shards", "8", "--sequences-per-shard", "4", "--curve", "constant", "--evaluate-every", "0"]
    recipe += ["--evaluate-windows", "1", "--checkpoint-every", "0", "--on-straggler", "rebalance"]
    words, out = ["-m", "zbmd", "train", *recipe], launcher.directory / "out"
    mesh = ["--mesh", "dp=2", "--out", "out", "--steps", "100000"]
    with launcher.start("run", "-n", "2", *words, *mesh) as running:
        running.deadline_s += MORE_S
        running.until(rf"step {KNOWN_STEPS} loss")
        last = moved_and_stopped(running, out)
    alone = launcher.run("run", "-n", "1", *words, "--out", "alone", "--steps", str(last))
    assert alone.code == 0, alone
    assert digests_of(out) == digests_of(launcher.directory / "alone")


def test_a_slow_rank_is_replaced_once(launcher: Launcher) -> None:
    out = launcher.directory / "out"
    with work(launcher, out, "replace") as running:
        with injected(out, "--rank", "1", "--slow", "1000%") as process:
            running.until(ENDED)
            assert process.wait() == 0, "its target has ended"
        running.until(r"rank 1 was killed \(SIGKILL\); 2 ranks together again")
        stop(running)
    assert max(life.run.incarnation for life in read_profiles(out) if life.run.rank == 1) >= 2
    # Whatever else ends it on a loaded machine makes it more than two incarnations, not more reports.
    assert len({*re.findall(ENDED, running.text)}) == 1, running.text


async def test_a_killed_injector_leaves_nothing(launcher: Launcher) -> None:
    out = launcher.directory / "out"
    with work(launcher, out, known=1) as running:
        with closing(target_in(out, 1)) as target:
            pid = target.pid
        with injected(out, "--rank", "1", "--slow", "1000%", "--load", "1", "--nice", "19") as process:
            await until(lambda: state_of(pid) == "T")
            process.kill()
            process.wait()
        await until(lambda: not marked(out.as_posix()))
        await until(lambda: state_of(pid) != "T")
        running.until(rf"step {max(digests_of(out)) + MORE_STEPS} loss")
        assert state_of(pid) != "T"
        stop(running)


def test_a_quota_is_undone_or_refused_with_what_it_needs(launcher: Launcher) -> None:
    out = launcher.directory / "out"
    with work(launcher, out, known=1) as running:
        with closing(target_in(out, 1)) as target:
            pid = target.pid
        before = Path(f"/proc/{pid}/cgroup").read_text()
        command = [sys.executable, "-m", "zbmd", "inject", str(out), "--rank", "1", "--cpus", "0.5", "--for"]
        done = subprocess.run([*command, "200ms"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("is as before")) == (0, 1) or (
            done.returncode == 2 and "it needs one with the cpu controller" in done.stderr
        ), done.stderr
        assert Path(f"/proc/{pid}/cgroup").read_text() == before
        stop(running)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--slow", "0%"), "--slow: expected 1% to 1000%"),
        (("--data-delay", "1h"), "--data-delay: expected up to 1min"),
        (("--link-delay", "1ms"), "name the --interface"),
        ((), "nothing to do"),
    ],
)
def test_what_cannot_be_injected_is_refused(
    words: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zbmd.tools.entry import zbmd

    profile = tmp_path / "profile"
    profile.mkdir()
    (profile / "rank0-1.jsonl").write_bytes(own_line() + b"\n")
    assert zbmd.main(["inject", str(tmp_path), "--rank", "0", "--for", "1s", *words]) == 2
    assert told in capsys.readouterr().err


def own_line() -> bytes:
    """Return the first line of the profile of this process."""
    from zbmd.training.profiler.profiler import open_profiler

    return msgspec.json.encode(open_profiler(Path(), None, sequences=1, environ={"ZBMD_PROFILE": "off"}).run)


def test_ranks_that_are_not_here_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no profile in"):
        target_in(tmp_path, 0)
    (tmp_path / "profile").mkdir()
    line = msgspec.json.decode(own_line())
    for change, told in (
        ({"rank": 1}, "no such rank"),
        ({"boot_id": "another", "host": "far"}, "runs on far"),
        ({"process_ns": 1}, "has ended"),
    ):
        (tmp_path / "profile/rank0-1.jsonl").write_bytes(msgspec.json.encode({**line, **change}) + b"\n")
        with pytest.raises(UserError, match=told):
            target_in(tmp_path, 0)
