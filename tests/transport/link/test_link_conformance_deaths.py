"""The links of every transport when the peer's process dies, in each state. See `link_harness`.

The processes of a transport that has processes are real, and so is the SIGKILL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.links.link_harness import (
    SMALL,
    Ear,
    Fork,
    Life,
    LinkHarness,
    Other,
    Peer,
    fill,
)
from support.links.link_harnesses import HARNESSES

from zbmd.transport.errors import LinkClosed, LinkFull, PeerLost, RemoteProtocolError
from zbmd.transport.frames import FrameHeader, pack_header
from zbmd.transport.handshake.hello import HelloError
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import LinkLimits

pytestmark = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)

FRAMES = 3_000
UNENDING = 1 << 30
NEWS = b"of a former life"


def numbered(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(number * 7 % 300)


def assert_unbroken(payloads: list[bytes]) -> None:
    assert payloads == [numbered(number) for number in range(len(payloads))]


async def send_numbered(link: LinkSide, count: int) -> None:
    """Send numbered frames of many sizes, waiting whenever the queue is full."""
    for number in range(count):
        while True:
            try:
                link.send(numbered(number))
                break
            except LinkFull:
                await link.writable()


async def until_the_end(link: LinkSide, life: Life) -> None:
    await Ear(link).end()


async def lost(ear: Ear, link: LinkSide) -> None:
    """The link ends in `PeerLost`, reports it once, and raises it for every later use."""
    error = await ear.end()
    assert isinstance(error, PeerLost) and error.peer == "them"
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(ear.ends) == 1
    with pytest.raises(LinkClosed, match="them lost"):
        link.send(b"")
    for wait in (link.writable, link.flush):
        with pytest.raises(LinkClosed):
            await wait()


# --- no death: what has to arrive -----------------------------------------------------------------------


@pytest.mark.parametrize("listens", [False, True], ids=["accepted", "dialed"])
def test_frames_both_ways_through_small_queues(harness: LinkHarness, fork: Fork, listens: bool) -> None:
    # How often a queue fills up is decided by who gets the processor: `fill` shows that it does.
    async def exchange(link: LinkSide) -> None:
        ear = Ear(link)
        await send_numbered(link, FRAMES)
        await link.flush()
        assert_unbroken(await ear.frames(FRAMES))

    async def serve(link: LinkSide, life: Life) -> None:
        await exchange(link)
        assert await Ear(link).end() is None

    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        assert (link.peer.name, link.peer.incarnation) == ("them", 1)
        await exchange(link)
        link.close()
        assert await Ear(link).end() is None

    harness.run_with_peer(fork, scenario, Other(serve=serve, listens=listens), ours=SMALL)


def test_what_was_flushed_before_a_goodbye_outlives_its_sender(harness: LinkHarness, fork: Fork) -> None:
    async def serve(link: LinkSide, life: Life) -> None:
        await send_numbered(link, 100)
        await link.flush()
        link.close()

    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        await peer.ended()
        ear = Ear(link)
        assert await ear.end() is None
        assert_unbroken(ear.payloads)
        assert len(ear.payloads) == 100

    limits = LinkLimits()
    harness.run_with_peer(fork, scenario, Other(serve=serve, limits=limits), ours=limits)


# --- before the link stands -----------------------------------------------------------------------------


@pytest.mark.parametrize("message", range(4))
def test_a_listener_that_dies_in_its_hello(harness: LinkHarness, fork: Fork, message: int) -> None:
    async def scenario(peer: Peer) -> None:
        # Whether its final message came is decided by the time; either way the end is reported.
        try:
            link = await peer.link()
        except (PeerLost, HelloError):
            return
        assert isinstance(await Ear(link).end(), PeerLost)

    async def serve(link: LinkSide, life: Life) -> None:
        await life.die()

    harness.run_with_peer(fork, scenario, Other(serve=serve, listens=True, dies_at_message=message))


@pytest.mark.parametrize("message", range(4))
def test_a_dialer_that_dies_in_its_hello(harness: LinkHarness, fork: Fork, message: int) -> None:
    async def scenario(peer: Peer) -> None:
        await peer.ended()
        peer.revive()
        # Its second life gets further: the first one has not hurt the listener.
        while True:
            link = await peer.link()
            ear = Ear(link)
            if link.peer.incarnation == 2:
                break
            assert isinstance(await ear.end(), PeerLost)
        assert await ear.frames(1) == [b"alive"]

    async def serve(link: LinkSide, life: Life) -> None:
        if life.incarnation == 1:
            await life.die()
        link.send(b"alive")
        await until_the_end(link, life)

    other = Other(serve=serve, lives=2, dies_at_message=message)
    harness.run_with_peer(fork, scenario, other)


# --- while it stands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", [False, True], ids=["accepted", "dialed"])
def test_an_idle_peer_dies(harness: LinkHarness, fork: Fork, listens: bool) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        ear = Ear(link)
        link.send(b"?")
        assert await ear.frames(1) == [b"!"]
        await peer.kill()
        await lost(ear, link)

    async def serve(link: LinkSide, life: Life) -> None:
        await Ear(link).frames(1)
        link.send(b"!")
        await asyncio.Event().wait()

    harness.run_with_peer(fork, scenario, Other(serve=serve, listens=listens))


def test_a_sender_dies_in_mid_stream(harness: LinkHarness, fork: Fork) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        ear = Ear(link)
        await ear.frames(300)
        await peer.kill()
        await lost(ear, link)
        assert_unbroken(ear.payloads)

    async def serve(link: LinkSide, life: Life) -> None:
        await send_numbered(link, UNENDING)

    harness.run_with_peer(fork, scenario, Other(serve=serve))


def test_a_sender_dies_in_mid_frame(harness: LinkHarness, fork: Fork) -> None:
    whole = bytes(500_000)

    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        await peer.ended()
        ear = Ear(link)
        await lost(ear, link)
        assert ear.payloads in ([], [b"before"], [b"before", whole]), "a frame comes whole or not at all"

    async def serve(link: LinkSide, life: Life) -> None:
        link.send(b"before")
        link.send(whole)  # far more than there is room for
        await life.die()

    limits = LinkLimits(ring_bytes=1 << 12)
    harness.run_with_peer(fork, scenario, Other(serve=serve, limits=limits), ours=limits)


def test_a_reader_dies_while_we_wait_for_it(harness: LinkHarness, fork: Fork) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        ear = Ear(link)
        await ear.frames(1)
        await fill(link)
        waiting: list[Callable[[], Awaitable[None]]] = [link.writable, link.flush, link.writable]
        tasks = [asyncio.ensure_future(wait()) for wait in waiting]
        await asyncio.sleep(0)
        await peer.kill()
        for task in tasks:
            with pytest.raises(LinkClosed):
                await task
        await lost(ear, link)
        assert not link._waiters and not link._queue

    async def serve(link: LinkSide, life: Life) -> None:
        link.send(b"I do not read")
        await asyncio.Event().wait()

    harness.run_with_peer(fork, scenario, Other(serve=serve))


def test_a_reader_dies_in_its_callback(harness: LinkHarness, fork: Fork) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        with pytest.raises(LinkClosed):
            await send_numbered(link, UNENDING)
        await lost(Ear(link), link)

    async def serve(link: LinkSide, life: Life) -> None:
        await Ear(link).frames(1)
        await life.die()

    harness.run_with_peer(fork, scenario, Other(serve=serve))


def test_it_dies_while_nobody_here_reads(harness: LinkHarness, fork: Fork) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        await peer.ended()
        with pytest.raises(LinkClosed):
            while True:
                await link.writable()
                link.send(b"into the void")
                await asyncio.sleep(0)
        ear = Ear(link)
        await lost(ear, link)
        assert_unbroken(ear.payloads)

    async def serve(link: LinkSide, life: Life) -> None:
        await send_numbered(link, 5)
        await life.die()

    harness.run_with_peer(fork, scenario, Other(serve=serve))


# --- as it ends -----------------------------------------------------------------------------------------


def test_it_dies_right_after_its_goodbye(harness: LinkHarness, fork: Fork) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        ear = Ear(link)
        await peer.ended()
        # Where a death may take back words that were sent, it may take back the goodbye too.
        error = await ear.end()
        assert error is None or isinstance(error, PeerLost)
        assert_unbroken(ear.payloads)

    async def serve(link: LinkSide, life: Life) -> None:
        await send_numbered(link, 5)
        await link.flush()
        link.close()
        await life.die()

    harness.run_with_peer(fork, scenario, Other(serve=serve))


def test_it_dies_while_we_close(harness: LinkHarness, fork: Fork) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        ear = Ear(link)
        await fill(link)
        killing = asyncio.ensure_future(peer.kill())
        await asyncio.sleep(0)
        link.close()
        link.close()
        assert await ear.end() is None, "we had closed before we knew"
        await killing
        for _ in range(5):
            await asyncio.sleep(0)
        assert ear.ends == [None]

    async def serve(link: LinkSide, life: Life) -> None:
        await asyncio.Event().wait()

    harness.run_with_peer(fork, scenario, Other(serve=serve))


# --- the next incarnation -------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", [False, True], ids=["accepted", "dialed"])
def test_a_new_incarnation_is_another_peer(harness: LinkHarness, fork: Fork, listens: bool) -> None:
    async def scenario(peer: Peer) -> None:
        for incarnation in (1, 2, 3):
            link = await peer.link()
            assert link.peer.incarnation == incarnation
            ear = Ear(link)
            await ear.frames(50)
            await peer.kill()
            await lost(ear, link)
            assert all(header.incarnation == incarnation for header in ear.headers)
            assert_unbroken(ear.payloads)
            if incarnation < 3:
                peer.revive()

    async def serve(link: LinkSide, life: Life) -> None:
        await send_numbered(link, UNENDING)

    harness.run_with_peer(fork, scenario, Other(serve=serve, lives=3, listens=listens))


def test_a_frame_of_a_dead_incarnation_is_never_delivered(harness: LinkHarness, fork: Fork) -> None:
    async def scenario(peer: Peer) -> None:
        link = await peer.link()
        first = Ear(link)
        frame = (await first.frames(1))[0]
        assert int.from_bytes(frame[24:32], "little") == 1, "a whole frame of the first life's"
        await peer.kill()
        await lost(first, link)
        peer.revive()
        link = await peer.link()
        second = Ear(link)
        link.send(frame)
        error = await second.end()
        assert isinstance(error, RemoteProtocolError) and "incarnation 1" in str(error)
        assert second.payloads == []

    async def serve(link: LinkSide, life: Life) -> None:
        if life.incarnation == 1:
            link.send(own_frame(link))
            await until_the_end(link, life)
        frame = (await Ear(link).frames(1))[0]
        link._push(frame, b"")  # as it was: what a socket or a ring may have kept
        await until_the_end(link, life)

    harness.run_with_peer(fork, scenario, Other(serve=serve, lives=2))


def own_frame(link: LinkSide) -> bytes:
    """The next frame of this link, as it will be sent: with our incarnation in it."""
    identity = link._identity
    header = FrameHeader(payload_bytes=len(NEWS), job=identity.job, incarnation=identity.incarnation)
    return pack_header(header) + NEWS
