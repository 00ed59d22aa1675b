"""The compiled way of frames through a link does what the readable one says (`zbmd.transport.frames`)."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameHeader,
    pack_fields,
    pack_header,
    unpack_frame,
    unpack_header,
)
from zbmd.transport.identity import Identity
from zbmd.transport.link._link import LinkCore
from zbmd.transport.link.interface import LinkLimits

WALL_NS = 1_790_000_000_000_000_000
JOB, OURS, THEIRS = 0xFEDC_BA98_7654_3210, 5, 0x7FFF_FFFF_FFFF_FFFF
u64 = st.integers(0, 2**64 - 1)


class Core(LinkCore):
    """A link without a transport: keeps what leaves it, and what arrives."""

    def __init__(self) -> None:
        self._identity = Identity(name="here", pid=1, uid=1, incarnation=OURS, job=7)
        self._peer = Identity(name="there", pid=2, uid=1, incarnation=THEIRS, job=JOB >> 1)
        self._limits = LinkLimits()
        self._queue = deque()
        self._begin(HybridClock(), lambda: WALL_NS)
        self._on_frame = lambda header, payload: self.arrived.append((header, bytes(payload)))
        self.arrived: list[tuple[FrameHeader, bytes]] = []
        self.left: list[tuple[bytes, bytes]] = []

    def _push(self, header: bytes, payload: bytes) -> bool:
        self.left.append((header, payload))
        return True


def told(frame: bytes) -> FrameHeader | type[Exception]:
    try:
        return unpack_frame(frame, job=JOB >> 1, incarnation=THEIRS)[0]
    except RemoteProtocolError as error:
        return type(error)


def delivered(frame: bytes | bytearray) -> FrameHeader | type[Exception]:
    core = Core()
    try:
        core._deliver(frame)
    except RemoteProtocolError as error:
        assert not core.arrived
        return type(error)
    ((header, payload),) = core.arrived
    assert payload == bytes(frame[HEADER_BYTES:])
    return header


@given(
    payload=st.binary(max_size=40),
    epoch=st.integers(0, 2**32 - 1),
    hlc=u64,
    trace_id=u64,
    flags=st.integers(0, 255),
    change=st.none() | st.tuples(st.integers(0, HEADER_BYTES + 40), st.integers(1, 255)),
    cut=st.integers(0, HEADER_BYTES + 40),
)
@example(payload=b"", epoch=0, hlc=0, trace_id=0, flags=0, change=None, cut=HEADER_BYTES)
@example(payload=b"", epoch=0, hlc=0, trace_id=0, flags=0, change=None, cut=HEADER_BYTES - 1)
def test_a_frame_is_delivered_or_refused_as_it_is_unpacked(
    payload: bytes,
    epoch: int,
    hlc: int,
    trace_id: int,
    flags: int,
    change: tuple[int, int] | None,
    cut: int,
) -> None:
    frame = bytearray(
        pack_header(
            FrameHeader(
                payload_bytes=len(payload),
                job=JOB >> 1,
                incarnation=THEIRS,
                epoch=epoch,
                hlc=hlc,
                trace_id=trace_id,
                flags=flags,
            )
        )
        + payload
    )
    for some in (frame, frame[:cut]):
        if change is not None and change[0] < len(some):
            some[change[0]] ^= change[1]
        assert delivered(bytes(some)) == delivered(some) == told(bytes(some))


@given(st.binary(max_size=200))
def test_bytes_from_anywhere_are_no_frame(data: bytes) -> None:
    assert delivered(data) == told(data)


@given(
    payload=st.binary(max_size=40), epoch=st.integers(0, 2**32 - 1), trace_id=u64, flags=st.integers(0, 255)
)
def test_a_frame_leaves_as_it_is_packed(payload: bytes, epoch: int, trace_id: int, flags: int) -> None:
    core = Core()
    core.send(payload, epoch=epoch, trace_id=trace_id, flags=flags)
    ((header, same),) = core.left
    hlc = unpack_header(header).hlc
    assert header == pack_fields(flags, len(payload), epoch, 7, OURS, hlc, trace_id) and same is payload
    assert hlc == HybridClock().tick(WALL_NS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": 2**32},
        {"epoch": -1},
        {"trace_id": 2**64},
        {"trace_id": -1},
        {"flags": 0x100},
        {"flags": -1},
        {"flags": 2**70},
    ],
)
def test_what_does_not_fit_never_leaves(wrong: dict[str, int]) -> None:
    core = Core()
    with pytest.raises(LocalProtocolError):
        core.send(b"", **wrong)
    with pytest.raises(LocalProtocolError, match="over the bound"):
        core.send(bytes(MAX_FRAME_BYTES))
    assert not core.left
