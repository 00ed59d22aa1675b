"""Records between hosts: whole frames out of any cut of the bytes, a name for whatever was done to them."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.frames import HEADER_BYTES, MAX_FRAME_BYTES
from zbmd.transport.secure.protection import TAG_BYTES, Keys, RecordMac
from zbmd.transport.secure.record_stream import (
    JOINED_BYTES_MAX,
    RECORD_HEADER_BYTES,
    SCRATCH_BYTES,
    DuplicatedRecord,
    ForgedRecord,
    MalformedRecord,
    Opener,
    OversizedRecord,
    RecordError,
    RecordKind,
    ReorderedRecord,
    ReplayedRecord,
    Sealer,
    SecureStream,
)

A, B = b"a" * 32, b"b" * 32
DIALER, LISTENER = Keys(send=A, receive=B), Keys(send=B, receive=A)
HEADER = bytes(range(HEADER_BYTES))
MODES = pytest.mark.parametrize("keys", [(DIALER, LISTENER), (None, None)], ids=["mac", "none"])
Pair = tuple[Keys | None, Keys | None]


def stream(keys: Keys | None, frame_bytes_max: int = MAX_FRAME_BYTES) -> SecureStream:
    return SecureStream(keys, frame_bytes_max=frame_bytes_max)


def record(sender: SecureStream, payload: bytes) -> bytes:
    return b"".join(sender.seal_frame(HEADER, payload))


def feed(taker: SecureStream, data: bytes, cut: int | None = None) -> None:
    for at in range(0, len(data), cut or len(data)):
        taker.feed(data[at : at + (cut or len(data))])
        taker.check_invariants()


def frames(taker: SecureStream) -> list[bytes]:
    """All frames; an error behind them is raised."""
    taken: list[bytes] = []
    while (frame := taker.next_frame()) is not None:
        taken.append(bytes(frame))
        taker.check_invariants()
    return taken


SIZES = st.sampled_from([0, 1, 300, JOINED_BYTES_MAX, SCRATCH_BYTES - 80, SCRATCH_BYTES, 200_000])


@MODES
@given(sizes=st.lists(SIZES, max_size=6), cut=st.sampled_from([1, 7, 4096, 1 << 17]), goodbye=st.booleans())
def test_any_cut_of_the_bytes_gives_the_same_frames(
    keys: Pair, sizes: list[int], cut: int, goodbye: bool
) -> None:
    sender, taker = stream(keys[0]), stream(keys[1])
    if cut == 1:
        sizes = [size % 997 for size in sizes]
    payloads = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    data = b"".join(record(sender, payload) for payload in payloads)
    if goodbye:
        data += b"".join(sender.seal_goodbye())
    if data:
        feed(taker, data, cut)
    assert frames(taker) == [HEADER + payload for payload in payloads]
    assert taker.ready_bytes == taker.partial_bytes == 0
    assert taker.goodbye is goodbye
    assert taker.end() is None


def test_streams_of_one_thread_take_turns_at_any_point() -> None:
    senders, takers = [stream(DIALER) for _ in range(3)], [stream(LISTENER) for _ in range(3)]
    said = [b"".join(record(sender, bytes([n]) * 700) for _ in range(4)) for n, sender in enumerate(senders)]
    for at in range(0, len(said[0]), 5):
        for taker, data in zip(takers, said, strict=True):
            taker.feed(data[at : at + 5])
    for n, taker in enumerate(takers):
        assert frames(taker) == [HEADER + bytes([n]) * 700] * 4


def test_large_payloads_are_not_copied_on_their_way_out() -> None:
    payload = bytes(1 << 19)
    pieces = stream(DIALER).seal_frame(HEADER, payload)
    assert any(piece is payload for piece in pieces)
    assert len(stream(DIALER).seal_frame(HEADER, b"small")) == 1


def test_an_idle_stream_holds_nothing() -> None:
    sender, taker = stream(DIALER), stream(LISTENER)
    feed(taker, record(sender, bytes(1 << 19))[: 1 << 18])
    assert taker.partial_bytes > 1 << 19
    taker = stream(LISTENER)
    feed(taker, record(stream(DIALER), bytes(100)))
    frames(taker)
    assert taker.partial_bytes == taker.ready_bytes == 0


# --- what may be done to the bytes ----------------------------------------------------------------------

Tamper = Callable[[list[bytes]], list[bytes]]
FOREIGN = record(stream(Keys(send=b"x" * 32, receive=B)), b"injected")
TAMPERED: dict[str, tuple[Tamper, type[RecordError], type[RecordError] | None]] = {
    "duplicated": (lambda r: [r[0], r[0], r[1]], DuplicatedRecord, DuplicatedRecord),
    "replayed": (lambda r: [*r[:3], r[0]], ReplayedRecord, ReplayedRecord),
    "reordered": (lambda r: [r[0], r[2], r[1]], ReorderedRecord, ReorderedRecord),
    "dropped": (lambda r: [r[0], r[3]], ReorderedRecord, ReorderedRecord),
    "injected": (lambda r: [FOREIGN, *r], ForgedRecord, None),
    "bytes cut out": (lambda r: [r[0], r[1][:30] + r[1][60:], *r[2:]], ForgedRecord, None),
    "bytes put in": (lambda r: [r[0], r[1][:30] + bytes(9) + r[1][30:], *r[2:]], ForgedRecord, None),
    "renumbered": (lambda r: [r[0], renumbered(r[0], 1), *r[1:]], ForgedRecord, None),
    "announced too much": (
        lambda r: [r[0], struct.pack("<II", 1 << 23, 1)],
        OversizedRecord,
        OversizedRecord,
    ),
}


def renumbered(data: bytes, number: int) -> bytes:
    return data[:4] + struct.pack("<I", number) + data[8:]


@pytest.mark.parametrize("name", TAMPERED)
def test_each_thing_done_to_the_records_has_its_name(name: str) -> None:
    tamper, with_mac, without = TAMPERED[name]
    for keys, error in (((DIALER, LISTENER), with_mac), ((None, None), without)):
        if error is None:
            continue
        sender, taker = stream(keys[0]), stream(keys[1], 1 << 16)
        feed(taker, b"".join(tamper([record(sender, bytes([n]) * 50) for n in range(4)])))
        assert taker.failed
        good: list[bytes] = []
        with pytest.raises(error):
            while (frame := taker.next_frame()) is not None:
                good.append(bytes(frame))
        assert all(frame == HEADER + bytes([n]) * 50 for n, frame in enumerate(good)), "only what was sent"
        taker.feed(record(sender, b"more"))
        taker.check_invariants()
        with pytest.raises(error):
            taker.next_frame()


@given(position=st.integers(0, 1 << 16), bit=st.integers(0, 7), size=st.sampled_from([0, 40, 5000]))
def test_no_changed_bit_gets_through(position: int, bit: int, size: int) -> None:
    sender, taker = stream(DIALER), stream(LISTENER)
    record_bytes = RECORD_HEADER_BYTES + HEADER_BYTES + size + TAG_BYTES
    data = bytearray(b"".join(record(sender, bytes(size)) for _ in range(3)))
    position %= len(data)
    data[position] ^= 1 << bit
    data += record(sender, bytes(1 << 16)) * 20  # also what claims to be longer is whole, or over the bound
    feed(taker, bytes(data))
    good = 0
    try:
        while taker.next_frame() is not None:
            good += 1
    except RecordError:
        assert good == position // record_bytes, "all that came before it, and no more"
    else:
        assert taker.end() is not None, "it announces more than has come"


@MODES
def test_the_end_inside_a_record_is_told_with_how_much_is_missing(keys: Pair) -> None:
    data = record(stream(keys[0]), bytes(100))
    for at in range(1, len(data)):
        taker = stream(keys[1])
        feed(taker, data[:at])
        assert taker.next_frame() is None
        error = taker.end()
        assert error is not None
        assert "record 0" in str(error)
        if at > RECORD_HEADER_BYTES:
            assert f"{len(data) - at} bytes" in str(error)


def test_one_may_not_speak_after_the_goodbye_nor_out_of_place() -> None:
    sender, taker = stream(DIALER), stream(LISTENER)
    feed(taker, b"".join(sender.seal_goodbye()) + record(sender, b"more"))
    with pytest.raises(MalformedRecord, match="after the goodbye"):
        taker.next_frame()
    for kind, body in ((RecordKind.SETUP, b"x"), (RecordKind.GOODBYE, b"x")):
        taker = stream(LISTENER)
        feed(taker, b"".join(Sealer(A).seal(kind, (body,))))
        with pytest.raises(MalformedRecord, match="out of place"):
            taker.next_frame()


def test_a_genuine_record_of_unknown_kind() -> None:
    tag = RecordMac(A).tag(9, 0, (b"body",))
    with pytest.raises(MalformedRecord, match="unknown kind 9"):
        Opener(A, body_bytes_max=100).open(struct.pack("<II", 4 | 9 << 24, 0), b"body", tag)


def test_a_record_of_one_direction_is_none_of_the_other() -> None:
    taker = stream(DIALER)
    feed(taker, record(stream(DIALER), b"echoed"))
    with pytest.raises(ForgedRecord):
        taker.next_frame()


@given(st.binary(max_size=400), st.booleans())
def test_garbage_ends_typed(data: bytes, with_keys: bool) -> None:
    taker = stream(LISTENER if with_keys else None, 200)
    if data:
        feed(taker, data, 17)
    try:
        got = frames(taker)
    except RemoteProtocolError:
        return
    assert not (with_keys and got)


def test_numbers_wrap_on_the_wire_and_not_in_the_mac() -> None:
    sender, opener = Sealer(A), Opener(A, body_bytes_max=100)
    sender.sequence = opener.sequence = (1 << 32) - 1
    for number in range((1 << 32) - 1, (1 << 32) + 2):
        data = b"".join(sender.seal(RecordKind.FRAME, (b"x" * 50,)))
        opener.open(data[:8], data[8:58], data[58:])
        assert opener.sequence == number + 1
    first = b"".join(Sealer(A).seal(RecordKind.FRAME, (b"x" * 50,)))
    opener.sequence = 1 << 32
    with pytest.raises(ForgedRecord):  # number 0 of the stream is not number 2**32
        opener.open(first[:8], first[8:58], first[58:])


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 16, (1 << 16) + 1, 1 << 20])
def test_tags_made_of_parts_are_those_of_the_whole(size: int) -> None:
    body = bytes(n % 251 for n in range(size))
    mac = RecordMac(A)
    tag = mac.tag(2, 7, (body[: size // 3], body[size // 3 :]))
    assert len(tag) == TAG_BYTES
    assert mac.holds(2, 7, body, tag)
    assert not any(
        (mac.holds(3, 7, body, tag), mac.holds(2, 8, body, tag), mac.holds(2, 7, body + b"\0", tag))
    )


def test_misuse_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="bound"):
        stream(DIALER).seal_frame(HEADER, bytes(MAX_FRAME_BYTES))
