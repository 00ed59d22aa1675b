"""What a process asks of the kernel for itself (prctl, see its manual page)."""

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
    """Set what `ps -o comm` and `top` show for this process; they keep `NAME_BYTES_MAX` bytes of it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:NAME_BYTES_MAX]))


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that made it ends.

    If the parent has ended already, this process ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _prctl(option: int, argument: ctypes.c_char_p | ctypes.c_ulong) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
