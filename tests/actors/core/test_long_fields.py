"""Messages with long fields of bytes: encoded around them, they are what they were, and arrive so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.contracts import Contract
from zbmd.actors.core import wire
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.wire import LONG_BYTES, long_field
from zbmd.actors.errors import InvalidMessage
from zbmd.actors.system import ActorSystem
from zbmd.transport import capture
from zbmd.transport.capture import records as rec
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.scattered import Scattered, copied
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm import connect as shm

MIB = 1 << 20
TIMEOUT_S = 120.0


class Parcel(Contract, id="test.parcel"):
    """Two fields that may be long, and others around them."""

    number: int
    first: bytes
    text: str = ""
    second: bytes = b""
    rest: list[int] = []  # noqa: RUF012


class Wide(Contract, id="test.wide"):
    """More fields than a short array's head can tell."""

    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
    g: int
    h: int
    i: int
    j: int
    k: int
    l: int  # noqa: E741
    m: int
    n: int
    o: bytes


class Sorter(Actor):
    """Sends parcels back."""

    @on(Parcel)
    async def parcel(self, message: Parcel) -> Parcel:
        """Send it back."""
        return message


def envelopes(message: Contract) -> list[wire.Tell | wire.Ask | wire.Reply]:
    body: object = message
    return [
        wire.Tell("a", 0, "me", body),  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        wire.Ask(7, "a", 3, 5, "", body),  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        wire.Reply(9, body),  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    ]


lengths = st.sampled_from([0, 1, LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 1])


@given(
    st.integers(0, 2**60), lengths, st.text(max_size=40), lengths, st.lists(st.integers(0, 9), max_size=20)
)
def test_what_is_joined_is_what_msgspec_makes(
    number: int, first: int, text: str, second: int, rest: list[int]
) -> None:
    message = Parcel(number, bytes(first), text, bytes(second), rest)
    for envelope in envelopes(message):
        payload = wire.with_body(envelope, message)
        assert isinstance(payload, Scattered) == (max(first, second) >= LONG_BYTES)
        joined = payload.joined() if isinstance(payload, Scattered) else payload
        assert joined == wire.encode(envelope) and len(joined) == len(payload)


def test_a_message_of_many_fields_and_what_is_no_contract() -> None:
    wide = Wide(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, os.urandom(LONG_BYTES))
    for envelope in envelopes(wide):
        payload = wire.with_body(envelope, wide)
        assert isinstance(payload, Scattered) and payload.joined() == wire.encode(envelope)
        assert payload.pieces[1] is wide.o, "it is not copied"
    assert long_field(None) is None and long_field(bytes(LONG_BYTES)) is None


def test_what_is_too_long_and_what_cannot_be_encoded_is_told() -> None:
    with pytest.raises(InvalidMessage, match="region"):
        wire.encode_ask(1, "a", 0, 1, "", Parcel(1, bytes(MAX_PAYLOAD_BYTES)))
    with pytest.raises(InvalidMessage, match="cannot be encoded"):
        wire.encode_reply(1, Parcel(object(), bytes(LONG_BYTES)))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    assert len(wire.encode_ask(1, "a" * 100, 0, 1, "b" * 100, Parcel(1, bytes(MIB), "c" * 1000))) > MIB


class Bounded(Contract, id="test.bounded"):
    """A field whose bytes are looked at when they are decoded."""

    data: Annotated[bytes, msgspec.Meta(max_length=LONG_BYTES)]


class Looked(Contract, id="test.looked"):
    """A message that looks at its bytes itself."""

    data: bytes

    def __post_init__(self) -> None:
        assert len(self.data) == LONG_BYTES


def test_what_came_in_pieces_is_decoded_around_its_long_bytes() -> None:
    """The field is the very piece that was copied; all else is what msgspec makes of the whole."""
    codec = wire.Codec(lambda data: pytest.fail(f"a reference to {data}"))
    first, second = os.urandom(LONG_BYTES), os.urandom(LONG_BYTES + 1)
    for message, name in (
        (Parcel(1, first, "x", second, [1, 2]), "first"),
        (Parcel(2, b"\xc6", "\xc6" * 9, second), "second"),
        (Wide(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, first), "o"),
    ):
        for envelope in envelopes(message):
            pieces = copied(memoryview(wire.encode(envelope)))
            around = codec.decode_around(pieces)
            assert around == envelope
            assert around is not None and getattr(around.body, name) is pieces.pieces[1]


