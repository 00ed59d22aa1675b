"""The records of a log: MessagePack arrays `[kind, stream, at_ns, hlc, …]`.

kind: see `RecordType`. stream: what it belongs to, declared by an earlier STREAM record; 0 is the process
itself. at_ns: monotonic time, ns; for EVENT, ACTIONS and RAISED the machine's `now_ns`. hlc: the process's
hybrid logical clock, never smaller than in the record before. Later releases may add fields at the end of a
record.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

PROCESS_STREAM = 0
"""The stream of records that belong to no machine or link."""


class RecordType(IntEnum):
    """The first item of every record."""

    STREAM = 1
    EVENT = 2
    ACTIONS = 3
    FRAME_IN = 4
    FRAME_OUT = 5
    TIMER = 6
    DEATH = 7
    SEED = 8
    CLOCK = 9
    NOTE = 10
    BULK = 11
    MARK = 12
    LOST = 13
    END = 14
    RAISED = 15
    STATE = 16


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    stream: _Natural
    at_ns: int
    hlc: _Natural

    @property
    def kind(self) -> RecordType:
        """The first item."""
        tag = self.__struct_config__.tag
        assert isinstance(tag, int), tag
        return RecordType(tag)


class StreamDeclared(_Record, frozen=True, tag=int(RecordType.STREAM)):
    """A machine or a link begins; what follows under its number is its own.

    machine: the kind of machine, `link`, or empty; version, fingerprint: of that kind's events and actions;
    config: the MessagePack map that it is built from; continued: it began before this file, and is declared
    again so that the file can be read alone.
    """

    name: str
    machine: str
    version: int
    fingerprint: str
    config: msgspec.Raw
    continued: bool


class EventTaken(_Record, frozen=True, tag=int(RecordType.EVENT)):
    """A machine was given an event: its class's name, and its fields as a map."""

    tag: str
    fields: msgspec.Raw


class ActionsGiven(_Record, frozen=True, tag=int(RecordType.ACTIONS)):
    """The machine's actions: `[[class name, fields], …]`, or nil and their XXH3-128 digest alone."""

    count: _Natural
    digest: bytes
    actions: msgspec.Raw


class FrameIn(_Record, frozen=True, tag=int(RecordType.FRAME_IN)):
    """A frame came over the stream's link: its header and payload, as they were on the wire."""

    frame: bytes


class FrameOut(_Record, frozen=True, tag=int(RecordType.FRAME_OUT)):
    """A frame was given to the stream's link."""

    header: bytes
    payload: bytes


class TimerRecord(_Record, frozen=True, tag=int(RecordType.TIMER)):
    """A timer set for monotonic `due_ns` fired."""

    name: str
    due_ns: int


class DeathSeen(_Record, frozen=True, tag=int(RecordType.DEATH)):
    """The end of another process was noticed."""

    process: str
    incarnation: _Natural
    clean: bool
    reason: str


class SeedDrawn(_Record, frozen=True, tag=int(RecordType.SEED)):
    """Randomness was taken in."""

    name: str
    value: bytes


class ClockRead(_Record, frozen=True, tag=int(RecordType.CLOCK)):
    """The wall clock was read: `wall_ns` since 1970."""

    wall_ns: int


class NoteRecord(_Record, frozen=True, tag=int(RecordType.NOTE)):
    """Something worth telling whoever reads the story."""

    text: str


class Bulk(_Record, frozen=True, tag=int(RecordType.BULK)):
    """A bulk payload: its XXH3-128 digest, and the bytes if they are captured whole."""

    name: str
    payload_bytes: _Natural
    digest: bytes
    data: bytes | None


class Mark(_Record, frozen=True, tag=int(RecordType.MARK)):
    """A step begins; the index finds it."""

    step: _Natural


class Lost(_Record, frozen=True, tag=int(RecordType.LOST)):
    """This many records are missing here, and why."""

    records: _Natural
    reason: str


class EndRecord(_Record, frozen=True, tag=int(RecordType.END)):
    """The stream ended; of stream 0: the log was closed orderly."""

    reason: str


class Raised(_Record, frozen=True, tag=int(RecordType.RAISED)):
    """The machine raised instead of answering. where: `handle` or `check_invariants`; error: the class."""

    where: str
    error: str
    message: str


class StateTaken(_Record, frozen=True, tag=int(RecordType.STATE)):
    """The state of a machine before its next event: a replay can begin here. See `registry.StateCodec`.

    fingerprint: of the classes that the state is made of.
    """

    fingerprint: str
    state: msgspec.Raw


Record: TypeAlias = (
    StreamDeclared
    | EventTaken
    | ActionsGiven
    | FrameIn
    | FrameOut
    | TimerRecord
    | DeathSeen
    | SeedDrawn
    | ClockRead
    | NoteRecord
    | Bulk
    | Mark
    | Lost
    | EndRecord
    | Raised
    | StateTaken
)

RawRecord: TypeAlias = tuple[Any, ...]
"""A record on its way into a log: the array's items, kind first, not encoded yet."""


class Folded(Protocol):
    """Stands for several records until it is written, when it is unfolded into them."""

    def unfold(self) -> list[RawRecord]:
        """The records. Raises `CaptureMismatch` if they cannot be encoded."""
        ...


Taken: TypeAlias = RawRecord | Folded
"""Anything that a recorder accepts for a log."""

_decoder = msgspec.msgpack.Decoder(list[Record])


def decode_records(stream: bytes, count: int) -> list[Record]:
    """The `count` records of a block's MessagePack stream.

    Raises `ValueError` (of which `msgspec.DecodeError` is one) or `RecursionError` if it holds anything else.
    """
    if count > len(stream):
        raise ValueError(f"{count} records cannot be in {len(stream)} bytes")
    # The stream's objects become the items of one array, so one call checks the count and every type.
    return _decoder.decode(b"\xdd" + count.to_bytes(4, "big") + stream)
