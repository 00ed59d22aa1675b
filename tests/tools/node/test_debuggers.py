"""Debuggers in ranks, on a terminal and without one, and `--stdin`."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS
from support.cluster.etcd_server import free_ports
from support.processes.terminal import on_terminal

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

LAUNCHED = PROGRAMS / "launched"
STOPS = str(LAUNCHED / "stops.py")
WAITED_FOR = str(LAUNCHED / "waited_for.py")
READS = "import sys\nprint('read', repr(sys.stdin.read()), flush=True)\n"


@pytest.fixture(params=[False, True], ids=["one host", "several"])
def hosts(request: pytest.FixtureRequest) -> list[str]:
    """The options of a run on one host, and of one that others may join."""
    elastic = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"]
    return elastic if request.param else []


def test_a_rank_in_a_debugger_has_the_terminal(launcher: Launcher, hosts: list[str]) -> None:
    ways = ("breakpoint", "set_trace", "post_mortem")
    with on_terminal(launcher, "run", *hosts, "-n", "1", STOPS, *ways) as terminal:
        for count in range(1, len(ways) + 1):
            terminal.until("(Pdb) ", 2 * count - 1)
            terminal.type("p 40 + 2\n")
            terminal.until("42\r\n", count)
            terminal.type("c\n")
        assert terminal.end() == 0, terminal.text
    assert terminal.text.count("[rank0]: rank 0 went on\r\n") == len(ways), terminal.text
    assert "[rank0]: and 0 ends\r\n" in terminal.text and "\x1e" not in terminal.text


def test_ranks_that_stop_at_once_have_the_terminal_one_after_the_other(launcher: Launcher) -> None:
    """Also over steps: none gets keys that are meant for another, and what it prints is seen at once."""
    with on_terminal(launcher, "run", "-n", "3", STOPS, "breakpoint") as terminal:
        asked = 0
        for count in (1, 2, 3):
            asked += 1
            terminal.until("(Pdb) ", asked)
            terminal.type("n\n")
            terminal.until(" went on\r\n", count)
            asked += 1
            terminal.until("(Pdb) ", asked)
            terminal.type("c\n")
        assert terminal.end() == 0, terminal.text
    for rank in (0, 1, 2):
        assert terminal.text.count(f"rank {rank} went on\r\n") == 1, terminal.text
        assert terminal.text.count(f"[rank{rank}]: and {rank} ends\r\n") == 1, terminal.text


def test_what_other_ranks_print_waits_for_the_terminal(launcher: Launcher) -> None:
    script = "import os, sys\nif os.environ['RANK'] == '0':\n    breakpoint()\nprint('here', flush=True)\n"
    (launcher.directory / "stops.py").write_text(script)
    with on_terminal(launcher, "run", "-n", "2", "stops.py") as terminal:
        terminal.until("(Pdb) ")
        terminal.type("import time; time.sleep(1)\n")  # in which the other rank has printed
        terminal.until("(Pdb) ", 2)
        assert "[rank1]: here" not in terminal.text.rpartition("stops.py(4)")[2], terminal.text
        terminal.type("c\n")
        assert terminal.end() == 0, terminal.text
    assert all(f"[rank{rank}]: here\r\n" in terminal.text for rank in (0, 1))


@pytest.mark.parametrize(("arguments", "ranks"), [((), 2), (("timeouts",), 3)])
def test_ranks_wait_for_one_in_a_debugger(launcher: Launcher, arguments: tuple[str, ...], ranks: int) -> None:
    """None of them hangs, nor does an operation time out: both limits are 5 s, which a busy machine keeps."""
    options = ("--progress-deadline", "5s", "--on-hang", "stop")
    with on_terminal(launcher, "run", "-n", str(ranks), *options, WAITED_FOR, *arguments) as terminal:
        terminal.until("(Pdb) ")
        terminal.type("import time; time.sleep(6)\n")
        terminal.until("(Pdb) ", 2)
        terminal.type("c\n")
        assert terminal.end() == 0, terminal.text
    assert "no progress" not in terminal.text
    assert all(f"rank {rank} went on" in terminal.text for rank in range(ranks)), terminal.text


def test_a_rank_killed_in_its_debugger_gives_the_terminal_back(launcher: Launcher) -> None:
    script = (
        "import os\nprint('begun', flush=True)\nif os.environ['ZBMD_INCARNATION'] == '1':\n    breakpoint()\n"
    )
    (launcher.directory / "stops.py").write_text(script)
    with on_terminal(launcher, "run", "-n", "1", "stops.py") as terminal:
        terminal.until("(Pdb) ")
        terminal.type("import os; os.kill(os.getpid(), 9)\n")
        terminal.until("failed: killed (SIGKILL)")
        assert terminal.end() == 0, terminal.text
    assert terminal.text.count("[rank0]: begun") == 2


def test_without_a_terminal_a_breakpoint_ends_the_run_in_words(launcher: Launcher, hosts: list[str]) -> None:
    ended = launcher.run("run", *hosts, "-n", "2", STOPS, "breakpoint")
    assert ended.code == 2, ended
    assert "stops in a debugger, and its run has no terminal" in ended.errors[-1] + ended.errors[-2]
    assert "--stdin" in str(ended) and "Traceback" not in str(ended)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_has_the_launchers_input_if_that_is_asked_for(
    launcher: Launcher, hosts: list[str], rank: str
) -> None:
    (launcher.directory / "reads.py").write_text(READS)
    command, environment = launcher.command(["run", *hosts, "-n", "2", "--stdin", rank, "reads.py"], "reads")
    done = subprocess.run(
        command,
        input="some words",
        env=environment,
        cwd=launcher.directory,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    other = "1" if rank == "0" else "0"
    assert sorted(done.stdout.splitlines()) == sorted(
        [f"[rank{rank}]: read 'some words'", f"[rank{other}]: read ''"]
    )
    told = f"rank {other} reads standard input, which is empty: start the run with --stdin {other} to give it"
    assert f"[rank{other}]: {told}" in done.stderr and f"rank {rank} reads" not in done.stderr


def test_a_rank_that_there_is_not_is_refused(launcher: Launcher) -> None:
    (launcher.directory / "reads.py").write_text(READS)
    for text, words in (("one", "expected a rank"), ("2", "there is no rank 2: a run of 2 has 0 to 1")):
        ended = launcher.run("run", "-n", "2", "--stdin", text, "reads.py")
        assert ended.code == 2 and "--stdin" in ended.errors[-1] and words in ended.errors[-1], ended
