"""Two slots of a rank's state in memory that outlives it, each stamped with its version once it is whole.

A replacement finds there what its predecessor held. A stamp has a digest of the slot, and notes beside it say
what a later reader needs to know of the version. Each stamp and each note has a seal, a digest of itself: a
byte that changes in them is found as one of the state is.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from zbmd.actors.rank.host_contracts import KEPT_STATE
from zbmd.actors.rank.member import Worker
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy.machine import SLOTS
from zbmd.transport.errors import ArenaFull, LocalProtocolError

log: Final = structlog.stdlib.get_logger("zbmd.redundancy")

MAGIC: Final = b"zbmdstate4\0\0\0\0\0\0"
STATE_BLOCK: Final = "state"
"""The name of the block that a rank keeps."""
STATE_BLOCKS: Final = (STATE_BLOCK, *(f"{STATE_BLOCK}-{number}" for number in range(1, 8)))
"""Of a state that is recut: up to two of one rank and what its predecessors left."""
NO_VERSION: Final = -1
NAME: Final = struct.Struct("<16s5Q")  # magic, run, place, ranks, elements of a slot, numbers of a note
_STAMP: Final = struct.Struct("<qQ")  # version, digest
Note = NDArray[np.float64]
NO_NOTE: Final[Note] = np.zeros(0)
NOTE_NUMBERS: Final = 220
_NOTES: Final = 2 * SLOTS
"""Two of each slot: what its step reported, and its record once it is committed."""
_MADE: Final = struct.Struct("<Q")
_MADE_AT: Final = 128
_BEGUN: Final = struct.Struct("<Q")
_BEGUN_AT: Final = 144
_SEAL: Final = struct.Struct("<Q")
_SEALS_AT: Final = 160
"""Of the stamps, by slot; those of a note, two, are beside it."""
_NOTES_AT: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StateName:
    """The identity of a state. `run`: distinguishes runs; `elements`: float32 numbers of a slot.

    `note`: the most numbers that are noted of a version.
    """

    run: int
    place: int
    ranks: int
    elements: int
    note: int = NOTE_NUMBERS

    def encoded(self) -> bytes:
        """Return the header of the memory."""
        return NAME.pack(MAGIC, self.run, self.place, self.ranks, self.elements, self.note)

    @classmethod
    def decoded(cls, header: bytes) -> StateName | None:
        """Return what a header says; None for one of another kind."""
        if len(header) != NAME.size:
            return None
        magic, run, place, ranks, elements, note = NAME.unpack(header)
        if magic != MAGIC or not 0 <= place < ranks or elements < 1:
            return None
        return cls(run=run, place=place, ranks=ranks, elements=elements, note=note)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory: header, stamps, notes and slots."""
        return self.head_bytes + SLOTS * self.slot_bytes

    @property
    def head_bytes(self) -> int:
        """Return the bytes before the slots: whole pages."""
        return -(-(_NOTES_AT + _NOTES * _note_bytes(self.note)) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return -(-4 * self.elements // mmap.PAGESIZE) * mmap.PAGESIZE


class StampedSlots:
    """The slots in `memory`, of `name.nbytes`. For one thread.

    A state of another name is cleared: all slots are incomplete then.
    """

    def __init__(self, memory: Any, name: StateName) -> None:
        self.head = np.frombuffer(memory, np.uint8, name.head_bytes)
        """The memory before the slots."""
        self.slots: list[Array] = [
            np.frombuffer(memory, np.float32, name.elements, name.head_bytes + slot * name.slot_bytes)
            for slot in range(SLOTS)
        ]
        self._memory, self._note, self._header = memory, name.note, name.encoded()
        self.release: Callable[[], None] = lambda: None
        """Gives the memory back, once no array of it is left."""
        if bytes(self.head[: NAME.size]) != name.encoded():
            if self.head.any():
                log.warning(
                    "the header in memory is of another state, or damaged: nothing of it is used",
                    header=bytes(self.head[: NAME.size]).hex(),
                    expected=name.encoded().hex(),
                )
                for array in (self.head, *self.slots):
                    array[:] = 0
            for slot in range(SLOTS):
                _STAMP.pack_into(memory, _stamp_at(slot), NO_VERSION, 0)
            self.head[: NAME.size] = np.frombuffer(name.encoded(), np.uint8)

    @property
    def made(self) -> int:
        """The epoch in which the state was cut into parts of which this is one, if it is recut; else 0."""
        return int(_MADE.unpack_from(self._memory, _MADE_AT)[0])

    @made.setter
    def made(self, epoch: int) -> None:
        _MADE.pack_into(self._memory, _MADE_AT, epoch)

    def version_in(self, slot: int) -> int | None:
        """Return the version of the slot if it is complete, and its stamp is whole."""
        version = self.stamp(slot)[0]
        is_one = version >= 0 and version % SLOTS == slot
        return version if is_one and not self.damage_in(slot) else None

    def damage_in(self, slot: int) -> str:
        """Return what is damaged beside a complete slot, the stamp or the note; empty: neither.

        Of a slot that its rank writes meanwhile that is not known.
        """
        version, digest, seal = self.stamp(slot)
        if version == NO_VERSION:
            return ""
        if seal != self._seal_of(version, digest):
            return f"the stamp of version {version}"
        return f"the note of version {version}" if self._read(slot) is None else ""

    def name_damage(self, slot: int) -> None:
        """Log what `damage_in` finds: once the slot's rank is gone."""
        if damage := self.damage_in(slot):
            log.warning(f"{damage} in memory is damaged, and its slot is not used", slot=slot)

    def stamp(self, slot: int) -> tuple[int, int, int]:
        """Return version, digest and seal of the slot as they are."""
        version, digest = _STAMP.unpack_from(self._memory, _stamp_at(slot))
        return version, digest, _SEAL.unpack_from(self._memory, _seal_at(slot))[0]

    def _seal_of(self, version: int, digest: int) -> int:
        return xxhash.xxh3_64_intdigest(self._header + _STAMP.pack(version, digest))

    def digest_in(self, slot: int) -> int:
        """Return the digest of the slot when it was complete."""
        return int(_STAMP.unpack_from(self._memory, _stamp_at(slot))[1])

    @property
    def memory(self) -> Any:
        """The memory of the slots, with all that is stamped on them."""
        return self._memory

    def begun(self, slot: int) -> tuple[int, int]:
        """Return where in the memory it is counted how often the slot was begun, as a u64; and how often."""
        at = _BEGUN_AT + slot * _BEGUN.size
        return at, int(_BEGUN.unpack_from(self._memory, at)[0])

    def begin(self, slot: int) -> None:
        """Mark the slot as incomplete, before it is written. A reader that copies it sees that."""
        at, count = self.begun(slot)
        _BEGUN.pack_into(self._memory, at, (count + 1) % (1 << 64))
        _STAMP.pack_into(self._memory, _stamp_at(slot), NO_VERSION, 0)

    def end(self, slot: int, version: int, digest: int) -> None:
        """Mark the slot as complete, the version last, since the process may be killed before it."""
        if version % SLOTS != slot:
            raise LocalProtocolError(f"version {version} does not lie in slot {slot}")
        at = _stamp_at(slot)
        struct.pack_into("<Q", self._memory, at + 8, digest)
        _SEAL.pack_into(self._memory, _seal_at(slot), self._seal_of(version, digest))
        struct.pack_into("<q", self._memory, at, version)

    def put_note(self, slot: int, note: Note) -> None:
        """Keep what the step to the slot's version reported, at most as many numbers as the name says."""
        self._put(slot, note)

    def noted(self, slot: int) -> Note:
        """Return the note of the complete version in the slot; empty if there is none."""
        return NO_NOTE if self.version_in(slot) is None else self._get(slot)

    def amend_note(self, slot: int, place: int, number: float) -> None:
        """Change one number of a version's note, at once: who is killed has changed all of it or none.

        A damaged note stays as it is. The seal that is not that of the note now is made that of the next one.
        """
        found = self._read(slot)
        if found is None:
            return
        at, now = self._note_at(slot), _note_seal(found)
        found[place] = number
        spare = next((one for one in self._note_seals_at(slot) if self._u64(one) != now), at + 8)
        if _note_seal(found) != now:
            _SEAL.pack_into(self._memory, spare, _note_seal(found))
            struct.pack_into("<d", self._memory, at + _NOTE_HEAD + 8 * place, number)

    def put_record(self, slot: int, note: Note) -> None:
        """Keep the record of a committed version of the slot, of a length as in `put_note`."""
        self._put(SLOTS + slot, note)

    def recorded(self, slot: int) -> Note:
        """Return the last record of the slot; empty if there is none."""
        return self._get(SLOTS + slot)

    def _put(self, number: int, note: Note) -> None:
        """Write the length last: who is killed before has left no note."""
        if len(note) > self._note:
            raise LocalProtocolError(f"a note has {len(note)} numbers, at most {self._note} fit")
        at = self._note_at(number)
        struct.pack_into("<Q", self._memory, at, 0)
        struct.pack_into(f"<{len(note)}d", self._memory, at + _NOTE_HEAD, *note.tolist())
        for seal in self._note_seals_at(number):
            _SEAL.pack_into(self._memory, seal, _note_seal(note))
        struct.pack_into("<Q", self._memory, at, len(note))

    def _get(self, number: int) -> Note:
        found = self._read(number)
        if found is None:
            log.warning("a note in memory is damaged, and is not used", version=self.stamp(number % SLOTS)[0])
        return NO_NOTE if found is None else found

    def _read(self, number: int) -> Note | None:
        """Return a note, or an empty one; None: it is damaged."""
        count, at = self._u64(self._note_at(number)), self._note_at(number)
        if count == 0:
            return NO_NOTE
        if count > self._note:
            return None
        found = np.frombuffer(self._memory, np.float64, count, at + _NOTE_HEAD).copy()
        seal = _note_seal(found)
        return found if any(self._u64(one) == seal for one in self._note_seals_at(number)) else None

    def _u64(self, at: int) -> int:
        return int(_SEAL.unpack_from(self._memory, at)[0])

    def _note_seals_at(self, number: int) -> tuple[int, int]:
        at = self._note_at(number)
        return at + 8, at + 16

    def _note_at(self, number: int) -> int:
        return _NOTES_AT + number * _note_bytes(self._note)


class FoundState(StampedSlots):
    """The state of a rank that has ended, to be read."""

    def __init__(self, memory: Any, name: StateName) -> None:
        super().__init__(memory, name)
        self.name = name


def digest_of(flat: Array) -> int:
    """Return the digest of a slot, or of a copy of one."""
    return xxhash.xxh3_64_intdigest(flat.data)


def slots_in(memory: memoryview) -> tuple[StateName, StampedSlots] | None:
    """Return the slots in read-only memory of another process; None if it has no whole header."""
    name = StateName.decoded(bytes(memory[: NAME.size]))
    if name is None or name.nbytes != len(memory):
        return None
    return name, StampedSlots(memory, name)


def kept_slots(
    worker: Worker, elements: int, *, note: int, part: tuple[int, int] | None = None
) -> StampedSlots | None:
    """Return slots of so many float32 numbers that outlive this process, or those of the one before it.

    They lie in the arena. None without a launcher that keeps it. note: as in `StateName`; part: of a state
    that is recut, its number and how many there are. Such slots are given back by `StampedSlots.release`.
    """
    kept = worker.segment.kept
    if kept is None:
        return None
    place, ranks = (worker.rank, worker.world_size) if part is None else part
    name = StateName(run=worker.job, place=place, ranks=ranks, elements=elements, note=note)
    worker.report({"kind": KEPT_STATE, "bytes": name.nbytes})
    block = STATE_BLOCK
    if part is not None:
        left = [one for one in STATE_BLOCKS if kept.left(one) == name.nbytes]
        here = [one for one in left if kept.peek(one, NAME.size) == name.encoded()]
        block = next(iter(here), "") or next(one for one in STATE_BLOCKS if not kept.has(one))
    try:
        memory, _ = kept.block(block, name.nbytes)
    except ArenaFull:
        left = [one for one in STATE_BLOCKS if kept.left(one)]
        if not left:
            raise
        log.warning("no room beside the memory of a predecessor, which is given back", blocks=left)
        for one in left:
            kept.release(one)
        memory, _ = kept.block(block, name.nbytes)
    worker.segment.arena.ready(memory[: name.head_bytes])
    found = StampedSlots(memory, name)
    found.release = partial(kept.release, block)
    return found


def damage_logged(version: int, found: int, stamped: int) -> None:
    """Name a version in memory that is not what its stamp says."""
    log.warning(
        "the state in memory is damaged, and is not used",
        version=version,
        digest=f"{found:016x}",
        expected=f"{stamped:016x}",
    )


_NOTE_HEAD: Final = 24
"""Bytes of a note before its numbers: how many these are, and two seals."""


def _note_bytes(numbers: int) -> int:
    return _NOTE_HEAD + 8 * numbers


def _note_seal(note: Note) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", len(note)) + note.astype("<f8").tobytes())


def _seal_at(slot: int) -> int:
    return _SEALS_AT + slot * _SEAL.size


def _stamp_at(slot: int) -> int:
    return NAME.size + slot * _STAMP.size
