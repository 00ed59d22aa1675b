"""Bytes as a script: what an enemy does, one small instruction after the other.

Whatever the bytes are, they are a script, so a mutation of one is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Script:
    """Reads numbers and blocks; at the end there is nothing but zeros and empty blocks."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        """Whether all has been read."""
        return self._at >= len(self._data)

    def take(self, nbytes: int) -> bytes:
        """The next bytes, fewer at the end."""
        part = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return part

    def number(self, width: int) -> int:
        """The next unsigned number of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def block(self) -> bytes:
        """The next bytes that say their own length."""
        return self.take(self.number(2))

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))


def block(data: bytes) -> bytes:
    """What `Script.block` reads."""
    return len(data).to_bytes(2, "little") + data


def blocks(parts: Iterable[bytes]) -> bytes:
    """Several, one behind the other."""
    return b"".join(map(block, parts))


def read_blocks(data: bytes, count_max: int) -> Iterator[bytes]:
    """The blocks of a script, at most so many."""
    script = Script(data)
    for _ in range(count_max):
        if script.ended:
            return
        yield script.block()
