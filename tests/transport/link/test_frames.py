"""Frame headers: a round trip, a fixed layout, and everything wrong refused with its own error."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.frames import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameHeader,
    MalformedFrame,
    OversizedFrame,
    WrongFormatVersion,
    pack_header,
    unpack_frame,
    unpack_header,
)

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
headers = st.builds(
    FrameHeader,
    payload_bytes=st.integers(0, MAX_PAYLOAD_BYTES),
    job=u64,
    incarnation=u64,
    epoch=u32,
    hlc=u64,
    trace_id=u64,
    flags=st.integers(0, 255),
)
HEADER = FrameHeader(
    payload_bytes=3, job=0x1122, incarnation=7, epoch=9, hlc=0x0102030405060708, trace_id=5, flags=0x81
)


@given(headers, st.sampled_from([bytes, bytearray, memoryview]), st.binary(max_size=40))
def test_a_header_comes_back_as_it_was(
    header: FrameHeader, kind: type[bytes | bytearray | memoryview], rest: bytes
) -> None:
    packed = pack_header(header)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(kind(packed + rest)) == header


def test_the_layout_is_what_the_first_release_wrote() -> None:
    expected = "5a424d44 0100 8100 03000000 09000000 2211000000000000 0700000000000000"
    expected += "0807060504030201 0500000000000000"
    assert pack_header(HEADER) == bytes.fromhex(expected)
    assert (HEADER_BYTES, MAX_FRAME_BYTES) == (48, (1 << 20) + 4096)


@given(headers, st.binary(max_size=100))
def test_a_frame_is_split_without_a_copy(header: FrameHeader, payload: bytes) -> None:
    header = msgspec.structs.replace(header, payload_bytes=len(payload))
    frame = bytearray(pack_header(header) + payload)
    got, view = unpack_frame(frame, job=header.job, incarnation=header.incarnation)
    assert (got, bytes(view)) == (header, payload)
    assert view.obj is frame


@given(st.binary(max_size=200))
def test_bytes_from_anywhere_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_frame(data, job=1, incarnation=1)


@given(header=headers, position=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_read_as_it_stands(header: FrameHeader, position: int, bit: int) -> None:
    packed = bytearray(pack_header(header))
    packed[position] ^= 1 << bit
    try:
        got = unpack_header(packed)
    except RemoteProtocolError:
        assert position < 12, "only magic, version, flags and length can be wrong in themselves"
    else:
        assert got != header
        assert pack_header(got) == packed


def patched(offset: int, layout: str, value: int | bytes) -> bytes:
    packed = bytearray(pack_header(HEADER) + b"abc")
    struct.pack_into(layout, packed, offset, value)
    return bytes(packed)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedFrame),
        (pack_header(HEADER)[:-1], MalformedFrame),
        (b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" + bytes(20), MalformedFrame),
        (patched(0, "<4s", b"ZBME"), MalformedFrame),
        (patched(4, "<H", FORMAT_VERSION + 1), WrongFormatVersion),
        (patched(4, "<H", 0), WrongFormatVersion),
        (patched(6, "<H", 0x0100), MalformedFrame),
        (patched(8, "<I", MAX_PAYLOAD_BYTES + 1), OversizedFrame),
        (patched(8, "<I", 0xFFFFFFFF), OversizedFrame),
        (patched(8, "<I", 2), MalformedFrame),
        (patched(8, "<I", 4), MalformedFrame),
        (patched(16, "<Q", 0x1123), MalformedFrame),
        (patched(24, "<Q", 8), MalformedFrame),
    ],
)
def test_each_wrong_frame_has_its_error(data: bytes, error: type[RemoteProtocolError]) -> None:
    with pytest.raises(error):
        unpack_frame(data, job=HEADER.job, incarnation=HEADER.incarnation)


def test_a_version_error_tells_the_peers_version() -> None:
    with pytest.raises(WrongFormatVersion, match="version 513") as caught:
        unpack_header(patched(4, "<H", 513))
    assert caught.value.version == 513


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload_bytes": MAX_PAYLOAD_BYTES + 1},
        {"payload_bytes": -1},
        {"epoch": 2**32},
        {"job": 2**64},
        {"incarnation": -1},
        {"hlc": 2**64},
        {"trace_id": -1},
        {"flags": 0x100},
        {"flags": -1},
    ],
)
def test_what_does_not_fit_is_never_packed(wrong: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        pack_header(msgspec.structs.replace(HEADER, **wrong))
