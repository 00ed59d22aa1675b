"""Launches of `zbmd-node` in forks of this process, which has imported it, so that each begins at once."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final

from zbmd.tools.cli import process
from zbmd.tools.node import cli

LOADED: Final = (
    *("zbmd.tools.node.run_many", "zbmd.tools.node.run", "zbmd.tools.cli.launch", "zbmd.tools.train.command"),
    *("zbmd.collectives.group.group", "zbmd.training.sharded.run", "zbmd.training.job.data_parallel"),
)
MEMORY: Final = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES: Final = 700 << 20
LOOK_S: Final = 0.02


class Launched:
    """A launcher that runs."""

    def __init__(self, pid: int, printed: Path) -> None:
        self.pid = pid
        self.printed = printed
        self._pidfd = os.pidfd_open(pid)
        self.code: int | None = None

    def until(self, pattern: str, seconds: float) -> None:
        """Wait until it, or one of its ranks, has printed what matches. Raises `TimeoutError`."""
        end_s = time.monotonic() + seconds
        while re.search(pattern, self.printed.read_text(errors="replace")) is None:
            if time.monotonic() > end_s or select.select([self._pidfd], [], [], LOOK_S)[0]:
                raise TimeoutError(f"{self.printed} has no {pattern!r}:\n{self.printed.read_text()[-2000:]}")

    def end(self, seconds: float) -> int:
        """Wait for its end, and return its exit code, or minus the signal. One that takes longer is killed.

        Raises `TimeoutError` then.
        """
        if self.code is None:
            ended = bool(select.select([self._pidfd], [], [], seconds)[0])
            if not ended:
                os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
            if not ended:
                raise TimeoutError(f"still there after {seconds:g} s:\n{self.printed.read_text()[-2000:]}")
        return self.code


@contextlib.contextmanager
def launched(
    directory: Path,
    argv: Sequence[str],
    *,
    printed: str = "printed.log",
    enter: Callable[[], object] | None = None,
) -> Generator[Launched]:
    """Run `zbmd-node argv` in `directory`, all that it prints in a file there; it ends with the context.

    enter: called in the fork, ahead of all else.
    """
    for module in LOADED:
        importlib.import_module(module)
    output = directory / printed
    output.touch()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _become(directory, argv, output, enter)
    job = Launched(pid, output)
    try:
        yield job
    finally:
        if job.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            job.end(1.0)


def _become(directory: Path, argv: Sequence[str], output: Path, enter: Callable[[], object] | None) -> None:
    """Run the command in this fork; never returns."""
    code = 1
    try:
        os.setsid()
        if enter is not None:
            enter()
        fds = (os.open("/dev/null", os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_APPEND))
        for place, fd in zip((0, 1, 2), (*fds, fds[1]), strict=True):
            os.dup2(fd, place)
        os.closerange(3, 1024)
        os.chdir(directory)
        os.environ["XDG_STATE_HOME"] = str(directory / "state")
        sys.argv = ["zbmd-node", *argv]
        code = process.run(lambda: cli.main(argv))  # in ranks, too, which are forks of this one
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 (the end of the fork)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code & 0xFF)


@contextlib.contextmanager
def memory_limit(name: str) -> Generator[Callable[[], object]]:
    """Make a cgroup with a limit of memory; gives what moves a process there. Raises `OSError`."""
    group = MEMORY / f"zbmd-faults-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        for _ in range(200):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(LOOK_S)  # the kernel still ends its processes


def can_limit_memory() -> bool:
    """Whether this user may make such a cgroup."""
    return (MEMORY / "memory.limit_in_bytes").exists() and os.access(MEMORY, os.W_OK)
