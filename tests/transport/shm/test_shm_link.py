"""Shm links' own parts: ring, socket, segments. The conformance suite has what all links do."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from structlog.testing import capture_logs
from support.links.link_harness import Ear

from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import (
    LinkClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
)
from zbmd.transport.frames import HEADER_BYTES, FrameHeader, pack_header
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.link.spin import SpinChoice, SpinPolicy
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm.connect import Endpoint, link_pair
from zbmd.transport.shm.link import ShmLink

BLOCKED_S = 180
"""A process that takes so long is blocked for ever."""

LIMITS = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 14, queue_frames_max=16, frames_per_wake=4)


def endpoint(name: str, limits: LinkLimits = LIMITS, segment: Segment | None = None) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=3, job=7)
    return Endpoint(identity=identity, cookie=bytes(32), limits=limits, segment=segment)


def pair(limits: LinkLimits = LIMITS) -> tuple[ShmLink, ShmLink]:
    return link_pair(endpoint("a", limits), endpoint("b", limits))


async def end_both(a: ShmLink, b: ShmLink, *received: Ear) -> None:
    a.close()
    b.close()
    for each in received:
        await each.end()


async def test_bytes_in_the_links_socket_end_it_with_one_line_in_the_log() -> None:
    a, b = pair()
    theirs = Ear(b)
    with capture_logs() as logs:
        a._sock.send(b"hello?")
        assert isinstance(await theirs.end(), RemoteProtocolError)
    assert [(entry["event"], entry["peer"]) for entry in logs] == [("link ended", "a")]
    a.close()


async def test_a_wake_up_that_the_peer_took_back_and_made_block_holds_nobody_up() -> None:
    a, b = pair()
    theirs = Ear(b)
    os.set_blocking(b._wake_fd, True)
    waking = threading.Thread(target=b._on_wake, daemon=True)
    waking.start()
    await asyncio.to_thread(waking.join, BLOCKED_S)
    assert not waking.is_alive()
    a.send(b"frame")
    await theirs.frames(1)
    await end_both(a, b, theirs)


@pytest.mark.parametrize("position", ["head", "tail"])
async def test_an_impossible_ring_position_ends_the_link_for_reader_and_writer(position: str) -> None:
    a, b = pair()
    ours, theirs = Ear(a), Ear(b)
    if position == "head":
        a._mapping.store64(0, 1 << 40)
        os.eventfd_write(b._wake_fd, 1)
        await theirs.end()
        assert isinstance(theirs.ends[0], RemoteProtocolError)
    else:
        a._mapping.store64(64, 1 << 40)
        with pytest.raises(LinkClosed, match="reader's position"):
            a.send(b"x")
        await ours.end()
        assert isinstance(ours.ends[0], RemoteProtocolError)
    await end_both(a, b, ours, theirs)


async def test_receiving_a_frame_moves_our_clock_past_the_senders() -> None:
    ahead = HybridClock()
    a, b = link_pair(Endpoint(identity=endpoint("a").identity, cookie=bytes(32), clock=ahead), endpoint("b"))
    ours, theirs = Ear(a), Ear(b)
    for number in range(20):
        a.send(b"ping")
        await theirs.frames(number + 1)
        b.send(b"pong")
        await ours.frames(number + 1)
        assert theirs.headers[-1].hlc < ours.headers[-1].hlc
    await end_both(a, b, ours, theirs)


async def test_a_stamp_of_a_broken_clock_is_counted_and_not_followed() -> None:
    clock = HybridClock()
    a, b = link_pair(endpoint("a"), Endpoint(identity=endpoint("b").identity, cookie=bytes(32), clock=clock))
    theirs = Ear(b)
    header = FrameHeader(payload_bytes=0, job=7, incarnation=3, hlc=(1 << 64) - 1)
    a._writer.write(pack_header(header), b"", 0)
    await theirs.frames(1)
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
        {"spin_ns": -1},
        {"spin_ns": 1_000_001},
    ],
)
def test_limits_that_make_no_sense_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        LinkLimits(**change)


def always_spins(self: SpinPolicy, now_ns: int) -> SpinChoice:
    return SpinChoice.SPIN


def never_ends(self: SpinPolicy, now_ns: int) -> bool:
    return True


async def test_a_reader_that_spins_is_not_parked_and_parks_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SpinPolicy, "_choose", always_spins)
    monkeypatch.setattr(SpinPolicy, "goes_on", never_ends)
    a, b = pair()
    theirs = Ear(b)
    a.send(b"one")
    await theirs.frames(1)
    for count in range(2, 20):
        await asyncio.sleep(0)
        a.send(b"another")
        with pytest.raises(BlockingIOError):
            os.eventfd_read(b._wake_fd)  # no need to wake it
        await theirs.frames(count)
    monkeypatch.setattr(SpinPolicy, "goes_on", lambda *_: False)
    for _ in range(5):
        await asyncio.sleep(0)
    a.send(b"last")
    assert os.eventfd_read(b._wake_fd) == 1, "it had parked, and is woken"
    os.eventfd_write(b._wake_fd, 1)
    await theirs.frames(20)
    await end_both(a, b, theirs)


@pytest.mark.parametrize("act", ["pause", "close", "lose"])
async def test_whatever_happens_while_a_reader_spins(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpinPolicy, "_choose", always_spins)
    monkeypatch.setattr(SpinPolicy, "goes_on", never_ends)
    a, b = pair()
    ours, theirs = Ear(a), Ear(b)
    a.send(b"one")
    await theirs.frames(1)
    await asyncio.sleep(0)
    assert b._spinning
    if act == "pause":
        b.on_frame = None
        a.send(b"waits")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not b._spinning and theirs.payloads == [b"one"]
        again = Ear(b)
        assert await again.frames(1) == [b"waits"]
        await end_both(a, b, again)
    elif act == "close":
        b.close()
        assert await theirs.end() is None and await ours.end() is None
    else:
        a.send(b"last")
        a._fail(RemoteProtocolError("the test breaks it off"))
        assert isinstance(await theirs.end(), PeerLost)
        assert theirs.payloads == [b"one", b"last"]


async def test_a_frame_that_comes_as_a_spin_ends_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpinPolicy, "_choose", always_spins)
    a, b = pair()
    theirs = Ear(b)

    def ends_with_a_frame(self: SpinPolicy, now_ns: int) -> bool:
        a.send(b"in between")
        monkeypatch.undo()
        return False

    monkeypatch.setattr(SpinPolicy, "goes_on", ends_with_a_frame)
    a.send(b"one")
    assert await theirs.frames(2) == [b"one", b"in between"]
    await end_both(a, b, theirs)
