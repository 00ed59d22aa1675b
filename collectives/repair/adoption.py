"""Inputs that outlive their rank: published in its arena, read after its death, and added to the result.

The owner writes a record into its own arena, the digest last: (sequence, offset, bytes) of an array that does
not change until the operation has ended on all members. Peers map the arena, and read the record only after
the kernel has confirmed the owner's end (only then is a view entered), so it cannot change any more.

Methods that take a communicator run on the data-plane thread of all members that repeat the operation, and
raise as its methods do.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from zbmd.actors.rank.member import Peer
from zbmd.actors.view import MemberId
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.device.arrays_in import Array
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.segment import PeerSegment

_COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class AdoptedInput:
    """The published input of the dead `member`. `carrier` contributes it; `memory` is given only there."""

    member: MemberId
    carrier: int
    memory: memoryview | None

    def like(self, given: Array) -> Array | None:
        """Return the memory as a read-only array like this rank's own input; None if it is not given."""
        if self.memory is None:
            return None
        return np.frombuffer(self.memory, given.dtype).reshape(given.shape)


@dataclass(frozen=True, slots=True)
class AdoptedInputs:
    """The adopted inputs of an operation, equal on all members but for the memory; `contributors`: with
    survivors.
    """

    bequests: tuple[AdoptedInput, ...]
    contributors: tuple[MemberId, ...]

    def added_to(self, given: Array, op: str) -> Array:
        """Return `given` reduced with the inputs that this rank carries. 16-bit floats become float32."""
        dtype = given.dtype
        wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
        total = given.astype(wide)
        for each in self.bequests:
            theirs = each.like(given)
            if theirs is not None:
                _COMBINE[op](total, theirs, out=total)
        return total

    def finished(self, total: Array, op: str, dtype: np.dtype[Any]) -> Array:
        """Return a complete reduction in the caller's dtype; an average, which was summed, is divided."""
        if op == "avg":
            total /= len(self.contributors)
        return total.astype(dtype)

    def rows_with(self, living: Array) -> Array:
        """Return a new array with a row for each contributor; the survivors' rows are filled in, in rank
        order.
        """
        value = np.empty((len(self.contributors), *living.shape[1:]), living.dtype)
        dead = {each.member for each in self.bequests}
        value[[i for i, member in enumerate(self.contributors) if member not in dead]] = living
        return value

    def row_of(self, bequest: AdoptedInput, value: Array) -> Array:
        """Return the row of `value` of this adopted input."""
        row: Array = value[self.contributors.index(bequest.member), ...]
        return row

    def in_order(self, came: Array, ranks: tuple[int, ...], rows: Mapping[MemberId, int]) -> Array:
        """Return the contributors' rows in order, given `came`: the rows that each of `ranks` has sent, in
        that order.

        Each rank sends its own rows and then those of the dead members that it carries, as many of each as
        `rows` says.
        """
        dead = {each.member for each in self.bequests}
        living = {member.rank: member for member in self.contributors if member not in dead}
        blocks: dict[MemberId, Array] = {}
        begin = 0
        for rank in ranks:
            for member in (living[rank], *(each.member for each in self.bequests if each.carrier == rank)):
                end = begin + rows[member]
                blocks[member], begin = came[begin:end], end
        return np.concatenate([blocks[member] for member in self.contributors])

    def bring(self, c: Communicator, given: Array, value: Array | None, deadline_ns: int) -> None:
        """Fill in the rows of dead members in `value`, where it exists; called by all of `c`. `given`: the
        own row.
        """
        for each in self.bequests:
            row = np.empty_like(given) if value is None else self.row_of(each, value)
            theirs = each.like(given)
            if theirs is not None:
                row[...] = theirs
            c.broadcast(row, c.members.index(each.carrier), deadline_ns=deadline_ns)


def summed(op: str) -> str:
    """Return the reduction of the contributions to `op`; an average is summed first."""
    return "sum" if op == "avg" else op


_WORDS = struct.Struct("=3Q")
RECORD_BYTES = 8 + _WORDS.size


class Publication:
    """The record of this rank."""

    def __init__(self, arena: Arena) -> None:
        """Raises `ArenaFull`."""
        self._arena = arena
        self._record = arena.empty(RECORD_BYTES // 8, np.uint64)
        self._record[:] = 0
        at = arena.offset_of(self._record)
        assert at is not None
        self.at = at

    def publish(self, sequence: int, array: Array) -> None:
        """Publish `array`, in the arena, as this rank's contribution to operation `sequence`."""
        offset = self._arena.offset_of(array)
        if offset is None:
            raise LocalProtocolError("what is published must lie in the arena")
        words = (sequence, offset, array.nbytes)
        self._record[0] = 0
        self._record[1:] = words
        self._record[0] = _digest(words)

    def withdraw(self) -> None:
        """Withdraw the record: the array belongs to the caller again."""
        self._record[0] = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """A peer's arena, which begins at `base` of its segment, and the position of its record."""

    arena: memoryview
    base: int
    record_at: int


class RetainedMemory:
    """Memory of peers that is kept mapped during an operation that may adopt inputs."""

    def __init__(self) -> None:
        self.records: dict[MemberId, int] = {}
        """The position of each member's record, as it reported; 0: it publishes nothing."""
        self._kept: dict[MemberId, _Kept] = {}

    @property
    def of(self) -> tuple[MemberId, ...]:
        """Return the members whose memory is kept."""
        return tuple(self._kept)

    def keep(self, members: tuple[MemberId, ...], peers: Mapping[int, Peer]) -> None:
        """Keep the memory of these members if it is mapped."""
        for member in members:
            peer = peers.get(member.rank)
            if peer is None or peer.incarnation != member.incarnation or member in self._kept:
                continue
            memory, record_at = peer.memory, self.records.get(member)
            if isinstance(memory, PeerSegment) and record_at:
                arena = memory.arena_view(memory.arena_offset, memory.nbytes - memory.arena_offset)
                self._kept[member] = _Kept(arena, memory.arena_offset, record_at)

    def read(self, member: MemberId, sequence: int) -> memoryview | None:
        """See `read_published`; None for a member whose memory is not kept."""
        kept = self._kept.get(member)
        if kept is None:
            return None
        return read_published(kept.arena, kept.base, kept.record_at, sequence)

    def clear(self) -> None:
        """Release all memory."""
        self._kept.clear()


def read_published(arena: memoryview, base: int, at: int, sequence: int) -> memoryview | None:
    """Return what a dead rank published for operation `sequence`, or None.

    `arena`: the mapped arena, which begins at `base` of its segment. Its content is untrusted: a record that
    points outside counts as not published. `ElasticOperation.adoptable` checks that it fits the operation.
    """
    begin = at - base
    if not 0 <= begin <= len(arena) - RECORD_BYTES:
        return None
    digest = int.from_bytes(arena[begin : begin + 8], "little")
    words = _WORDS.unpack(arena[begin + 8 : begin + RECORD_BYTES])
    if digest != _digest(words) or words[0] != sequence:
        return None
    start, nbytes = words[1] - base, words[2]
    if not 0 <= start <= len(arena) - nbytes:
        return None
    return arena[start : start + nbytes]


def _digest(words: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(_WORDS.pack(*words)) | 1
