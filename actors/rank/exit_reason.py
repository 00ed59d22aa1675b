"""What a rank says as it ends: why, on its standard error and marked, so that its host can tell it once.

Ranks that fail often fail together and for the same reason. Without the mark their host could only print all
of it as it comes.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from zbmd.transport.errors import ArenaFull, OutOfMemory, UserError

MARK: Final = b"\x1ezbmd:last-words\x1e"
"""Begins each marked line; ASCII's record separators, so that no text begins so by accident."""

STDERR_FD: Final = 2


def say_last_words(text: str) -> None:
    """Write all of `text` to standard error at once, each line marked."""
    sys.stderr.flush()
    data = b"".join(MARK + line.encode(errors="replace") + b"\n" for line in text.splitlines())
    while data:
        data = data[os.write(STDERR_FD, data) :]


def without_mark(line: bytes) -> tuple[bytes, bool]:
    """The line as it is to be shown, and whether it was marked."""
    return line.removeprefix(MARK), line.startswith(MARK)


def is_users_to_mend(error: BaseException) -> bool:
    """Whether a traceback would not help: the error's one paragraph says what to do."""
    return isinstance(error, UserError | OutOfMemory) and not isinstance(error, ArenaFull)
