"""Read the lines that a file has got since it was last read, also if it was replaced meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

CHUNK_BYTES: Final = 1 << 20


MARKED_BYTES: Final = 4096
"""Lines end alike, but not so many bytes of them."""


@dataclass(frozen=True, slots=True)
class Position:
    """The end of what was read. inode: which file it is, whatever its name is now; 0: none yet.

    mark: a digest of the last bytes that were read, since another file may have got the inode of one that
    was removed.
    """

    inode: int = 0
    read_bytes: int = 0
    mark: bytes = b""

    def is_in(self, file: BinaryIO) -> bool:
        """Whether `file` is the one that was read."""
        if os.fstat(file.fileno()).st_ino != self.inode:
            return False
        return _mark(file, self.read_bytes) == self.mark


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of one file, and where they end. is_new_file: it was not the one of the position before.

    files_lost: files that are gone, and may have got more lines after they were read.
    """

    lines: list[bytes]
    position: Position
    is_new_file: bool
    files_lost: int = 0


def new_lines(path: Path, old: Path | None, position: Position, *, line_bytes_max: int) -> Iterator[Lines]:
    """Yield the lines behind `position`, about `CHUNK_BYTES` at a time. A last line without an end waits.

    old: the name that a full file gets when the next one is begun; None: a file that is replaced begins
    again. A line of more than `line_bytes_max` is left out. Raises `OSError`, but not for a missing file.
    """
    files: list[BinaryIO] = []
    try:
        for each in (path, old):  # in this order: a file that is renamed between the two is met twice
            if each is not None:
                with contextlib.suppress(FileNotFoundError):
                    files.append(each.open("rb"))
        if len(files) == 2 and os.path.samestat(*(os.fstat(file.fileno()) for file in files)):
            files.pop().close()
        ordered = files[::-1]
        known = next((file for file in ordered if position.inode and position.is_in(file)), None)
        if old is not None and position.inode and known is None:
            yield Lines([], Position(), is_new_file=False, files_lost=1)
        for file in ordered[0 if known is None else ordered.index(known) :]:
            is_new_file = file is not known
            file.seek(0 if is_new_file else position.read_bytes)
            for lines, position in _complete_lines(file, line_bytes_max):
                yield Lines(lines, position, is_new_file)
                is_new_file = False
    finally:
        for file in files:
            file.close()


def _complete_lines(file: BinaryIO, line_bytes_max: int) -> Iterator[tuple[list[bytes], Position]]:
    """Yield complete lines from where `file` is, and the position behind them."""
    inode, end, rest = os.fstat(file.fileno()).st_ino, file.tell(), b""
    while chunk := file.read(CHUNK_BYTES):
        data = rest + chunk
        whole = data.rfind(b"\n") + 1
        if whole:
            end += whole
            lines = [line for line in data[:whole].split(b"\n") if 0 < len(line) <= line_bytes_max]
            yield lines, Position(inode, end, _mark(file, end))
        rest = data[whole:]
        if len(rest) > line_bytes_max:
            # Damage: what follows is read up to the next end of a line, and left out with it.
            end = _skipped_line(file)
            yield [], Position(inode, end, _mark(file, end))
            rest = b""


def _skipped_line(file: BinaryIO) -> int:
    """Read to the end of the line, and return where that is."""
    while chunk := file.read(CHUNK_BYTES):
        found = chunk.find(b"\n")
        if found >= 0:
            return file.seek(found + 1 - len(chunk), os.SEEK_CUR)
    return file.tell()


def _mark(file: BinaryIO, end: int) -> bytes:
    """Return the digest of what is before `end`, without moving there."""
    begin = max(0, end - MARKED_BYTES)
    return hashlib.blake2b(os.pread(file.fileno(), end - begin, begin), digest_size=16).digest()
