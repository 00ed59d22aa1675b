"""shm links between real processes: order, back-pressure, ends of every kind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine

import numpy as np
import pytest
import uvloop

from zbmd.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    ZbmdError,
)
from zbmd.transport.frames import FrameHeader
from zbmd.transport.hello import Identity
from zbmd.transport.link import Link, LinkLimits
from zbmd.transport.segment import Segment
from zbmd.transport.shm import Endpoint, dial, listen
from zbmd.transport.shm_link import ShmLink

Fork = Callable[[Callable[[], None]], int]
Run = Callable[[Coroutine[None, None, None]], None]
COOKIE = b"a cookie of the tests, 32 bytes "
FRAMES = 10_000
SMALL = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 14, queue_frames_max=64)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture
def address() -> str:
    return f"zbmd-test-{os.getpid()}-{os.urandom(4).hex()}"


def endpoint(
    name: str, incarnation: int = 1, segment: Segment | None = None, limits: LinkLimits | None = None
) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=incarnation, job=7)
    return Endpoint(identity=identity, cookie=COOKIE, segment=segment, limits=limits or LinkLimits())


class Peer:
    """A forked child that listens at `address` and runs `serve(link)` on the first link."""

    def __init__(
        self, fork: Fork, run: Run, address: str, who: Endpoint, serve: Callable[[ShmLink], Awaitable[None]]
    ) -> None:
        ready, announce = os.pipe()

        async def main() -> None:
            first: asyncio.Future[ShmLink] = asyncio.get_running_loop().create_future()
            listener = listen(address, first.set_result, who)
            os.write(announce, b"!")
            await serve(await first)
            listener.close()

        self.pid = fork(lambda: run(main()))
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        os.close(announce)

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


async def closed(link: Link) -> ZbmdError | None:
    """Wait for the link's end; return what `on_closed` was given, once."""
    end: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()
    link.on_closed = end.set_result
    return await end


async def send_all(link: Link, count: int) -> int:
    """Send `count` numbered frames of many sizes; return how often the queue was full."""
    full = 0
    for number in range(count):
        while True:
            try:
                link.send(number.to_bytes(4, "little") + bytes(number * 7 % 300))
                break
            except LinkFull:
                full += 1
                await link.writable()
    return full


