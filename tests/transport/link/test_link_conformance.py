"""The promises of every transport's links, with both ends on one loop. See `link_harness`.

Deaths of the peer's process are in `test_link_conformance_deaths`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.links.link_harness import INCARNATION, JOB, SMALL, Ear, LinkHarness, Net, fill
from support.links.link_harnesses import HARNESSES
from support.rdma.rdma_world import given_devices

from zbmd.transport.errors import (
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.frames import HEADER_BYTES, MAX_FRAME_BYTES, FrameHeader, pack_header
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import RING_BYTES_MAX, RING_BYTES_MIN, LinkLimits

pytestmark = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)

MAX_PAYLOAD = MAX_FRAME_BYTES - HEADER_BYTES
WAITS: list[Callable[[LinkSide], Awaitable[None]]] = [LinkSide.writable, LinkSide.flush]
each_wait = pytest.mark.parametrize("wait", WAITS, ids=["writable", "flush"])


def numbered(count: int, size: int = 4) -> list[bytes]:
    return [number.to_bytes(4, "little") + bytes(size - 4) for number in range(count)]


async def send_all(link: LinkSide, payloads: list[bytes]) -> int:
    """Send with back-pressure; how often the queue was full."""
    full = 0
    for payload in payloads:
        while True:
            try:
                link.send(payload, epoch=5, trace_id=6, flags=7)
                break
            except LinkFull:
                full += 1
                await link.writable()
    return full


async def turns(count: int) -> None:
    """Give the loop so many turns: for what must not happen meanwhile."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- order and boundaries -------------------------------------------------------------------------------


@settings(max_examples=4 if given_devices() else 25)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 200), st.integers(3_900, 4_200), st.integers(0, 40_000)), max_size=60
    ),
    ring_bytes=st.sampled_from([RING_BYTES_MIN, 1 << 13, 1 << 17]),
    frames_per_wake=st.sampled_from([1, 3, 256]),
)
def test_frames_of_any_size_arrive_whole_and_in_order(
    harness: LinkHarness, sizes: list[int], ring_bytes: int, frames_per_wake: int
) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = {a: Ear(a), b: Ear(b)}
        sent = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
        await asyncio.gather(send_all(a, sent), send_all(b, sent[::-1]))
        for link, expected in ((b, sent), (a, sent[::-1])):
            assert await ears[link].frames(len(sent)) == expected
            for header in ears[link].headers:
                assert (header.epoch, header.trace_id, header.flags) == (5, 6, 7)
                assert (header.job, header.incarnation) == (JOB, link.peer.incarnation)
            stamps = [header.hlc for header in ears[link].headers]
            assert stamps == sorted(set(stamps)), "every frame of a sender has a later stamp"
        a.close()
        assert [await ears[a].end(), await ears[b].end()] == [None, None]

    limits = LinkLimits(ring_bytes=ring_bytes, queue_bytes_max=1 << 16, frames_per_wake=frames_per_wake)
    harness.run(scenario, ours=limits, theirs=limits)


