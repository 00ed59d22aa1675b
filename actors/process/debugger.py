"""Debuggers in ranks: the rank that stops in one gets the terminal of its run, and the others' output waits.

A terminal has one reader at a time: the process that has locked it (flock). That is the launcher, unless a
rank that stops in a debugger asks for it by a mark on its standard error. Then the launcher stops drawing,
unlocks it, and waits until the ranks that want it have had it. A rank that ends has given it back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import pdb
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from zbmd.actors.process.exit import STDERR_FD, TERMINAL_BACK_MARK, TERMINAL_MARK
from zbmd.transport.errors import UserError

TERMINAL_VARIABLE: Final = "ZBMD_TERMINAL"
"""The path of the terminal that a run's ranks may ask for."""
TAKE_S: Final = 5.0
"""For a rank to lock it then, before the launcher takes it back."""
LOOK_S: Final = 0.005


# --- in the launcher --------------------------------------------------------------------------------------


class TerminalLock:
    """The launcher's lock on its terminal at `path`."""

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd

    def lend(self, is_back: Callable[[], bool]) -> None:
        """Let ranks have it, and wait until those that asked have given it back. May take long.

        is_back: whether the rank has had it already.
        """
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        end_s = time.monotonic() + TAKE_S
        while time.monotonic() < end_s and not is_back():
            if not _is_free(self._fd):
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                return
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            time.sleep(LOOK_S)
        fcntl.flock(self._fd, fcntl.LOCK_EX)


def _is_in_front() -> bool:
    """Return whether no shell that reads the terminal has put this process into its background."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError as error:
        return error.errno == errno.ENOTTY  # it is no shell's: a script's, say


@functools.cache
def terminal_of_run() -> TerminalLock | None:
    """Lock the terminal in the foreground of which this process is; None if there is none to give to ranks.

    It stays locked until this process ends.
    """
    try:
        if not os.isatty(0) or not _is_in_front():
            return None
        path = os.ttyname(0)
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if not _is_free(fd):  # another run has it
        os.close(fd)
        return None
    return TerminalLock(fd, path)


def _is_free(fd: int) -> bool:
    """Lock the terminal; return False if another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- in a rank --------------------------------------------------------------------------------------------


class NoInput(io.RawIOBase):
    """Standard input of a rank that has none: the first read says how to get one."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def fileno(self) -> int:
        """See `io.RawIOBase`."""
        return 0

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`: there is nothing."""
        if not self._told:
            self._told = True
            rank = os.environ.get("RANK", "?")
            print(
                f"rank {rank} reads standard input, which is empty: start the run with --stdin {rank} to "
                "give it that of the launcher",
                file=sys.stderr,
                flush=True,
            )
        return 0


def _has_no_input() -> bool:
    try:
        return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


def _ask(mark: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(STDERR_FD, mark + b"\n")


class _Debugged:
    """The terminal while this process has it: its standard streams are the terminal's."""

    def __init__(self, path: str) -> None:
        self._kept = [os.dup(fd) for fd in (0, 1, 2)]
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        _ask(TERMINAL_MARK)
        self._fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # the launcher's, or another rank's, which may take hours
        for fd in (0, 1, 2):
            os.dup2(self._fd, fd)
        self.stdin = open(0, closefd=False)  # noqa: SIM115 (of the terminal, as long as this has it)

    def give_back(self) -> None:
        """Have the streams of before again."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        for fd, kept in enumerate(self._kept):
            os.dup2(kept, fd)
            os.close(kept)
        os.close(self._fd)
        _ask(TERMINAL_BACK_MARK)


_debugged: _Debugged | None = None


def install() -> None:
    """Have debuggers of this process ask for the terminal, and put `NoInput` in the place of no input."""
    original = pdb.Pdb.interaction
    if not hasattr(original, "__wrapped__"):
        pdb.Pdb.interaction = _with_terminal(original)  # type: ignore[method-assign]
    if _has_no_input():
        sys.stdin = io.TextIOWrapper(io.BufferedReader(NoInput()), encoding="utf-8")


def _with_terminal(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def interaction(self: pdb.Pdb, *args: Any, **kwargs: Any) -> None:
        global _debugged
        if _debugged is None:
            _debugged = _terminal_for(self)
        if _debugged is None:  # standard input is a pipe or a file: of commands, say
            original(self, *args, **kwargs)
            return
        before, sys.stdin = sys.stdin, _debugged.stdin
        try:
            original(self, *args, **kwargs)
        finally:
            sys.stdin = before
            if not _steps(self):
                _debugged.give_back()
                _debugged = None

    return interaction


def _steps(debugger: pdb.Pdb) -> bool:
    """Return whether the debugger stops again soon: after a step, and not after `continue` or `quit`."""
    quits = bool(getattr(debugger, "quitting", False))
    return sys.gettrace() is not None and not quits and getattr(debugger, "stoplineno", -1) != -1


def _terminal_for(debugger: pdb.Pdb) -> _Debugged | None:
    """Get the terminal; None if standard input is something else. Raises `UserError` if there is neither."""
    path = os.ttyname(0) if os.isatty(0) else os.environ.get(TERMINAL_VARIABLE, "")
    if path:
        return _Debugged(path)
    if not _has_no_input():
        return None
    debugger.set_quit()
    rank = os.environ.get("RANK", "?")
    raise UserError(
        f"rank {rank} stops in a debugger, and its run has no terminal: start the run in the foreground of "
        f"one, or with --stdin {rank} and the debugger's commands as its standard input, or take the "
        "breakpoint out"
    )
