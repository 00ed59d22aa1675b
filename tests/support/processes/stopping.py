"""Stopping or killing another process, all of it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from support.processes.polling import wait_until


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP; none of its threads runs when this returns.

    `kill` returns earlier: one thread takes the signal, and as long as that one waits for a processor the
    others go on. Raises `ProcessLookupError` if there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)


def await_stop(pid: int) -> None:
    """Return once no thread of a process runs, because it was sent SIGSTOP."""
    wait_until(lambda: states_of_threads(pid) <= {"T", "t", "Z", "X"})


def kill(pid: int) -> None:
    """Kill a process by SIGKILL; it has ended when this returns, whether its parent has heard of it or not.

    `os.kill` returns earlier: a thread that waits for a processor, or is in the kernel, ends later.
    """
    os.kill(pid, signal.SIGKILL)

    def has_ended() -> bool:
        try:
            return states_of_threads(pid) <= {"Z", "X"}
        except ProcessLookupError:
            return True

    wait_until(has_ended)


def states_of_threads(pid: int) -> set[str]:
    """Return the states of the threads of a process. Raises `ProcessLookupError` if there is no such one."""
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended
            states.add(path.read_text().rpartition(")")[2].split()[0])
    if not states:
        raise ProcessLookupError(pid)
    return states