@pytest.mark.parametrize("ring_bytes", [RING_BYTES_MIN, 1 << 17, RING_BYTES_MAX])
def test_the_smallest_and_the_largest_frame(harness: LinkHarness, ring_bytes: int) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ear = Ear(b)
        largest = bytes(range(256)) * (MAX_PAYLOAD // 256 + 1)
        sent = [b"", largest[:MAX_PAYLOAD], b"", b"x"]
        await send_all(a, sent)
        assert await ear.frames(4) == sent
        with pytest.raises(LocalProtocolError, match="as a region"):
            a.send(bytes(MAX_PAYLOAD + 1))
        a.send(b"the link lives")
        assert (await ear.frames(5))[4] == b"the link lives"

    limits = LinkLimits(ring_bytes=ring_bytes)
    harness.run(scenario, ours=limits, theirs=limits)


def test_the_senders_bound_of_a_frame_is_exact(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ear = Ear(b)
        with pytest.raises(LocalProtocolError, match="as a region"):
            a.send(bytes(1001 - HEADER_BYTES))
        a.send(bytes(1000 - HEADER_BYTES))
        await ear.frames(1)

    harness.run(scenario, ours=LinkLimits(frame_bytes_max=1000))


def test_the_receivers_bound_of_a_frame_is_exact(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ear = Ear(b)
        a.send(bytes(1000 - HEADER_BYTES))
        a.send(bytes(1001 - HEADER_BYTES))
        error = await ear.end()
        assert isinstance(error, RemoteProtocolError) and "1000" in str(error)
        assert ear.payloads == [bytes(1000 - HEADER_BYTES)]

    harness.run(scenario, theirs=LinkLimits(frame_bytes_max=1000))


@pytest.mark.parametrize(
    "limits",
    [
        LinkLimits(ring_bytes=RING_BYTES_MIN, queue_bytes_max=1),
        LinkLimits(ring_bytes=RING_BYTES_MIN, queue_frames_max=1),
        LinkLimits(ring_bytes=RING_BYTES_MIN, frames_per_wake=1),
        LinkLimits(ring_bytes=RING_BYTES_MAX),
    ],
    ids=["one-queued-byte", "one-queued-frame", "one-frame-a-wake", "largest-ring"],
)
def test_links_work_at_the_bounds_of_their_limits(harness: LinkHarness, limits: LinkLimits) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ear = Ear(b)
        sent = numbered(60, 500)
        await send_all(a, sent)
        assert await ear.frames(60) == sent

    harness.run(scenario, ours=limits, theirs=limits)


def test_the_smallest_limits_still_carry_an_empty_frame(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        a.send(b"")
        await ears[1].frames(1)

    smallest = LinkLimits(
        frame_bytes_max=HEADER_BYTES,
        ring_bytes=RING_BYTES_MIN,
        queue_bytes_max=1,
        queue_frames_max=1,
        frames_per_wake=1,
    )
    harness.run(scenario, ours=smallest, theirs=smallest)


# --- back-pressure --------------------------------------------------------------------------------------


def test_a_peer_that_does_not_read_fills_a_bounded_queue(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        number = 0
        with pytest.raises(LinkFull, match="await writable"):
            while True:
                a.send(number.to_bytes(500, "little"))
                number += 1
        assert SMALL.queue_bytes_max <= a._queue_bytes < SMALL.queue_bytes_max + 500 + HEADER_BYTES
        assert len(a._queue) <= SMALL.queue_frames_max
        waiting = [asyncio.ensure_future(wait(a)) for wait in WAITS for _ in range(3)]
        await turns(20)
        assert not any(task.done() for task in waiting), "nobody reads"
        with pytest.raises(LinkFull):
            a.send(b"refused, and so not sent")
        ear = Ear(b)
        await a.writable()
        a.send(number.to_bytes(500, "little"))
        payloads = await ear.frames(number + 1)
        assert [int.from_bytes(payload, "little") for payload in payloads] == list(range(number + 1))
        await asyncio.gather(*waiting)

    harness.run(scenario)


def test_a_reader_may_pause_and_go_on(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        seen: list[bytes] = []
        paused = asyncio.Event()

        def until_five(header: FrameHeader, payload: memoryview) -> None:
            seen.append(bytes(payload))
            if len(seen) == 5:
                b.on_frame = None
                paused.set()

        b.on_frame = until_five
        sent = numbered(20)
        await send_all(a, sent)
        await paused.wait()
        await turns(20)
        assert seen == sent[:5]
        ear = Ear(b)
        assert await ear.frames(15) == sent[5:]

    harness.run(scenario)


def test_frames_wait_until_somebody_listens(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        a.send(b"early")
        ours = Ear(a)
        a.close()
        assert await ours.end() is None
        await turns(20)
        assert not b.closed, "its frame has not been delivered"
        theirs = Ear(b)
        assert await theirs.end() is None
        assert theirs.payloads == [b"early"]

    harness.run(scenario)


def test_many_tasks_may_send_at_once(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = {a: Ear(a), b: Ear(b)}

        async def send(link: LinkSide, task: int) -> None:
            await send_all(link, [bytes([task]) + number for number in numbered(40, 30 * task + 4)])

        await asyncio.gather(*(send(link, task) for link in (a, b) for task in range(16)))
        for ear in ears.values():
            payloads = await ear.frames(16 * 40)
            for task in range(16):
                theirs = [payload[1:] for payload in payloads if payload[0] == task]
                assert theirs == numbered(40, 30 * task + 4), "each task's frames keep their order"

    harness.run(scenario)


# --- cancellation ---------------------------------------------------------------------------------------


@each_wait
def test_a_cancelled_wait_leaves_nothing_and_harms_no_frame(
    harness: LinkHarness, wait: Callable[[LinkSide], Awaitable[None]]
) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        sent = await fill(a)
        tasks = [asyncio.ensure_future(wait(a)) for _ in range(5)]
        await turns(2)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks[1:])
        assert len(a._waiters) == 1
        ear = Ear(b)
        await tasks[0]
        assert await ear.frames(sent) == [bytes(500)] * sent
        assert not a._waiters

    harness.run(scenario)


@each_wait
def test_a_wait_cancelled_as_it_ends_is_cancelled(
    harness: LinkHarness, wait: Callable[[LinkSide], Awaitable[None]]
) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        await fill(a)
        task = asyncio.ensure_future(wait(a))
        await turns(2)
        b.close()
        a.close()  # wakes the task, which is cancelled before it has its turn
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and not a._waiters

    harness.run(scenario)


def test_a_dial_cancelled_at_any_turn_leaves_nothing(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        for count in range(16):
            task = asyncio.ensure_future(net.dial())
            await turns(count)
            if not task.cancel():
                net.links.append(await task)
            await asyncio.wait([task])
        await net.connect()
        assert await net.stop_listening() == 0
        # What remains of descriptors and tasks is looked for after every test.

    harness.run(scenario)


def test_a_cancelled_wait_for_a_listeners_end_can_be_repeated(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        dialing = asyncio.ensure_future(net.dial())
        await turns(2)
        waiting = asyncio.ensure_future(net.stop_listening())
        await turns(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await net.stop_listening() == 0
        dialing.cancel()
        await asyncio.wait([dialing])
        if not dialing.cancelled() and dialing.exception() is None:
            net.links.append(dialing.result())

    harness.run(scenario)


# --- the end --------------------------------------------------------------------------------------------


def test_close_is_idempotent_and_told_to_both_sides_once(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        a.close()
        a.close()
        assert a.closed
        with pytest.raises(LinkClosed):
            a.send(b"late")
        for wait in WAITS:
            with pytest.raises(LinkClosed):
                await wait(a)
        for ear in ears:
            assert await ear.end() is None
        assert b.closed
        b.close()
        with pytest.raises(LinkClosed):
            b.send(b"late")
        assert [ear.ends for ear in ears] == [[None], [None]]
        for link in (a, b):
            again = Ear(link)
            await turns(20)
            assert not again.ends, "it has been reported"

    harness.run(scenario)


def test_what_left_the_queue_before_a_close_arrives_and_nothing_is_torn(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        sent = await fill(a, bytes(3000))
        left = sent - len(a._queue)
        a.close()
        ear = Ear(b)
        assert await ear.end() is None
        assert ear.payloads == [bytes(3000)] * len(ear.payloads)
        assert left <= len(ear.payloads) <= sent

    harness.run(scenario)


def test_flush_then_close_loses_nothing(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ear = Ear(b)
        sent = numbered(100, 600)
        await send_all(a, sent)
        await a.flush()
        a.close()
        assert await ear.end() is None
        assert ear.payloads == sent

    harness.run(scenario)


def test_both_sides_may_close_at_once(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        a.send(b"x")
        b.send(b"y")
        a.close()
        b.close()
        for ear in ears:
            assert await ear.end() is None

    harness.run(scenario)


@each_wait
def test_a_close_of_either_side_ends_those_who_wait_for_the_queue(
    harness: LinkHarness, wait: Callable[[LinkSide], Awaitable[None]]
) -> None:
    async def scenario(net: Net) -> None:
        for closer in (0, 1):
            ends = await net.connect()
            await fill(ends[0])
            waiting = asyncio.ensure_future(wait(ends[0]))
            await turns(2)
            ends[closer].close()
            with pytest.raises(LinkClosed):
                await waiting
            ends[0].close()

    harness.run(scenario)


def test_a_stream_that_ends_without_a_goodbye_is_a_loss(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        theirs = Ear(b)
        a.send(b"last")
        a._fail(RemoteProtocolError("the test breaks it off"))
        error = await theirs.end()
        assert isinstance(error, PeerLost) and error.peer == a._identity.name
        assert theirs.payloads == [b"last"]
        with pytest.raises(LinkClosed, match="without a goodbye"):
            b.send(b"x")

    harness.run(scenario)


# --- callbacks ------------------------------------------------------------------------------------------


def test_closing_inside_on_frame_drops_what_follows(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        seen: list[bytes] = []
        ended = asyncio.Event()

        def on_frame(header: FrameHeader, payload: memoryview) -> None:
            seen.append(bytes(payload))
            b.close()

        for payload in numbered(5):
            a.send(payload)
        b.on_frame = on_frame
        b.on_closed = lambda error: ended.set()
        await ended.wait()
        assert seen == numbered(1)

    harness.run(scenario)


def test_sending_inside_on_frame_keeps_the_order(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ear = Ear(a)

        def echo(header: FrameHeader, payload: memoryview) -> None:
            b.send(bytes(payload))

        b.on_frame = echo
        sent = numbered(100, 100)
        for start in range(0, 100, 20):
            await send_all(a, sent[start : start + 20])
            await ear.frames(start + 20)
        assert ear.payloads == sent

    harness.run(scenario)


def test_an_error_of_the_callback_is_the_loops_and_the_next_frame_still_comes(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        reported: list[object] = []
        seen: list[bytes] = []
        ended: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()

        def on_frame(header: FrameHeader, payload: memoryview) -> None:
            seen.append(bytes(payload))
            if len(payload) == 3:
                raise ValueError("of the user")

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        b.on_frame = on_frame
        b.on_closed = ended.set_result
        for payload in (b"bad", b"good", b"bad"):
            a.send(payload)
        a.close()
        assert await ended is None, "the end is reported also after an error in the last frame"
        assert seen == [b"bad", b"good", b"bad"]
        assert [str(error) for error in reported] == ["of the user"] * 2

    harness.run(scenario)


def test_a_remote_protocol_error_of_the_callback_ends_the_link_with_it(harness: LinkHarness) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ours, theirs = Ear(a), Ear(b)

        def refuse(header: FrameHeader, payload: memoryview) -> None:
            raise RemoteProtocolError("not a message")

        b.on_frame = refuse
        a.send(b"?")
        assert str(await theirs.end()) == "not a message"
        assert isinstance(await ours.end(), PeerLost)

    harness.run(scenario)


# --- what a peer may send -------------------------------------------------------------------------------


def header_with(payload_bytes: int = 0, job: int = JOB, incarnation: int = 0, hlc: int = 0) -> bytes:
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
        (header_with(incarnation=INCARNATION + 1), f"incarnation {INCARNATION + 1}"),
        (header_with(job=8), "job 0x8"),
        (header_with()[:4] + b"\x63\0" + header_with()[6:], "format version 99"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "frame",
)
def test_a_bad_frame_ends_its_link_and_nothing_else(harness: LinkHarness, frame: bytes, words: str) -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        other_a, other_b = await net.connect()
        bystander, theirs = Ear(other_b), Ear(b)
        a._push(frame, b"")
        error = await theirs.end()
        assert isinstance(error, RemoteProtocolError) and words in str(error)
        assert theirs.payloads == []
        other_a.send(b"still here")
        await bystander.frames(1)

    harness.run(scenario)
