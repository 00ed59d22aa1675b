"""A stripe as bytes: any cut gives the same records, any change of a byte a typed error."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.transport.bulk.records import (
    FRAGMENT_BYTES_MAX,
    FRAGMENTS_MAX,
    HEADER_BYTES,
    TEXT_BYTES_MAX,
    Ack,
    BulkError,
    Data,
    Error,
    Forged,
    Get,
    Goodbye,
    Malformed,
    Notify,
    OutOfSequence,
    Put,
    PutRefusal,
    Record,
    TransferRefusal,
    decode,
    encode,
)
from zbmd.transport.bulk.stream import CHUNK_BYTES, PayloadArrived, StripeReader, StripeWriter
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native._native import CHANNELS
from zbmd.transport.secure.protection import TAG_BYTES, TAG_CHUNK_BYTES, RecordMac, TagHelper

KEY = bytes(range(32))


@pytest.fixture(params=["alone", "helped"])
def helper(request: pytest.FixtureRequest) -> Iterator[TagHelper | None]:
    """None, or a thread that makes tags beside us."""
    helper = TagHelper() if request.param == "helped" else None
    yield helper
    if helper is not None:
        helper.close()


U64 = st.integers(0, (1 << 64) - 1)
HANDLE = RegionHandle(slot=3, incarnation=7, offset=1 << 20, nbytes=1 << 30, writable=True)


@st.composite
def fragments(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """total, fragment_bytes, offset, nbytes."""
    fragment_bytes = draw(st.integers(1, 700))
    total = draw(st.integers(0, 3 * fragment_bytes))
    offset = draw(st.integers(0, max(0, -(-total // fragment_bytes) - 1))) * fragment_bytes
    return total, fragment_bytes, offset, min(fragment_bytes, total - offset)


@st.composite
def records(draw: st.DrawFn) -> Record:
    transfer, value = draw(U64), draw(U64)
    channel = draw(st.integers(0, CHANNELS - 1))
    text_bytes = draw(st.integers(1, TEXT_BYTES_MAX))
    total, fragment_bytes, offset, nbytes = draw(fragments())
    put = Put(
        transfer=transfer, handle=HANDLE, at=draw(st.integers(0, 1000)), total=total, offset=offset,
        fragment_bytes=fragment_bytes, nbytes=nbytes, channel=channel, value=value,
    )  # fmt: skip
    data = Data(transfer=transfer, total=total, fragment_bytes=fragment_bytes, offset=offset, nbytes=nbytes)
    return draw(
        st.sampled_from(
            [
                put,
                data,
                Notify(transfer=transfer, channel=channel, value=value),
                Get(transfer=transfer, handle=HANDLE, at=5, total=total, after=value),
                TransferRefusal(transfer=transfer, nbytes=text_bytes),
                PutRefusal(transfer=transfer, nbytes=text_bytes),
                Ack(puts=value),
                Error(nbytes=text_bytes),
            ]
        )
    )


def mac(keyed: bool) -> RecordMac | None:
    return RecordMac(KEY) if keyed else None


def payload_of(record: Record, number: int) -> bytes:
    return bytes(97 + (number + i) % 26 for i in range(record.nbytes))


def write(sent: list[Record], *, keyed: bool) -> list[bytes]:
    """The bytes of each record."""
    writer = StripeWriter(mac(keyed))
    out: list[bytes] = []
    for number, record in enumerate(sent):
        payload = payload_of(record, number)
        writer.add(record, memoryview(payload) if payload else None)
        parts = bytearray()
        while not writer.idle:
            piece = b"".join(writer.pending(3))
            parts += piece
            assert writer.sent(len(piece)) == int(writer.idle)
        out.append(bytes(parts))
    return out


def read(
    stream: bytes, cuts: Iterator[int], *, keyed: bool, helper: TagHelper | None = None
) -> Iterator[tuple[Record, bytes]]:
    """Each record with its payload, once that is whole and authentic."""
    reader = StripeReader(mac(keyed), helper)
    came: tuple[Record, bytearray] | None = None
    at = 0
    while at < len(stream):
        want = reader.want()
        n = min(len(want), next(cuts), len(stream) - at)
        want[:n] = stream[at : at + n]
        at += n
        match reader.filled(n):
            case None:
                continue
            case PayloadArrived(text=text):
                assert came is not None
                yield came[0], text.encode() or bytes(came[1])
                came = None
            case record:
                assert came is None
                if not record.nbytes:
                    yield record, b""
                    continue
                came = record, bytearray(record.nbytes)
                if isinstance(record, TransferRefusal | PutRefusal | Error):
                    reader.receive_text()
                else:
                    reader.receive_into(memoryview(came[1]))
    assert reader.between_records == (came is None and at == len(stream))


def cycle(cuts: list[int]) -> Iterator[int]:
    while True:
        yield from cuts


cut_lists = st.lists(st.integers(1, 900), min_size=1, max_size=8)


@settings(deadline=None)
@given(sent=st.lists(records(), max_size=6), cuts=cut_lists, keyed=st.booleans())
def test_any_cut_gives_the_same_records(sent: list[Record], cuts: list[int], keyed: bool) -> None:
    stream = b"".join(write([*sent, Goodbye()], keyed=keyed))
    expected = [(record, payload_of(record, i)) for i, record in enumerate([*sent, Goodbye()])]
    assert list(read(stream, cycle(cuts), keyed=keyed)) == expected


@settings(deadline=None)
@given(sent=st.lists(records(), min_size=1, max_size=4), data=st.data(), bits=st.integers(1, 255))
def test_any_change_of_a_byte_is_found_before_its_record_counts(
    sent: list[Record], data: st.DataObject, bits: int
) -> None:
    written = write(sent, keyed=True)
    stream = bytearray(b"".join(written))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= bits
    whole = 0
    while sum(map(len, written[: whole + 1])) <= at:
        whole += 1
    got: list[tuple[Record, bytes]] = []
    with pytest.raises(Forged):
        for record in read(bytes(stream), cycle([64]), keyed=True):
            got.append(record)
    assert got == [(record, payload_of(record, i)) for i, record in enumerate(sent[:whole])]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [1, 0], [0, 1, 0], [0, 1, 2, 1]])
def test_repeated_reordered_and_left_out_records(order: list[int], keyed: bool) -> None:
    data = Data(transfer=1, total=5, fragment_bytes=5, offset=0, nbytes=5)
    written = write([Ack(puts=1), data, Notify(transfer=1, channel=1, value=1)], keyed=keyed)
    stream = b"".join(written[i] for i in order)
    with pytest.raises(Forged if keyed else OutOfSequence):
        list(read(stream, cycle([100]), keyed=keyed))


def long_stream(helper: TagHelper | None) -> tuple[Data, bytes, bytes]:
    """A record whose payload is cut for sending and tagging, the payload, and what a writer makes of it."""
    total = 2 * CHUNK_BYTES + 17
    record = Data(transfer=1, total=total, fragment_bytes=total, offset=0, nbytes=total)
    payload = random.Random(4).randbytes(total)
    writer = StripeWriter(RecordMac(KEY), helper)
    writer.add(record, memoryview(payload))
    stream = bytearray()
    while not writer.idle:
        parts = writer.pending(2)
        stream += b"".join(parts)
        writer.sent(sum(map(len, parts)))
    return record, payload, bytes(stream)


def test_a_long_payload_has_the_tag_of_the_tags_of_its_chunks(helper: TagHelper | None) -> None:
    record, payload, stream = long_stream(helper)
    mac = RecordMac(KEY)
    chunks = [payload[at : at + TAG_CHUNK_BYTES] for at in range(0, len(payload), TAG_CHUNK_BYTES)]
    tags = [mac.tag(3 + number, 0, (chunk,)) for number, chunk in enumerate(chunks)]
    header = encode(record, 0)
    assert stream == header + mac.tag(1, 0, (header,)) + payload + mac.tag(2, 0, tags)
    assert list(read(stream, cycle([99999]), keyed=True, helper=helper)) == [(record, payload)]


@pytest.mark.parametrize(
    "at", [-1, -TAG_BYTES - 1, -TAG_BYTES - 17, HEADER_BYTES + TAG_BYTES + TAG_CHUNK_BYTES]
)
def test_a_change_in_any_chunk_is_found(helper: TagHelper | None, at: int) -> None:
    stream = bytearray(long_stream(helper)[2])
    stream[at] ^= 1
    with pytest.raises(Forged, match="payload"):
        list(read(bytes(stream), cycle([99999]), keyed=True, helper=helper))


def test_chunks_in_another_order_are_found(helper: TagHelper | None) -> None:
    stream = bytearray(long_stream(helper)[2])
    first = HEADER_BYTES + TAG_BYTES
    second, third = first + TAG_CHUNK_BYTES, first + 2 * TAG_CHUNK_BYTES
    stream[first:third] = stream[second:third] + stream[first:second]
    with pytest.raises(Forged, match="payload"):
        list(read(bytes(stream), cycle([99999]), keyed=True, helper=helper))


@pytest.mark.parametrize("changed", [False, True])
def test_a_long_payload_that_is_thrown_away_is_checked(changed: bool) -> None:
    record, _, stream = long_stream(None)
    stream = bytearray(stream)
    stream[-100] ^= changed
    reader, at = StripeReader(RecordMac(KEY)), 0
    came: object = None
    with pytest.raises(Forged) if changed else contextlib.nullcontext():
        while at < len(stream):
            want = reader.want()
            n = min(len(want), len(stream) - at)
            want[:n] = stream[at : at + n]
            at += n
            came = reader.filled(n)
            if came == record:
                reader.receive_nowhere()
        assert isinstance(came, PayloadArrived) and reader.between_records


@given(header=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), kind=st.integers(0, 10))
def test_garbage_is_a_typed_error_or_the_one_encoding_of_a_record(header: bytes, kind: int) -> None:
    header = bytes([kind]) + header[1:8] + bytes(8) + header[16:]
    try:
        record = decode(header, 0)
    except BulkError:
        return
    assert encode(record, 0) == header


def changed(field: int, width: int, value: int, record: Record) -> bytes:
    header = bytearray(encode(record, 0))
    header[field : field + width] = value.to_bytes(width, "little")
    return bytes(header)


PUT = Put(
    transfer=1, handle=HANDLE, at=0, total=100, fragment_bytes=40, offset=40, nbytes=40, channel=2, value=3
)  # fmt: skip


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (changed(0, 1, 0, PUT), "unknown kind"),
        (changed(0, 1, 10, PUT), "unknown kind"),
        (changed(1, 1, 2, PUT), "does not have"),
        (changed(2, 2, CHANNELS, PUT), "channel"),
        (changed(4, 4, 0, PUT), "fragments of 0"),
        (changed(4, 4, FRAGMENT_BYTES_MAX + 1, PUT), "in fragments of"),
        (changed(24, 8, 41, PUT), "no fragment"),
        (changed(32, 8, 40 * FRAGMENTS_MAX + 1, PUT), "of a transfer|outside|in fragments of"),
        (changed(40, 8, 41, PUT), "no fragment"),
        (changed(40, 8, 120, PUT), "no fragment"),
        (changed(56, 8, (1 << 30) - 99, PUT), "outside a region"),
        (changed(56, 8, (1 << 64) - 1, PUT), "outside a region"),
        (changed(92, 4, 1, PUT), "does not have"),
        (changed(48, 8, 1, Goodbye()), "does not have"),
        (changed(24, 8, 0, Error(nbytes=1)), "reason of 0"),
        (changed(24, 8, TEXT_BYTES_MAX + 1, TransferRefusal(transfer=1, nbytes=1)), "reason of"),
        (changed(24, 8, 1, Ack(puts=1)), "does not have"),
    ],
)
def test_headers_that_no_peer_sends(header: bytes, match: str) -> None:
    with pytest.raises(Malformed, match=match):
        decode(header, 0)


def test_a_stripe_that_goes_on_after_its_goodbye() -> None:
    stream = b"".join(write([Goodbye(), Ack(puts=1)], keyed=False))
    with pytest.raises(Malformed, match="after its goodbye"):
        list(read(stream, cycle([100]), keyed=False))


def test_a_text_is_made_fit_to_print() -> None:
    reader = StripeReader(None)
    text = b"bad\x1b[31m\xff"
    for piece in (encode(Error(nbytes=len(text)), 0), text):
        want = reader.want()
        want[: len(piece)] = piece
        came = reader.filled(len(piece))
        if isinstance(came, Error):
            reader.receive_text()
    assert isinstance(came, PayloadArrived) and came.text == "bad?[31m\ufffd"


def test_misuse_is_told_as_ours() -> None:
    reader, writer = StripeReader(None), StripeWriter(None)
    with pytest.raises(LocalProtocolError, match="no destination"):
        reader.receive_into(memoryview(bytearray(3)))
    reader.want()[:] = encode(PUT, 0)
    reader.filled(HEADER_BYTES)
    with pytest.raises(LocalProtocolError, match="has been given no destination"):
        reader.want()
    with pytest.raises(LocalProtocolError, match="no destination for"):
        reader.receive_into(memoryview(bytearray(39)))
    with pytest.raises(LocalProtocolError, match="is no text"):
        reader.receive_text()
    with pytest.raises(LocalProtocolError, match="not that of"):
        writer.add(PUT, memoryview(b"short"))
