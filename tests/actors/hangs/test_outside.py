"""Processes seen from outside: real ones that are stopped, asleep and gone, and a made-up /proc."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from zbmd.actors.hangs.loop_watch import look_outside


@pytest.fixture
def sleeper() -> Generator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_that_is_stopped_and_goes_on(sleeper: subprocess.Popen[bytes]) -> None:
    pid = sleeper.pid
    os.kill(pid, signal.SIGSTOP)
    assert os.waitid(os.P_PID, pid, os.WSTOPPED) is not None
    assert look_outside(pid) == f"(pid {pid}) is stopped (SIGSTOP): kill -CONT {pid} lets it go on"
    os.kill(pid, signal.SIGCONT)
    assert os.waitid(os.P_PID, pid, os.WCONTINUED) is not None
    words = look_outside(pid)
    assert words is not None and "lives, but runs no Python" in words


def test_a_process_that_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    pidfd = os.pidfd_open(sleeper.pid)
    sleeper.kill()
    select.select([pidfd], [], [])
    os.close(pidfd)
    assert look_outside(sleeper.pid) is None, "a zombie is gone"
    sleeper.wait()
    assert look_outside(sleeper.pid) is None


def make_process(proc: Path, state: str, threads: dict[int, tuple[str, str]]) -> None:
    folder = proc / "7"
    for name, (thread_state, wchan) in {0: (state, "ep_poll"), **threads}.items():
        where = folder / "task" / str(name) if name else folder
        where.mkdir(parents=True, exist_ok=True)
        (where / "status").write_text(f"Name:\tpython\nState:\t{thread_state} (words)\n")
        (where / "wchan").write_text(wchan)


@pytest.mark.parametrize(
    ("state", "threads", "words"),
    [
        ("t", {}, "(pid 7) is stopped by a debugger"),
        ("S", {7: ("S", "0"), 8: ("D", "nfs_wait")}, "is in uninterruptible sleep in nfs_wait: a device or"),
        ("S", {7: ("S", "do_freezer_trap")}, "is frozen by its control group"),
        ("R", {7: ("R", "0")}, "native code keeps the GIL (its main thread runs)"),
        ("S", {7: ("S", "ep_poll")}, "native code keeps the GIL (its main thread sleeps in ep_poll)"),
    ],
)
def test_words_for_each_state(
    tmp_path: Path, state: str, threads: dict[int, tuple[str, str]], words: str
) -> None:
    make_process(tmp_path, state, threads)
    assert words in str(look_outside(7, tmp_path))
