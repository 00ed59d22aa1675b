"""One of our two ranks under measurement: its segment, link and region, and the patterns that are timed.

`python -m zbmd.tools.bench.transport.rank --control NAME --rank R --rendezvous READ WRITE --bytes-max N
--transport shm|tcp|rdma`. It runs uvloop as any node does. What is native blocks a worker thread, not the
loop; frames go over the loop. The patterns use the public API: puts and waits, and frames over the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import count
from typing import Final, Protocol, runtime_checkable

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from zbmd.tools.bench.peers.control import serve_on_loop, timed, timed_on_loop, warmups, window_of, windows
from zbmd.tools.bench.transport.perftest import given_pair
from zbmd.tools.bench.workers import ContenderFailed
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.errors import PeerLost
from zbmd.transport.frames import FrameHeader
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, Link
from zbmd.transport.memory.memfd import PAGE_BYTES
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.staging import RING_BYTES, StagedPipe
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import WAIT_OK, now_ns
from zbmd.transport.rdma.connect import RdmaMemory, dial_rdma, listen_rdma, open_rdma_plane
from zbmd.transport.rdma.message_device import open_rdma_device
from zbmd.transport.shm import connect as shm
from zbmd.transport.shm.death_notice import LifeThread
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import tcp_settings
from zbmd.transport.tcp.connect import join_bulk
from zbmd.transport.tcp.link import TcpLink

CHANNEL: Final = 0
PIPE_CHANNEL: Final = 1
"""And the one after it."""
MEASURE_S_MAX: Final = 240
FRAME_STOP: Final = 1
"""The flag of the frame that ends a measurement."""

Bytes = NDArray[np.uint8]


@runtime_checkable
class Pings(Protocol):
    """A region whose transport can time itself: `RdmaRegion.ping`."""

    def ping(
        self, src: Bytes, *, channel: int, value: int, first: bool, rounds: int, deadline_ns: int
    ) -> NDArray[np.uint64]:
        """Return the time of each round, ns."""
        ...


class Pair:
    """One rank's segment, its own arrays in it, the other rank's inbox, and a pipe for other arrays."""

    def __init__(
        self,
        segment: Segment,
        theirs: RemoteRegion,
        *,
        inbox: Bytes,
        arena: Bytes,
        pipe: StagedPipe | None = None,
        wait: Callable[..., int] | None = None,
    ) -> None:
        """wait: instead of `Segment.wait`, of a plane whose waiters poll it."""
        self.rank = segment.slot
        self._wait = wait or segment.wait
        self._theirs = theirs
        self._pipe = pipe
        self._inbox = inbox
        self._arena = arena
        self._sent = count(1)
        self._awaited = count(1)
        self._measured = 0

    def p2p_arena(self, nbytes: int, iterations: int) -> list[float]:
        """A ping and its answer, each one put from the own arena into the other's inbox."""
        src, expected = self._fill(self._arena[:nbytes])
        send, receive = self._sender(src), self._receiver()
        samples = self._ping(send, receive, iterations)
        self._check(self._inbox[:nbytes], expected)
        return samples

    def p2p_native(self, nbytes: int, iterations: int) -> list[float]:
        """As `p2p_arena`, over RDMA: both sides put and wait without a line of Python."""
        src, expected = self._fill(self._arena[:nbytes])
        assert isinstance(self._theirs, Pings)
        rounds = warmups(iterations) + iterations
        took_ns = self._theirs.ping(
            src,
            channel=CHANNEL,
            value=next(self._sent),
            first=self.rank == 0,
            rounds=rounds,
            deadline_ns=now_ns() + MEASURE_S_MAX * 1_000_000_000,
        )
        for _ in range(rounds - 1):
            next(self._sent)
        self._skip(rounds)
        self._check(self._inbox[:nbytes], expected)
        return [float(each) / 2 for each in took_ns[-iterations:]]

    def echo(self, nbytes: int, iterations: int) -> list[float]:
        """As `p2p_arena`, but each rank sends back the bytes that it was sent, from where they arrived."""
        _, expected = self._fill(self._arena[:nbytes])
        if self.rank == 0:
            self._inbox[:nbytes] = self._arena[:nbytes]
        samples = self._ping(self._sender(self._inbox[:nbytes]), self._receiver(), iterations)
        self._check(self._inbox[:nbytes], expected)
        return samples

    def p2p_foreign(self, nbytes: int, iterations: int) -> list[float]:
        """A ping and its answer, from an ordinary array of the one to an ordinary array of the other."""
        src, expected = self._fill(np.empty(nbytes, np.uint8))
        into, pipe = np.zeros(nbytes, np.uint8), self._pipe
        assert pipe is not None
        deadline_ns = now_ns() + MEASURE_S_MAX * 1_000_000_000
        samples = self._ping(
            lambda: pipe.send(src, deadline_ns=deadline_ns),
            lambda: pipe.receive(into, deadline_ns=deadline_ns),
            iterations,
        )
        self._check(into, expected)
        return samples

    def put_arena(self, nbytes: int, iterations: int) -> list[float]:
        """Windows of puts from rank 0's arena."""
        return self._put(self._arena[:nbytes], iterations)

    def put_foreign(self, nbytes: int, iterations: int) -> list[float]:
        """Windows of puts from an ordinary array of rank 0."""
        return self._put(np.empty(nbytes, np.uint8), iterations)

    def _put(self, array: Bytes, iterations: int) -> list[float]:
        src, expected = self._fill(array)
        window, nbytes = window_of(src.nbytes), src.nbytes
        receive = self._receiver()

        def send_window() -> None:
            for transfer in self._put_window(src, window):
                transfer.wait()
            receive()

        def take_window() -> None:
            self._skip(window - 1)
            receive()
            self._theirs.notify(CHANNEL, next(self._sent))

        operation = take_window if self.rank else send_window
        samples = timed(windows(iterations, nbytes), operation, window)
        if self.rank:
            self._check(self._inbox[:nbytes], expected)
        return samples

    async def put_asyncio(self, nbytes: int, iterations: int) -> list[float]:
        """As `put_arena`, but transfers are awaited on the loop, and notifications in a thread."""
        src, expected = self._fill(self._arena[:nbytes])
        window, receive = window_of(nbytes), self._receiver()

        async def operation() -> None:
            transfers = [] if self.rank else self._put_window(src, window)
            for transfer in transfers:
                await transfer
            if self.rank:
                self._skip(window - 1)
            await asyncio.to_thread(receive)
            if self.rank:
                self._theirs.notify(CHANNEL, next(self._sent))

        samples = await timed_on_loop(windows(iterations, nbytes), operation, window)
        if self.rank:
            self._check(self._inbox[:nbytes], expected)
        return samples

    def _put_window(self, src: Bytes, window: int) -> list[Transfer]:
        return [self._theirs.put(src, 0, channel=CHANNEL, value=next(self._sent)) for _ in range(window)]

    def _skip(self, notifications: int) -> None:
        for _ in range(notifications):
            next(self._awaited)

    def _ping(self, send: Callable[[], object], receive: Callable[[], None], iterations: int) -> list[float]:
        def first() -> None:
            send()
            receive()

        def second() -> None:
            receive()
            send()

        return timed(iterations, second if self.rank else first, 2)

    def _sender(self, src: Bytes) -> Callable[[], object]:
        put, sent = self._theirs.put, self._sent
        return lambda: put(src, 0, channel=CHANNEL, value=next(sent)).wait()

    def _receiver(self) -> Callable[[], None]:
        """Waits for the other rank's next notification. Raises `ContenderFailed` if it does not come."""
        wait, awaited, other = self._wait, self._awaited, 1 - self.rank
        deadline_ns = now_ns() + MEASURE_S_MAX * 1_000_000_000

        def receive() -> None:
            ended = wait(other, CHANNEL, next(awaited), group_mask=1 << other, deadline_ns=deadline_ns)
            if ended != WAIT_OK:
                raise ContenderFailed(f"rank {self.rank} waited for rank {other} in vain ({ended})")

        return receive

    def _fill(self, array: Bytes) -> tuple[Bytes, int]:
        """Fill with this measurement's byte, which is the same on both ranks."""
        self._measured += 1
        value = 1 + self._measured % 255
        array.fill(value)
        return array, value

    def _check(self, arrived: Bytes, expected: int) -> None:
        wrong = int(np.count_nonzero(arrived != expected))
        if wrong:
            raise ContenderFailed(f"{wrong} of {arrived.nbytes} bytes arrived wrong at rank {self.rank}")


