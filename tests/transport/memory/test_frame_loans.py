"""Large frames that lie in the sender's arena: bounds, what is held, ends and deaths, forged records."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.links.link_harness import COOKIE, INCARNATION, JOB, Ear

from zbmd.transport import capture
from zbmd.transport.capture.records import FrameIn
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import HEADER_BYTES, FrameHeader, pack_header
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, LinkLimits
from zbmd.transport.memory.frame_loans import BLOCK_BYTES_MIN, process_ended
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import RING_BLOCKS
from zbmd.transport.shm import connect as shm
from zbmd.transport.shm.link import ShmLink

Fork = Callable[[Callable[[], None]], int]
ARENA_BYTES = 16 << 20
LARGE = BLOCK_BYTES_MIN
RECORD = struct.Struct("<QI")
TIMEOUT_S = 180.0


_segments: list[Segment] = []


@pytest.fixture(autouse=True)
def segments() -> Iterator[None]:
    """Close what `endpoint` has made."""
    yield
    close_segments()


def close_segments() -> None:
    while _segments:
        _segments.pop().close()


def endpoint(slot: int, *, arena_bytes: int = ARENA_BYTES, limits: LinkLimits | None = None) -> Endpoint:
    segment = Segment.create(slot=slot, incarnation=INCARNATION, arena_bytes=arena_bytes, inbox_bytes=0)
    _segments.append(segment)
    identity = Identity(
        name=f"rank{slot}", pid=os.getpid(), uid=os.getuid(), incarnation=INCARNATION, job=JOB
    )
    return Endpoint(identity=identity, cookie=COOKIE, limits=limits or LinkLimits(), segment=segment)


def lent_bytes(end: Endpoint) -> int:
    assert end.segment is not None
    end.segment.frame_lender.collect()
    return end.segment.frame_lender.lent_bytes


class Holder:
    """Keeps the payloads themselves, not copies of them."""

    def __init__(self, link: ShmLink) -> None:
        self.held: list[memoryview] = []
        self._came = asyncio.Event()
        link.on_frame = self._on_frame

    def _on_frame(self, header: FrameHeader, payload: memoryview) -> None:
        self.held.append(payload)
        self._came.set()

    def check(self, expected: list[int]) -> None:
        """Payloads that are held keep the bytes that were sent first."""
        for view, byte in zip(self.held, expected, strict=False):
            assert bytes(view) == bytes([byte]) * len(view)

    async def frames(self, count: int) -> None:
        while len(self.held) < count:
            self._came.clear()
            async with asyncio.timeout(TIMEOUT_S):
                await self._came.wait()


async def test_a_large_payload_lies_in_the_senders_arena_until_it_is_let_go() -> None:
    one, other = endpoint(0), endpoint(1)
    a, b = shm.link_pair(one, other)
    holder, data = Holder(b), bytes(range(256)) * (LARGE // 256)
    a.send(data)
    await holder.frames(1)
    assert one.segment is not None and one.segment.arena.used_bytes == len(data)
    assert holder.held[0].readonly and holder.held[0] == data
    part = holder.held.pop()[10:20]
    a.send(b"")
    await holder.frames(1)
    assert lent_bytes(one) == len(data), "a part of it is still held"
    del part
    a.send(data)
    await holder.frames(2)
    assert one.segment.arena.used_bytes == len(data), "the first is back"
    a.close()
    b.close()


async def test_what_fits_the_ring_and_what_has_no_memory_goes_through_the_ring() -> None:
    one, other = endpoint(0), endpoint(1)
    bare = Endpoint(identity=other.identity, cookie=COOKIE)
    for left, right, size in ((one, other, LARGE - 1), (one, bare, LARGE), (bare, other, LARGE)):
        a, b = shm.link_pair(left, right)
        ear = Ear(b)
        a.send(bytes(size))
        assert await ear.frames(1) == [bytes(size)]
        assert lent_bytes(one) == 0
        a.close()
        b.close()


async def test_a_full_arena_sends_in_pieces() -> None:
    one, other = endpoint(0), endpoint(1)
    assert one.segment is not None
    everything = one.segment.arena.empty(one.segment.arena.capacity_bytes, np.uint8)
    a, b = shm.link_pair(one, other)
    ear = Ear(b)
    a.send(bytes(LARGE))
    assert await ear.frames(1) == [bytes(LARGE)]
    del everything
    a.send(bytes(LARGE))
    assert await ear.frames(2) == [bytes(LARGE)] * 2
    a.close()
    b.close()


async def test_what_one_link_may_lend_is_bounded_and_the_rest_waits_for_its_reader() -> None:
    one, other = endpoint(0), endpoint(1)
    assert one.segment is not None
    lender = one.segment.frame_lender
    a, b = shm.link_pair(one, other)
    sent = [bytes([number]) * LARGE for number in range(40)]
    for payload in sent:
        a.send(payload)
    assert lender.link_bytes_max // 2 < lender.lent_bytes <= lender.link_bytes_max
    c, d = shm.link_pair(one, other)
    ear = Ear(d)
    c.send(sent[0])
    assert await ear.frames(1) == sent[:1]
    assert await Ear(b).frames(len(sent)) == sent
    for link in (a, b, c, d):
        link.close()


@settings(max_examples=25, deadline=None)
@given(
    script=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(LARGE - 1, 4 * LARGE)),
            st.tuples(st.just("read"), st.just(0)),
            st.tuples(st.just("drop"), st.integers(0, 40)),
        ),
        max_size=60,
    )
)
def test_whatever_is_held_keeps_its_bytes(script: list[tuple[str, int]]) -> None:
    async def main() -> None:
        one, other = endpoint(0, arena_bytes=4 << 20), endpoint(1, arena_bytes=0)
        a, b = shm.link_pair(one, other)
        holder, sent = Holder(b), 0
        expected: list[int] = []
        for what, number in script:
            if what == "send":
                a.send(bytes([sent % 251]) * number)
                expected.append(sent % 251)
                sent += 1
            elif what == "read":
                await asyncio.sleep(0)
            elif holder.held:
                at = number % len(holder.held)
                del holder.held[at], expected[at]
            holder.check(expected)
        await holder.frames(len(expected))
        holder.check(expected)
        holder.held.clear()
        a.close()
        b.close()
        await asyncio.sleep(0)
        assert lent_bytes(one) == 0
        assert one.segment is not None
        one.segment.arena.check_invariants()

    try:
        asyncio.run(main())
    finally:
        close_segments()


# --- ends -------------------------------------------------------------------------------------------------


async def test_a_view_outlives_its_link_and_so_does_the_block() -> None:
    one, other = endpoint(0), endpoint(1)
    a, b = shm.link_pair(one, other)
    holder, data = Holder(b), b"x" * LARGE
    a.send(data)
    await holder.frames(1)
    a.close()
    b.close()
    await asyncio.sleep(0)
    c, d = shm.link_pair(one, other)
    ear = Ear(d)
    c.send(b"y" * LARGE)
    await ear.frames(1)
    assert holder.held[0] == data, "its block was not used again"
    assert lent_bytes(one) >= LARGE
    holder.held.clear()
    c.close()
    d.close()
    assert lent_bytes(one) == 0


@pytest.mark.parametrize("first", ["sender", "reader"])
async def test_what_nobody_has_read_comes_back_when_both_ends_are_closed(first: str) -> None:
    one, other = endpoint(0), endpoint(1)
    a, b = shm.link_pair(one, other)
    for _ in range(3):
        a.send(bytes(LARGE))
    assert lent_bytes(one) == 3 * LARGE
    for link in (a, b) if first == "sender" else (b, a):
        link.close()
    await asyncio.sleep(0)
    assert lent_bytes(one) == 0


async def test_what_was_lent_is_read_after_its_sender_has_closed() -> None:
    one, other = endpoint(0), endpoint(1)
    a, b = shm.link_pair(one, other)
    sent = [bytes([number]) * LARGE for number in range(3)]
    for payload in sent:
        a.send(payload)
    a.close()
    ear = Ear(b)
    assert await ear.end() is None
    assert ear.payloads == sent
    assert lent_bytes(one) == 0


@pytest.mark.parametrize("holds", [False, True], ids=["unread", "held"])
async def test_what_a_killed_reader_had_is_ours_again(fork: Fork, holds: bool) -> None:
    address = f"zbmd-test-{os.getpid()}-{os.urandom(4).hex()}"
    ready, tell = os.pipe()
    go, start = os.pipe()

    def read_for_ever() -> None:
        async def main() -> None:
            os.read(go, 1)
            link = await shm.dial(address, endpoint(1))
            if holds:
                holder = Holder(link)
                await holder.frames(1)
            os.write(tell, b"r")
            await asyncio.Event().wait()

        asyncio.run(main())

    pid = fork(read_for_ever)
    one = endpoint(0)
    links: asyncio.Queue[ShmLink] = asyncio.Queue()
    listener = shm.listen(address, links.put_nowait, one)
    os.write(start, b"g")
    link = await links.get()
    ear = Ear(link)
    link.send(bytes(LARGE))
    await asyncio.to_thread(os.read, ready, 1)
    assert lent_bytes(one) == LARGE
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    await ear.end()
    await asyncio.to_thread(select.select, [pidfd], [], [], TIMEOUT_S)
    assert lent_bytes(one) == 0
    listener.close()
    for fd in (ready, tell, go, start, pidfd):
        os.close(fd)


def test_a_process_that_cannot_be_found_out_about_is_not_taken_for_dead(fork: Fork) -> None:
    assert not process_ended(os.getpid())
    assert not process_ended(0)
    pid = fork(lambda: None)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_ended(pid), "a zombie reads nothing"
    os.waitpid(pid, 0)
    assert process_ended(pid)


# --- records, and enemies ---------------------------------------------------------------------------------


async def test_a_recorded_frame_is_a_copy_and_its_block_comes_back_at_once(tmp_path: Path) -> None:
    clock = HybridClock()
    origin = capture.Origin(process="rank1", incarnation=INCARNATION, job=JOB)
    log = capture.LogRecorder(tmp_path, origin, capture.Clocks(hybrid=clock))
    one, plain = endpoint(0), endpoint(1)
    other = Endpoint(identity=plain.identity, cookie=COOKIE, segment=plain.segment, clock=clock, recorder=log)
    a, b = shm.link_pair(one, other)
    holder, data = Holder(b), os.urandom(LARGE)
    a.send(data)
    await holder.frames(1)
    assert lent_bytes(one) == LARGE
    a.send(b"next")
    await holder.frames(2)
    a.send(data)
    assert one.segment is not None and one.segment.arena.used_bytes == LARGE, "though the first is held"
    await holder.frames(3)
    a.close()
    b.close()
    log.close()
    (process,) = capture.open_log(tmp_path).processes
    records = [record for part in process.segments for _, found in part.records() for record in found]
    frames = [bytes(record.frame) for record in records if isinstance(record, FrameIn)]
    assert [frame[HEADER_BYTES:] for frame in frames] == [data, b"next", data]


def header(payload_bytes: int, *, job: int = JOB) -> bytes:
    return pack_header(FrameHeader(payload_bytes=payload_bytes, job=job, incarnation=INCARNATION))


def forged(name: str, arena: int) -> tuple[bytes, bytes]:
    """Header and record."""
    return {
        "before the arena": (header(64), RECORD.pack(0, 0)),
        "behind the arena": (header(64), RECORD.pack(arena + ARENA_BYTES - 63, 0)),
        "far away": (header(64), RECORD.pack((1 << 64) - 1, 0)),
        "no such block": (header(64), RECORD.pack(arena, RING_BLOCKS)),
        "too short": (header(64), RECORD.pack(arena, 0)[:-1]),
        "too long": (header(64), RECORD.pack(arena, 0) + b"\0"),
        "no record": (header(64), b""),
        "half a header": (header(64)[:20], b""),
        "over the bound": (header(1 << 19), RECORD.pack(arena, 0)),
        "another job": (header(64, job=JOB + 1), RECORD.pack(arena, 0)),
    }[name]


FORGED = (
    *("before the arena", "behind the arena", "far away", "no such block", "too short", "too long"),
    *("no record", "half a header", "over the bound", "another job"),
)


@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_record_ends_its_link_and_nothing_else(name: str) -> None:
    one, other = endpoint(0), endpoint(1, limits=LinkLimits(frame_bytes_max=1 << 18))
    a, b = shm.link_pair(one, other)
    ear = Ear(b)
    assert b.peer_segment is not None
    a._writer.write(*forged(name, b.peer_segment.arena_offset), 0, True)
    assert isinstance(await ear.end(), RemoteProtocolError)
    assert ear.payloads == []
    a.close()


async def test_a_block_named_by_a_peer_without_memory_ends_the_link() -> None:
    one, other = endpoint(0), endpoint(1)
    a, b = shm.link_pair(Endpoint(identity=one.identity, cookie=COOKIE), other)
    ear = Ear(b)
    a._writer.write(header(64), RECORD.pack(4096, 0), 0, True)
    assert isinstance(await ear.end(), RemoteProtocolError)
    a.close()


async def test_a_reader_that_gives_back_what_it_has_not_read_harms_only_itself() -> None:
    one, other = endpoint(0), endpoint(1)
    a, b = shm.link_pair(one, other)
    for number in range(2 * RING_BLOCKS):
        a.send(bytes([number]) * LARGE)
        for word in range(RING_BLOCKS // 2):
            a._mapping.store64(256 + 8 * word, 0)
    assert one.segment is not None
    one.segment.arena.check_invariants()
    assert one.segment.frame_lender.lent_bytes <= one.segment.frame_lender.link_bytes_max
    ear = Ear(b)
    assert [len(payload) for payload in await ear.frames(2 * RING_BLOCKS)] == [LARGE] * 2 * RING_BLOCKS
    a.close()
    b.close()
