"""Contributions that outlive their rank: where it published its input, read from its arena after its end.

The owner writes a record into its own arena, the digest last: (sequence, offset, bytes) of an array that
stays as it is until the operation is over on all. Peers map the arena, and read the record only once the
kernel has proven the owner's end (a view is entered only then): so what they read does not change any more.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from zbmd.actors.rank.member import Peer
from zbmd.collectives.commit.events import MemberId
from zbmd.collectives.device.arrays_in import Array
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.segment import PeerSegment

_WORDS = struct.Struct("=3Q")
RECORD_BYTES = 8 + _WORDS.size


class Publication:
    """This rank's record."""

    def __init__(self, arena: Arena) -> None:
        """Raises `ArenaFull`."""
        self._arena = arena
        self._record = arena.empty(RECORD_BYTES // 8, np.uint64)
        self._record[:] = 0
        at = arena.offset_of(self._record)
        assert at is not None
        self.at = at

    def publish(self, sequence: int, array: Array) -> None:
        """From now on `array`, of the arena, is this rank's contribution to operation `sequence`."""
        offset = self._arena.offset_of(array)
        if offset is None:
            raise LocalProtocolError("what is published must lie in the arena")
        words = (sequence, offset, array.nbytes)
        self._record[0] = 0
        self._record[1:] = words
        self._record[0] = _digest(words)

    def withdraw(self) -> None:
        """The array is the caller's again."""
        self._record[0] = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """A peer's arena, which begins at `base` of its segment, and where its record lies."""

    arena: memoryview
    base: int
    record_at: int


class Remains:
    """What is kept of peers' memory while an operation that may adopt is under way."""

    def __init__(self) -> None:
        self.records: dict[MemberId, int] = {}
        """Where members publish, as they have said; 0: they do not."""
        self._kept: dict[MemberId, _Kept] = {}

    @property
    def of(self) -> tuple[MemberId, ...]:
        """Whose memory is kept."""
        return tuple(self._kept)

    def keep(self, members: tuple[MemberId, ...], peers: Mapping[int, Peer]) -> None:
        """Keep that of these members as far as it is mapped."""
        for member in members:
            peer = peers.get(member.rank)
            if peer is None or peer.incarnation != member.incarnation or member in self._kept:
                continue
            memory, record_at = peer.memory, self.records.get(member)
            if isinstance(memory, PeerSegment) and record_at:
                arena = memory.arena_view(memory.arena_offset, memory.nbytes - memory.arena_offset)
                self._kept[member] = _Kept(arena, memory.arena_offset, record_at)

    def read(self, member: MemberId, sequence: int) -> memoryview | None:
        """See `read_published`; None of one whose memory is not kept."""
        kept = self._kept.get(member)
        if kept is None:
            return None
        return read_published(kept.arena, kept.base, kept.record_at, sequence)

    def clear(self) -> None:
        """Let go of all memory."""
        self._kept.clear()


def read_published(arena: memoryview, base: int, at: int, sequence: int) -> memoryview | None:
    """What a dead rank published for operation `sequence`, as long as that is, or None.

    arena: the mapped arena, which begins at `base` of its segment. Everything in it is untrusted: what does
    not lie in it is taken for not published. Whether it fits the operation, `Job.adoptable` says.
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
