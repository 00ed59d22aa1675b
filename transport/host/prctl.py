"""Attributes of the calling process: its name, parent-death signal and child subreaper (see prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

NAME_BYTES_MAX: Final = 15

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show, cut to `NAME_BYTES_MAX` bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES_MAX]))


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends.

    Exits at once if the parent has already ended.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _prctl(option: int, argument: ctypes.c_char_p | ctypes.c_ulong) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