def test_what_has_to_see_its_bytes_is_decoded_as_a_whole() -> None:
    codec = wire.Codec(lambda data: pytest.fail(f"a reference to {data}"))
    for message in (Bounded(bytes(LONG_BYTES)), Looked(bytes(LONG_BYTES))):
        for envelope in envelopes(message):
            assert codec.decode_around(copied(memoryview(wire.encode(envelope)))) is None
    short = copied(memoryview(wire.encode(wire.Withdraw(1, "a", 0))))
    assert short.pieces[1] == wire.encode(wire.Withdraw(1, "a", 0)) and codec.decode_around(short) is None


class Ends:
    """Two systems of this process with a link between them, each with memory of so many bytes, if any."""

    def __init__(self, arena_bytes: tuple[int, int], *, recorded: bool) -> None:
        self.segments: list[Segment] = []
        self.recorders: list[capture.RingRecorder] = []
        self.systems = [ActorSystem("left"), ActorSystem("right")]
        ends = [self._end(slot, nbytes, recorded=recorded) for slot, nbytes in enumerate(arena_bytes)]
        self.links = shm.link_pair(*ends)
        for system, link in zip(self.systems, self.links, strict=True):
            system.attach(link)

    def _end(self, slot: int, arena_bytes: int, *, recorded: bool) -> Endpoint:
        name = self.systems[slot].name
        identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1)
        segment = None
        if arena_bytes:
            segment = Segment.create(slot=slot, incarnation=1, arena_bytes=arena_bytes, inbox_bytes=0)
            self.segments.append(segment)
        clock, recorder = HybridClock(), None
        if recorded:
            origin = capture.Origin(process=name, incarnation=1, job=0)
            recorder = capture.RingRecorder(origin, capture.Clocks(hybrid=clock))
            self.recorders.append(recorder)
        return Endpoint(identity=identity, cookie=bytes(32), segment=segment, clock=clock, recorder=recorder)

    def frames(self, directory: Path) -> list[list[bytes]]:
        """The frames that left the left end and came to the right one, as recorded."""
        told: list[list[bytes]] = []
        for recorder in self.recorders:
            recorder.dump(directory, "to compare")
        for log in capture.open_log(directory).processes:
            each = [entry.record for entry in log.entries()]
            out = [one.header + one.payload for one in each if isinstance(one, rec.FrameOut)]
            told.append(
                out
                if log.origin.process == "left"
                else [one.frame for one in each if isinstance(one, rec.FrameIn)]
            )
        return told

    async def close(self) -> None:
        for system in self.systems:
            await system.stop()
        for segment in self.segments:
            segment.close()


@pytest.fixture(params=["lent", "through the ring", "too little memory", "recorded"])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[tuple[int, int], bool]]:
    lent, little = 64 << 20, 2 << 20
    arenas = {"through the ring": (0, 0), "too little memory": (little, little)}
    yield arenas.get(request.param, (lent, lent)), request.param == "recorded"


async def test_parcels_come_back_as_they_were(case: tuple[tuple[int, int], bool], tmp_path: Path) -> None:
    arenas, recorded = case
    ends = Ends(arenas, recorded=recorded)
    try:
        await ends.systems[1].spawn(Sorter, name="sorter")
        sorter = ends.systems[0].ref("right/sorter")
        data = os.urandom(MIB)
        for nbytes in (MIB, LONG_BYTES, LONG_BYTES - 1, 1):
            parcel = Parcel(nbytes, data[:nbytes], "x", data[-nbytes:] if nbytes < MIB else b"", [1, 2])
            assert await sorter.ask(parcel, timeout=TIMEOUT_S) == parcel
        if recorded:
            left, came = ends.frames(tmp_path)
            assert left == came and len(left) == 4
        many = [Parcel(number, os.urandom(LONG_BYTES)) for number in range(40)]
        assert await asyncio.gather(*(sorter.ask(one, timeout=TIMEOUT_S) for one in many)) == many
        with pytest.raises((InvalidMessage, LocalProtocolError)):
            await sorter.ask(Parcel(1, bytes(MAX_PAYLOAD_BYTES)), timeout=TIMEOUT_S)
    finally:
        await ends.close()