class Counter:
    """An `on_frame` that checks numbered frames and tells when `count` have come."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen = 0
        self.done = asyncio.Event()
        self.hlc = 0

    def __call__(self, header: FrameHeader, payload: memoryview) -> None:
        assert int.from_bytes(payload[:4], "little") == self.seen
        assert len(payload) == 4 + self.seen * 7 % 300 == header.payload_bytes
        assert header.hlc > self.hlc, "every frame of a sender has a later stamp"
        self.hlc = header.hlc
        self.seen += 1
        if self.seen == self.count:
            self.done.set()


async def exchange(link: ShmLink) -> int:
    counter = Counter(FRAMES)
    link.on_frame = counter
    full = await send_all(link, FRAMES)
    await link.flush()
    await counter.done.wait()
    return full


def test_ten_thousand_frames_both_ways_with_back_pressure(fork: Fork, run: Run, address: str) -> None:
    async def serve(link: ShmLink) -> None:
        assert link.peer.name == "rank0" and link.peer.pid == os.getppid()
        await exchange(link)
        assert await closed(link) is None

    peer = Peer(fork, run, address, endpoint("node", limits=SMALL), serve)

    async def main() -> None:
        link = await dial(address, endpoint("rank0", limits=SMALL))
        assert link.peer.name == "node" and link.peer.pid == peer.pid
        assert await exchange(link) > 0, "the small queue was full at times"
        link.close()
        assert await closed(link) is None

    run(main())
    assert peer.exit_code() == 0


def test_a_sender_killed_in_mid_stream_ends_in_peer_lost(fork: Fork, run: Run, address: str) -> None:
    async def serve(link: ShmLink) -> None:
        await send_all(link, 1 << 30)

    peer = Peer(fork, run, address, endpoint("rank1", limits=SMALL), serve)

    async def main() -> None:
        link = await dial(address, endpoint("rank0", limits=SMALL))
        counter = Counter(500)
        link.on_frame = counter
        await counter.done.wait()
        os.kill(peer.pid, signal.SIGKILL)
        error = await closed(link)
        assert isinstance(error, PeerLost) and error.peer == "rank1"
        assert counter.seen >= 500, "what came was whole and in order"
        with pytest.raises(LinkClosed, match="rank1 lost"):
            link.send(b"")
        with pytest.raises(LinkClosed):
            await link.writable()

    run(main())
    assert peer.exit_code() == -signal.SIGKILL


def test_a_writer_that_waits_for_a_killed_reader_is_told(fork: Fork, run: Run, address: str) -> None:
    async def serve(link: ShmLink) -> None:
        link.on_frame = lambda header, payload: os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()

    peer = Peer(fork, run, address, endpoint("rank1", limits=SMALL), serve)

    async def main() -> None:
        link = await dial(address, endpoint("rank0", limits=SMALL))
        with pytest.raises(LinkClosed):
            await send_all(link, 1 << 30)
        assert isinstance(await closed(link), PeerLost)

    run(main())
    assert peer.exit_code() == -signal.SIGKILL


def test_frames_sent_before_a_goodbye_arrive_before_the_end(fork: Fork, run: Run, address: str) -> None:
    async def serve(link: ShmLink) -> None:
        await send_all(link, 100)
        await link.flush()
        link.close()

    peer = Peer(fork, run, address, endpoint("rank1"), serve)

    async def main() -> None:
        link = await dial(address, endpoint("rank0"))
        # The peer has ended before we read the first frame; the ring has kept them all.
        assert peer.exit_code() == 0
        counter = Counter(100)
        link.on_frame = counter
        assert await closed(link) is None
        assert counter.seen == 100

    run(main())


def test_segments_are_exchanged_at_hello(fork: Fork, run: Run, address: str) -> None:
    ours = Segment.create(slot=0, incarnation=5, arena_bytes=1 << 16, inbox_bytes=4096)
    theirs = Segment.create(slot=1, incarnation=6, arena_bytes=1 << 16, inbox_bytes=4096)

    async def serve(link: ShmLink) -> None:
        peer_segment = link.peer_segment
        assert peer_segment is not None and (peer_segment.slot, peer_segment.incarnation) == (0, 5)
        numbers = theirs.arena.from_array(np.arange(100))
        offset = theirs.arena.offset_of(numbers)
        assert offset is not None
        link.send(offset.to_bytes(8, "little"))
        assert await closed(link) is None

    peer = Peer(fork, run, address, endpoint("rank1", 6, theirs), serve)

    async def main() -> None:
        link = await dial(address, endpoint("rank0", 5, ours))
        offset: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        link.on_frame = lambda header, payload: offset.set_result(int.from_bytes(payload, "little"))
        assert link.peer_segment is not None and link.peer_segment.pid == os.getpid()
        view = link.peer_segment.arena_view(await offset, 800)
        assert np.frombuffer(view, np.int64).tolist() == list(range(100))
        link.close()

    run(main())
    assert peer.exit_code() == 0
    ours.close()
    theirs.close()


def test_nobody_listens(run: Run, address: str) -> None:
    async def main() -> None:
        with pytest.raises(PeerLost, match="nobody listens"):
            await dial(address, endpoint("rank0"))

    run(main())


def test_a_listener_that_never_answers_is_left_at_the_deadline(run: Run, address: str) -> None:
    async def main() -> None:
        listener = listen(address, lambda link: None, endpoint("node"))
        # Nobody accepts: the connection waits in the backlog, and so does the hello.
        asyncio.get_running_loop().remove_reader(listener._sock.fileno())
        with pytest.raises(ZbmdError, match="deadline has passed"):
            await dial(address, endpoint("rank0"), timeout_ns=2_000_000)
        listener.close()

    run(main())


def test_a_full_backlog_is_retried_until_the_deadline(
    run: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbmd.transport.shm.BACKLOG", 0)

    async def main() -> None:
        listener = listen(address, lambda link: None, endpoint("node"))
        asyncio.get_running_loop().remove_reader(listener._sock.fileno())
        waiting = asyncio.ensure_future(dial(address, endpoint("rank0")))
        await asyncio.wait([waiting], timeout=0)
        with pytest.raises(DeadlineExceeded, match="did not accept in time"):
            await dial(address, endpoint("rank1"), timeout_ns=5_000_000)
        waiting.cancel()
        await asyncio.wait([waiting])
        listener.close()

    run(main())


def test_addresses_that_cannot_be_listened_at(run: Run, address: str) -> None:
    async def main() -> None:
        listener = listen(address, lambda link: None, endpoint("node"))
        with pytest.raises(LocalProtocolError, match="cannot listen"):
            listen(address, lambda link: None, endpoint("node"))
        for bad in ("", "x" * 108):
            with pytest.raises(LocalProtocolError, match="1 to 107 bytes"):
                listen(bad, lambda link: None, endpoint("node"))
        listener.close()
        listener.close()
        listen(address, lambda link: None, endpoint("node")).close()

    run(main())


def test_a_cancelled_dial_leaves_nothing(run: Run, address: str) -> None:
    async def main() -> None:
        links: list[ShmLink] = []
        listener = listen(address, links.append, endpoint("node"))
        for turns in range(12):
            task = asyncio.ensure_future(dial(address, endpoint("rank0")))
            for _ in range(turns):
                await asyncio.wait([task], timeout=0)
            if not task.cancel():
                (await task).close()
            await asyncio.wait([task])
        listener.close()
        await listener.wait_closed()
        for link in links:
            link.close()
        # What remains of descriptors and tasks is looked for after every test.
        assert listener.half_open == 0

    run(main())
