"""One link, both ends in one process: bounds, ends and what a callback may do."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from zbmd.transport.errors import (
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.frames import HEADER_BYTES, FrameHeader, pack_header
from zbmd.transport.hello import Identity
from zbmd.transport.hlc import HybridClock
from zbmd.transport.link import LinkLimits
from zbmd.transport.segment import Segment
from zbmd.transport.shm import Endpoint, link_pair
from zbmd.transport.shm_link import ShmLink

LIMITS = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 14, queue_frames_max=16, frames_per_wake=4)


def endpoint(name: str, limits: LinkLimits = LIMITS, segment: Segment | None = None) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=3, job=7)
    return Endpoint(identity=identity, cookie=bytes(32), limits=limits, segment=segment)


def pair(limits: LinkLimits = LIMITS) -> tuple[ShmLink, ShmLink]:
    return link_pair(endpoint("a", limits), endpoint("b", limits))


class Received:
    """Collects payloads, and the end."""

    def __init__(self, link: ShmLink) -> None:
        self.headers: list[FrameHeader] = []
        self.payloads: list[bytes] = []
        self.ends: list[ZbmdError | None] = []
        self.ended = asyncio.Event()
        self._arrived = asyncio.Event()
        link.on_frame = self._on_frame
        link.on_closed = self._on_closed

    def _on_frame(self, header: FrameHeader, payload: memoryview) -> None:
        self.headers.append(header)
        self.payloads.append(bytes(payload))
        self._arrived.set()

    def _on_closed(self, error: ZbmdError | None) -> None:
        self.ends.append(error)
        self.ended.set()

    async def wait_for(self, count: int) -> None:
        while len(self.payloads) < count:
            self._arrived.clear()
            await self._arrived.wait()


async def end_both(a: ShmLink, b: ShmLink, *received: Received) -> None:
    a.close()
    b.close()
    for each in received:
        await each.ended.wait()


@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(3_900, 4_200), st.just(20_000)), max_size=60)
)
def test_frames_of_any_size_arrive_whole_and_in_order(sizes: list[int]) -> None:
    async def main() -> None:
        a, b = pair()
        received = Received(b)
        sent = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
        for payload in sent:
            await a.writable()
            a.send(payload, epoch=5, trace_id=6, flags=7)
        await received.wait_for(len(sent))
        assert received.payloads == sent
        for header in received.headers:
            assert (header.epoch, header.trace_id, header.flags) == (5, 6, 7)
            assert (header.job, header.incarnation) == (7, 3)
        await end_both(a, b, received)
        assert received.ends == [None]

    asyncio.run(main())


async def test_send_is_bounded_and_the_refused_frame_is_not_sent() -> None:
    a, b = pair()
    sent = 0
    with pytest.raises(LinkFull, match="await writable"):
        while True:
            a.send(sent.to_bytes(500, "little"))
            sent += 1
    assert sent > 4096 // 548
    waiting = asyncio.ensure_future(a.writable())
    await asyncio.wait([waiting], timeout=0)
    assert not waiting.done(), "nobody reads"
    received = Received(b)
    await waiting
    a.send(sent.to_bytes(500, "little"))
    await received.wait_for(sent + 1)
    assert [int.from_bytes(payload, "little") for payload in received.payloads] == list(range(sent + 1))
    await a.flush()
    await end_both(a, b, received)


async def test_a_frame_over_the_bound_is_refused_here_and_the_link_lives() -> None:
    a, b = pair(LinkLimits(frame_bytes_max=1000))
    received = Received(b)
    with pytest.raises(LocalProtocolError, match="as a region"):
        a.send(bytes(1001 - HEADER_BYTES))
    a.send(bytes(1000 - HEADER_BYTES))
    await received.wait_for(1)
    await end_both(a, b, received)


async def test_frames_wait_in_the_ring_until_somebody_listens() -> None:
    a, b = pair()
    a.send(b"early")
    a.close()
    end = asyncio.get_running_loop().create_future()
    a.on_closed = end.set_result
    assert await end is None
    received = Received(b)
    await received.ended.wait()
    assert received.payloads == [b"early"] and received.ends == [None]


async def test_close_is_idempotent_and_ends_both_sides_once() -> None:
    a, b = pair()
    ours, theirs = Received(a), Received(b)
    a.close()
    a.close()
    assert a.closed
    with pytest.raises(LinkClosed):
        a.send(b"late")
    for wait in (a.writable, a.flush):
        with pytest.raises(LinkClosed):
            await wait()
    await theirs.ended.wait()
    assert b.closed
    b.close()
    assert ours.ends == theirs.ends == [None]


@pytest.mark.parametrize("method", ["writable", "flush"])
async def test_a_close_ends_those_who_wait_for_the_queue(method: str) -> None:
    a, b = pair()
    with pytest.raises(LinkFull):
        while True:
            a.send(bytes(500))
    waiting = asyncio.ensure_future(getattr(a, method)())
    await asyncio.wait([waiting], timeout=0)
    a.close()
    with pytest.raises(LinkClosed):
        await waiting
    b.close()


async def test_a_cancelled_wait_for_the_queue_is_forgotten() -> None:
    a, b = pair()
    with pytest.raises(LinkFull):
        while True:
            a.send(bytes(500))
    waiting = asyncio.ensure_future(a.writable())
    await asyncio.wait([waiting], timeout=0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not a._waiters
    a.close()
    b.close()


async def test_closing_inside_on_frame_drops_what_follows() -> None:
    a, b = pair()
    seen: list[bytes] = []
    ended = asyncio.Event()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        seen.append(bytes(payload))
        b.close()

    for number in range(5):
        a.send(bytes([number]))
    b.on_frame = on_frame
    b.on_closed = lambda error: ended.set()
    await ended.wait()
    assert seen == [b"\0"]
    a.close()


async def test_an_error_of_the_callback_is_the_loops_and_the_next_frame_still_comes() -> None:
    a, b = pair()
    reported: list[object] = []
    done = asyncio.Event()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        if bytes(payload) == b"bad":
            raise ValueError("of the user")
        done.set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    b.on_frame = on_frame
    a.send(b"bad")
    a.send(b"good")
    await done.wait()
    assert [str(error) for error in reported] == ["of the user"]
    a.close()
    b.close()


async def test_a_remote_protocol_error_of_the_callback_ends_the_link_with_it() -> None:
    a, b = pair()
    ours = Received(a)
    end: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        raise RemoteProtocolError("not a message")

    b.on_frame = on_frame
    b.on_closed = end.set_result
    with capture_logs() as logs:
        a.send(b"?")
        assert str(await end) == "not a message"
    assert [entry["event"] for entry in logs] == ["link ended"] and logs[0]["peer"] == "a"
    await ours.ended.wait()
    assert isinstance(ours.ends[0], PeerLost)


def header_with(payload_bytes: int = 0, job: int = 7, incarnation: int = 3, hlc: int = 0) -> bytes:
    return pack_header(
        FrameHeader(payload_bytes=payload_bytes, job=job, incarnation=incarnation, hlc=hlc, flags=0)
    )


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "shorter than its header"),
        (b"GET / HTTP/1.1\r\n" + bytes(40), "begins with"),
        (header_with(payload_bytes=10), "announces 10 bytes"),
        (header_with() + b"more", "announces 0 bytes"),
        (header_with(incarnation=2), "incarnation 2"),
        (header_with(job=8), "job 0x8"),
        (header_with()[:4] + b"\x63\0" + header_with()[6:], "format version 99"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "frame",
)
async def test_a_bad_frame_ends_its_link_and_nothing_else(frame: bytes, words: str) -> None:
    a, b = pair()
    other_a, other_b = pair()
    bystander = Received(other_b)
    theirs = Received(b)
    a._writer.write(frame, b"", 0)
    with capture_logs() as logs:
        await theirs.ended.wait()
    assert theirs.payloads == []
    assert isinstance(theirs.ends[0], RemoteProtocolError) and words in str(theirs.ends[0])
    assert len(logs) == 1
    other_a.send(b"still here")
    await bystander.wait_for(1)
    for link in (a, other_a, other_b):
        link.close()


async def test_a_frame_over_the_receivers_bound_ends_the_link() -> None:
    a, b = link_pair(endpoint("a"), endpoint("b", LinkLimits(ring_bytes=1 << 12, frame_bytes_max=1000)))
    theirs = Received(b)
    a.send(bytes(1000))
    await theirs.ended.wait()
    assert "over the bound of 1000" in str(theirs.ends[0])
    a.close()


async def test_bytes_in_the_links_socket_end_it() -> None:
    a, b = pair()
    theirs = Received(b)
    a._sock.send(b"hello?")
    await theirs.ended.wait()
    assert isinstance(theirs.ends[0], RemoteProtocolError)
    a.close()


async def test_an_impossible_ring_position_ends_the_link_for_reader_and_writer() -> None:
    for position in ("head", "tail"):
        a, b = pair()
        ours, theirs = Received(a), Received(b)
        if position == "head":
            a._mapping.store64(0, 1 << 40)
            os.eventfd_write(b._wake_fd, 1)
            await theirs.ended.wait()
            assert isinstance(theirs.ends[0], RemoteProtocolError)
        else:
            a._mapping.store64(64, 1 << 40)
            with pytest.raises(LinkClosed, match="reader's position"):
                a.send(b"x")
            await ours.ended.wait()
            assert isinstance(ours.ends[0], RemoteProtocolError)
        await end_both(a, b, ours, theirs)


async def test_receiving_a_frame_moves_our_clock_past_the_senders() -> None:
    ahead = HybridClock()
    a, b = link_pair(Endpoint(identity=endpoint("a").identity, cookie=bytes(32), clock=ahead), endpoint("b"))
    ours, theirs = Received(a), Received(b)
    for number in range(20):
        a.send(b"ping")
        await theirs.wait_for(number + 1)
        b.send(b"pong")
        await ours.wait_for(number + 1)
        assert theirs.headers[-1].hlc < ours.headers[-1].hlc
    await end_both(a, b, ours, theirs)


async def test_a_stamp_of_a_broken_clock_is_counted_and_not_followed() -> None:
    clock = HybridClock()
    a, b = link_pair(endpoint("a"), Endpoint(identity=endpoint("b").identity, cookie=bytes(32), clock=clock))
    theirs = Received(b)
    a._writer.write(header_with(hlc=(1 << 64) - 1), b"", 0)
    await theirs.wait_for(1)
    assert clock.refused == 1 and clock.last < 1 << 63
    await end_both(a, b, theirs)


async def test_a_pair_shows_each_other_their_segments() -> None:
    segment = Segment.create(slot=2, incarnation=3, arena_bytes=4096, inbox_bytes=4096)
    a, b = link_pair(endpoint("a", segment=segment), endpoint("b"))
    assert a.peer_segment is None
    assert b.peer_segment is not None and b.peer_segment.slot == 2
    assert (a.peer.name, b.peer.name) == ("b", "a")
    assert repr(a) == "<ShmLink a to b#3 open>"
    a.close()
    b.close()
    segment.close()


@pytest.mark.parametrize(
    "change",
    [
        {"ring_bytes": 5000},
        {"ring_bytes": 1 << 11},
        {"ring_bytes": 1 << 25},
        {"frame_bytes_max": HEADER_BYTES - 1},
        {"frame_bytes_max": 1 << 21},
        {"queue_bytes_max": 0},
        {"queue_frames_max": 0},
        {"frames_per_wake": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        LinkLimits(**change)
