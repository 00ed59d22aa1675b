"""The driver of `pieces`: copies in the sender's arena, and the pieces that a receiver waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from zbmd.actors.rank.member import Worker
from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.p2p.pieces import PIECE_BYTES_MAX, Incoming, Outgoing, PieceRoom
from zbmd.transport.errors import ZbmdError
from zbmd.transport.memory.region import RegionHandle

INLINE_BYTES_MAX: Final = 64 << 10
"""A longer piece lies in the arena; this much travels in a message."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a message: `data`, or where they lie in the sender's arena, and their XXH3."""

    data: bytes
    lent: RegionHandle | None = None
    digest: bytes = b""

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.data) if self.lent is None else self.lent.nbytes


_rooms: WeakKeyDictionary[Worker, PieceRoom] = WeakKeyDictionary()


def _room_of(worker: Worker) -> PieceRoom:
    room = _rooms.get(worker)
    if room is None:
        room = _rooms[worker] = PieceRoom(worker.segment.arena)
    return room


class Lending:
    """The bytes of one message that are sent: whole if they lie in the arena, or in pieces.

    array: flat, of bytes. It must not change until `end`.
    """

    def __init__(self, worker: Worker, array: Array) -> None:
        self._worker, self._array = worker, array
        self._room = _room_of(worker)
        self._slots: dict[int, RegionHandle] = {}
        """The pieces in the arena, by number; -1 is the first."""
        self._whole: RegionHandle | None = None
        self.first = self._first()
        self._outgoing = Outgoing(array.nbytes, self.first.nbytes)

    def _first(self) -> Piece:
        offset = self._worker.segment.arena.offset_of(self._array)
        if offset is None or self._array.nbytes <= INLINE_BYTES_MAX:
            return self._piece(-1, 0, min(PIECE_BYTES_MAX, self._array.nbytes))
        self._whole = self._worker.segment.regions.lend(self._array, offset, writable=False)
        return Piece(b"", self._whole, xxhash.xxh3_64_digest(self._array.data))

    def _piece(self, number: int, offset: int, nbytes: int) -> Piece:
        memory = self._room.take(nbytes) if nbytes > INLINE_BYTES_MAX else None
        if memory is None:
            return Piece(self._array[offset : offset + min(nbytes, INLINE_BYTES_MAX)].tobytes())
        np.copyto(memory, self._array[offset : offset + nbytes])
        segment = self._worker.segment
        at = segment.arena.offset_of(memory)
        assert at is not None, "it was allocated there"
        handle = self._slots[number] = segment.regions.lend(memory, at, writable=False)
        return Piece(b"", handle, xxhash.xxh3_64_digest(memory.data))

    def asked(self, reading: int, read: int) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces to send now, and their numbers. Raises `RemoteProtocolError`."""
        for number in self._outgoing.asked(reading, read):
            self._free(number)
        while nbytes := self._outgoing.next_bytes():
            number = self._outgoing.next
            piece = self._piece(number, self._outgoing.offset, nbytes)
            self._outgoing.made(piece.nbytes)
            yield number, piece

    def _free(self, number: int) -> None:
        handle = self._slots.pop(number, None)
        if handle is not None:
            self._worker.segment.regions.take_back(handle)
            self._room.free(handle.nbytes)

    def end(self) -> None:
        """Give all memory back. Idempotent."""
        for number in list(self._slots):
            self._free(number)
        whole, self._whole = self._whole, None
        if whole is not None:
            self._worker.segment.regions.take_back(whole)


@dataclass(slots=True)
class Reading:
    """The pieces of one message that is being received; bounded by `Incoming`."""

    incoming: Incoming
    _pieces: deque[Piece] = field(default_factory=deque[Piece])
    _waiter: asyncio.Future[None] | None = None
    _error: ZbmdError | None = None

    def came(self, reading: int, number: int, piece: Piece) -> None:
        """Take a piece. Raises `RemoteProtocolError`."""
        if self.incoming.came(reading, number, piece.nbytes):
            self._pieces.append(piece)
            self._wake()

    def fail(self, error: ZbmdError) -> None:
        """Have the receive fail: no more pieces come."""
        self._error = error
        self._wake()

    async def next(self) -> Piece:
        """Return the next piece; wait for it."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._pieces.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