async def frame_round_trips(link: Link, nbytes: int, iterations: int) -> list[float]:
    """Nanoseconds from `send` until the echo is awaited, then tell the other side that it is over."""
    loop = asyncio.get_running_loop()
    payload, clock = bytes(nbytes), time.perf_counter_ns
    echo: asyncio.Future[None] = loop.create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        echo.set_result(None)

    link.on_frame = on_frame
    samples: list[float] = []
    for number in range(warmups(iterations) + iterations):
        began = clock()
        link.send(payload)
        await echo
        took = clock() - began
        echo = loop.create_future()
        if number >= warmups(iterations):
            samples.append(took)
    link.on_frame = None
    link.send(b"", flags=FRAME_STOP)
    return samples


async def echo_frames(link: Link) -> None:
    """Send every frame back until one says that it is over."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        if header.flags & FRAME_STOP:
            over.set_result(None)
        else:
            link.send(bytes(payload))

    link.on_frame = on_frame
    await over
    link.on_frame = None


# Connect the two ranks through the public API. Rank 0 listens and writes its address to a pipe that both have
# inherited; rank 1 dials.

COOKIE: Final = bytes(32)
CONNECT_S: Final = 60
ADDRESS_BYTES_MAX: Final = 256


class Handles(msgspec.Struct, array_like=True):
    """First message between the ranks."""

    inbox: RegionHandle
    pipe: RegionHandle


@contextlib.asynccontextmanager
async def joined(
    rank: int, rendezvous: tuple[int, int], transport: str, nbytes_max: int
) -> AsyncGenerator[tuple[Link, Pair]]:
    """Join the other rank, with room for `nbytes_max` in each segment's inbox and arena.

    `rendezvous` is the reading and the writing end of a pipe that both have.
    """
    segment = Segment.create(
        slot=rank,
        incarnation=1,
        arena_bytes=nbytes_max + PAGE_BYTES,
        inbox_bytes=nbytes_max + RING_BYTES + PAGE_BYTES,
    )
    identity = Identity(name=f"rank{rank}", pid=os.getpid(), uid=os.getuid(), incarnation=1)
    endpoint = Endpoint(identity=identity, cookie=COOKIE, segment=segment)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(segment.close)
        link: Link
        wait: Callable[..., int] | None = None
        if transport == "tcp":
            link = await _over_tcp(rank, rendezvous, endpoint, stack)
        elif transport == "rdma":
            link, wait = await _over_rdma(rank, rendezvous, endpoint, segment, stack)
        else:
            stack.callback(LifeThread(segment).goodbye)
            link = await _over_shm(rank, rendezvous, endpoint)
            stack.callback(link.close)
        yield link, await _make_pair(link, segment, nbytes_max, stack, wait)


async def _make_pair(
    link: Link,
    segment: Segment,
    nbytes_max: int,
    stack: contextlib.AsyncExitStack,
    wait: Callable[..., int] | None,
) -> Pair:
    inbox, arena = segment.inbox.empty(nbytes_max, np.uint8), segment.arena.empty(nbytes_max, np.uint8)
    pipe = StagedPipe(segment, channel=PIPE_CHANNEL)
    theirs = await _exchange(link, Handles(inbox=segment.regions.register(inbox), pipe=pipe.handle))
    remote = link.open_region(theirs.inbox)
    stack.callback(remote.close)
    pipe.connect(link.open_region(theirs.pipe))
    stack.callback(pipe.close)
    return Pair(segment, remote, inbox=inbox, arena=arena, pipe=pipe, wait=wait)


async def _over_shm(rank: int, rendezvous: tuple[int, int], endpoint: Endpoint) -> Link:
    if rank == 1:
        return await shm.dial(await _address(rendezvous), endpoint)
    came: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    name = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(8)}"
    listener = shm.listen(name, came.set_result, endpoint)
    try:
        _tell(rendezvous, name)
        async with asyncio.timeout(CONNECT_S):
            return await came
    finally:
        listener.close()


async def _over_tcp(
    rank: int, rendezvous: tuple[int, int], endpoint: Endpoint, stack: contextlib.AsyncExitStack
) -> Link:
    """With regions on a data plane; protection and certificates are those of ZBMD_*."""
    settings, plane = tcp_settings(), DataPlane()
    stack.callback(plane.close)
    if rank == 1:
        link = await tcp.dial(await _address(rendezvous), endpoint, settings=settings)
    else:
        came: asyncio.Future[TcpLink] = asyncio.get_running_loop().create_future()
        listener = await tcp.listen("127.0.0.1:0", came.set_result, endpoint, settings=settings)
        stack.callback(listener.close)  # not before: the stripes come to it, too
        _tell(rendezvous, str(listener.addresses[0]))
        async with asyncio.timeout(CONNECT_S):
            link = await came
    bulk = await join_bulk(link, endpoint, plane, slot=1 - rank)
    stack.push_async_callback(_end, link, bulk)
    return link


async def _over_rdma(
    rank: int,
    rendezvous: tuple[int, int],
    endpoint: Endpoint,
    segment: Segment,
    stack: contextlib.AsyncExitStack,
) -> tuple[Link, Callable[..., int]]:
    """From the first device that is given to the second; and how a thread waits, polling by itself."""
    at = given_pair()[rank]
    device = open_rdma_device(*at)
    stack.push_async_callback(device.aclose)
    plane = open_rdma_plane(*at, segment=segment)
    stack.callback(plane.close)
    memory = RdmaMemory(plane=plane, slot_of=lambda peer: 1 - rank)
    link: Link
    if rank == 1:
        link = await dial_rdma(await _address(rendezvous), endpoint, device, memory=memory)
    else:
        came: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        listener = await listen_rdma("127.0.0.1:0", came.set_result, endpoint, device, memory=memory)
        _tell(rendezvous, str(listener.address))
        async with asyncio.timeout(CONNECT_S):
            link = await came
        listener.close()
        await listener.wait_closed()
    stack.callback(link.close)
    return link, plane.wait


async def _end(link: TcpLink, bulk: BulkPeer) -> None:
    link.close()
    with contextlib.suppress(PeerLost):  # the other may have gone first
        await bulk.ended


def _tell(rendezvous: tuple[int, int], address: str) -> None:
    reading, writing = rendezvous
    os.close(reading)
    os.write(writing, address.encode())
    os.close(writing)


async def _address(rendezvous: tuple[int, int]) -> str:
    """Return the address of rank 0. Raises RuntimeError if it ended without one."""
    reading, writing = rendezvous
    os.close(writing)  # so that the pipe ends if rank 0 does
    return await asyncio.to_thread(_read_address, reading)


def _read_address(reading: int) -> str:
    with os.fdopen(reading, "rb") as pipe:
        address = pipe.read(ADDRESS_BYTES_MAX).decode()
    if not address:
        raise RuntimeError("rank 0 has ended before it could listen")
    return address


async def _exchange(link: Link, ours: Handles) -> Handles:
    """Send our handles as a frame, and take theirs."""
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        came.set_result(bytes(payload))

    link.on_frame = on_frame
    link.send(msgspec.msgpack.encode(ours))
    theirs = msgspec.msgpack.decode(await came, type=Handles)
    link.on_frame = None
    return theirs


class Rank:
    """Everything that this process measures with."""

    def __init__(self, link: Link, pair: Pair) -> None:
        self._link = link
        self._pair = pair
        self._native: dict[str, Callable[[int, int], list[float]]] = {
            "p2p-arena": pair.p2p_arena,
            "p2p-native": pair.p2p_native,
            "p2p-foreign": pair.p2p_foreign,
            "echo": pair.echo,
            "put-arena": pair.put_arena,
            "put-foreign": pair.put_foreign,
        }
        self._on_loop: dict[str, Callable[[int, int], Awaitable[list[float]]]] = {
            "put-asyncio": pair.put_asyncio,
            "frame": self._frame,
            "frame-training": self._frame_training,
        }

    async def measure(self, what: str, nbytes: int, iterations: int) -> list[float]:
        """Nanoseconds an operation; those of rank 1, which only takes part, are not used."""
        if what in self._on_loop:
            return await self._on_loop[what](nbytes, iterations)
        return await asyncio.to_thread(self._native[what], nbytes, iterations)

    async def _frame(self, nbytes: int, iterations: int) -> list[float]:
        if self._pair.rank == 0:
            return await frame_round_trips(self._link, nbytes, iterations)
        await echo_frames(self._link)
        return []

    async def _frame_training(self, nbytes: int, iterations: int) -> list[float]:
        from zbmd.tools.bench.transport.deaths import TrainingLoad

        load = TrainingLoad()
        await asyncio.to_thread(load.start)
        try:
            return await self._frame(nbytes, iterations)
        finally:
            await asyncio.to_thread(load.stop)


async def _serve(arguments: argparse.Namespace) -> None:
    reading, writing = arguments.rendezvous
    async with joined(arguments.rank, (reading, writing), arguments.transport, arguments.bytes_max) as (
        link,
        pair,
    ):
        rank = Rank(link, pair)
        await serve_on_loop(arguments.control, arguments.rank, rank.measure)


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, required=True, choices=(0, 1))
    parser.add_argument("--rendezvous", type=int, nargs=2, required=True, metavar=("READ", "WRITE"))
    parser.add_argument("--transport", required=True, choices=("shm", "tcp", "rdma"))
    parser.add_argument("--bytes-max", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    uvloop.run(_serve(arguments))


if __name__ == "__main__":
    main()
