"""Lines of a rank's output (sans-I/O): cut from bytes, shown as a terminal would, with exit reasons apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from zbmd.actors.process.exit import MARK, MARKS_BEGIN

LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is cut, unless it is one that is rewritten: of that the last state is kept."""
_ERASE = re.compile(r"\x1b\[([012]?)K")


class LineAssembler:
    """Cuts a stream of bytes into lines of at most `LINE_BYTES_MAX` bytes."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` completes."""
        self._partial += data
        while True:
            end = self._partial.find(b"\n", 0, LINE_BYTES_MAX + 1)
            if end >= 0:
                yield bytes(self._partial[:end])
                del self._partial[: end + 1]
            elif len(self._partial) <= LINE_BYTES_MAX:
                return
            elif self._partial.find(b"\r", 0, LINE_BYTES_MAX) >= 0:  # a bar that has moved for long
                line, rest = bytes(self._partial[:LINE_BYTES_MAX]), self._partial[LINE_BYTES_MAX:]
                collapsed = collapse(line)
                if len(collapsed) == len(line):
                    yield line
                    collapsed = b""
                self._partial = bytearray(collapsed) + rest
            else:
                yield bytes(self._partial[:LINE_BYTES_MAX])
                del self._partial[:LINE_BYTES_MAX]

    def unfinished(self) -> bytes:
        """Return the line that has no end yet; of one that is rewritten, what is still to be seen of it."""
        if b"\r" in self._partial:
            self._partial = bytearray(collapse(bytes(self._partial)))
        return bytes(self._partial)

    def end(self) -> Iterator[bytes]:
        """Yield the rest that has no newline."""
        if self._partial:
            yield bytes(self._partial)
            self._partial.clear()


def rendered(line: bytes) -> bytes:
    """Return what a terminal shows of a line that carriage returns rewrite, as those of progress bars do."""
    line = line.rstrip(b"\r")
    if b"\r" not in line:
        return line
    shown = ""
    for segment in line.decode(errors="surrogateescape").split("\r"):  # any bytes, and back
        shown = _written_over(shown, segment)
    return shown.rstrip(" ").encode(errors="surrogateescape")


def collapse(line: bytes) -> bytes:
    """Return a shorter line that looks the same, also after more is written to it."""
    before, found, last = line.rpartition(b"\r")
    return rendered(before) + found + last


def _written_over(shown: str, segment: str) -> str:
    """Return a line after text was written over its beginning; of escape sequences erasures are known."""
    parts = _ERASE.split(segment)
    if any("\x1b" in text for text in parts[::2]):  # colours, whose width is none
        return segment
    cursor = 0
    for text, erased in zip(parts[::2], [*parts[1::2], None], strict=True):
        shown = shown[:cursor] + text + shown[cursor + len(text) :]
        cursor += len(text)
        if erased in ("", "0"):
            shown = shown[:cursor]
        elif erased is not None:  # to its beginning, or all of it
            shown = " " * cursor + (shown[cursor:] if erased == "1" else "")
    return shown


def without_marks(line: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a line that are lines of their own, and whether each belongs to an exit reason.

    An exit reason is written at once, whatever is on the line: a progress bar, say.
    """
    before, *reasons = line.split(MARK)
    if before or not reasons:
        yield before, False
    for reason in reasons:
        yield reason, True


def showable(unfinished: bytes) -> bytes:
    """Return what can be shown of a line without an end: no exit reason, no part of a mark or character."""
    before, found, _ = unfinished.partition(MARKS_BEGIN)
    if not found:
        for size in range(min(len(MARKS_BEGIN) - 1, len(before)), 0, -1):
            if before.endswith(MARKS_BEGIN[:size]):
                before = before[:-size]
                break
    for size in range(1, min(4, len(before) + 1)):
        lead = before[-size]
        if lead < 0x80:
            break
        if lead >= 0xC0:  # the first byte of a character of two to four
            wanted = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return before[:-size] if size < wanted else before
    return before
