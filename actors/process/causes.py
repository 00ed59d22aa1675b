"""The cause of a script's failure: what tells it from other failures, and stays when the failure repeats.

It is made of the exception's type, the place of the user's code that it passed last, the place that raised
it, and the shape of its message: numbers, addresses and paths differ from one incarnation to the next.
"""

from __future__ import annotations

import mmap
import os
import re
import site
import sysconfig
import traceback
import zlib
from typing import Final

CAUSE_MARK: Final = "|"
"""Before the part of a cause that is not for people."""
CAUSE_BYTES_MAX: Final = 400
CHAIN_MAX: Final = 16
"""Exceptions of a chain that are looked at."""

_CONSEQUENCES: Final = frozenset({"PeerLost", "MembersLost", "OperationAborted"})
"""Errors that another rank's end has: they repeat with it."""
_TOLD_BY_TEXT: Final = re.compile(r"\b(?:PeerLost|MembersLost|OperationAborted): |\bpeer (?:rank)?\d+ lost\b")
_VARYING: Final = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|(?:/[^\s/'\":,]+)+/?|\d+(?:\.\d+)?")


def cause_of(error: BaseException) -> str:
    """Return the cause of a failure, such as `ValueError at train.py:12`; empty if it follows from another's.

    Behind `CAUSE_MARK` are where it was raised and a checksum of its message's shape.
    """
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if _is_consequence(error):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if _is_users(frame.filename)] or frames
    place = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
    raised = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    shape = zlib.crc32(_VARYING.sub("#", str(error))[:CAUSE_BYTES_MAX].encode(errors="replace"))
    name = type(error).__name__
    text = f"{name}{place[-CAUSE_BYTES_MAX // 2 :]}{CAUSE_MARK}{zlib.crc32(raised.encode()):08x}{shape:08x}"
    return text[-CAUSE_BYTES_MAX:]


def _is_consequence(error: BaseException) -> bool:
    """Whether it, or what it was raised from, is about the end of another rank."""
    seen: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if seen is None:
            return False
        names = {kind.__name__ for kind in type(seen).__mro__}
        if names & _CONSEQUENCES or _TOLD_BY_TEXT.search(str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _is_users(path: str) -> bool:
    return not path.startswith(_LIBRARIES) and not path.startswith("<")


_LIBRARIES: Final = tuple(
    {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    }
)
"""Folders of code that is not the user's: Python's, installed packages, our own."""


class CausePage:
    """Memory that a process shares with the one that forks it: the cause of its failure, if it has one."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, cause: str) -> None:
        """Leave the cause there. In the fork."""
        data = cause.encode(errors="replace")[:CAUSE_BYTES_MAX].replace(b"\0", b"")
        self._page[: len(data)] = data

    def read(self) -> str:
        """Return the cause; empty if there is none. A fork may have written anything."""
        return self._page[:CAUSE_BYTES_MAX].rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        """Give the memory back, in this process."""
        self._page.close()
