"""Sans-I/O: how an array that is longer than one message travels, and what memory its pieces take.

The first piece travels in the message itself. Once a receive has matched it, the receiver asks for the rest:
it says how many it has read, and the sender has at most `PIECES_AHEAD` more under way. So a sender copies
only what a receiver is about to read. No send waits for memory that another send holds: a piece for which the
arena has no room travels in its message, and is shorter.

A receive that gives up leaves the message to the next one, which reads it from the start: each reading has a
number of its own, and pieces of an earlier one are dropped.
"""

from __future__ import annotations

from typing import Final

from zbmd.collectives.device.arrays_in import Array
from zbmd.transport.errors import ArenaFull, RemoteProtocolError
from zbmd.transport.memory.arena import Arena

PIECE_BYTES_MAX: Final = 1 << 20
"""A piece in the arena; it is still in a core's cache when its digest is computed."""
PIECES_AHEAD: Final = 4
"""Pieces that the sender has copied and the receiver has not read."""
ROOM_BYTES_MAX: Final = 32 << 20
"""Memory of the arena for the pieces of all messages of a process, at most."""
ROOM_SHARE: Final = 4
"""They take this part of a small arena, at most."""


class Outgoing:
    """The pieces after the first of one message, at its sender."""

    def __init__(self, nbytes: int, first_bytes: int) -> None:
        self._nbytes, self._first_bytes = nbytes, first_bytes
        self._begin(0)

    def _begin(self, reading: int) -> None:
        self._reading, self.offset = reading, self._first_bytes
        self._made = self._read = 0

    @property
    def reading(self) -> int:
        """The reading that the pieces are for."""
        return self._reading

    @property
    def next(self) -> int:
        """The number of the next piece."""
        return self._made

    def asked(self, reading: int, read: int) -> list[int]:
        """Return the numbers of the pieces whose memory is free: `read` of this reading have been read.

        Raises `RemoteProtocolError` if it cannot have.
        """
        freed = range(self._read, self._made)
        if reading < self._reading:
            raise RemoteProtocolError(f"reading {reading} of a message follows reading {self._reading}")
        if reading > self._reading:
            self._begin(reading)
        else:
            freed = range(self._read, read)
        if not self._read <= read <= self._made:
            raise RemoteProtocolError(f"{read} pieces of a message were read: {self._made} were sent")
        self._read = read
        return list(freed)

    def next_bytes(self) -> int:
        """Return how long the next piece may be; 0: none may be sent now."""
        if self._made - self._read >= PIECES_AHEAD:
            return 0
        return min(PIECE_BYTES_MAX, self._nbytes - self.offset)

    def made(self, nbytes: int) -> None:
        """Note that a piece of `nbytes` is sent."""
        assert 0 < nbytes <= self.next_bytes(), f"a piece of {nbytes} bytes"
        self.offset += nbytes
        self._made += 1


class Incoming:
    """The pieces after the first of one message, in one reading of it."""

    def __init__(self, nbytes: int, first_bytes: int, reading: int) -> None:
        self.reading = reading
        self.read = 0
        self.offset = first_bytes
        self._nbytes = nbytes
        self._came, self._came_to = 0, first_bytes

    @property
    def whole(self) -> bool:
        """Whether all of the message has been read."""
        return self.offset == self._nbytes

    def came(self, reading: int, number: int, nbytes: int) -> bool:
        """Note a piece; return whether it is one of this reading.

        Raises `RemoteProtocolError` if it is out of order, empty or too much.
        """
        if reading != self.reading:
            return False
        end = self._came_to + nbytes
        fits = self._came_to < end <= self._nbytes
        if number != self._came or number - self.read >= PIECES_AHEAD or not fits:
            raise RemoteProtocolError(
                f"piece {number} of {nbytes} bytes follows {self._came} pieces that end at byte "
                f"{self._came_to} of {self._nbytes}"
            )
        self._came, self._came_to = number + 1, end
        return True

    def took(self, nbytes: int) -> None:
        """Note that the oldest piece is read."""
        self.read += 1
        self.offset += nbytes


class PieceRoom:
    """The memory of the arena that the pieces of one process's messages may take."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free_bytes = min(ROOM_BYTES_MAX, arena.capacity_bytes // ROOM_SHARE)

    def take(self, nbytes: int) -> Array | None:
        """Return memory for a piece; None if there is none now. Give it back by `free`."""
        if nbytes > self._free_bytes:
            return None
        try:
            memory = self._arena.empty(nbytes, "u1")
        except ArenaFull:
            return None
        self._free_bytes -= nbytes
        return memory

    def free(self, nbytes: int) -> None:
        """Note that memory of `nbytes` is no longer used."""
        self._free_bytes += nbytes
