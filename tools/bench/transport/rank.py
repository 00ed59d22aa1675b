"""One of our two ranks under measurement: a segment, a link to the other rank, and a region of its inbox.

`python -m zbmd.tools.bench.transport.rank --control NAME --rank R --rendezvous READ WRITE --bytes-max N
--transport shm|tcp|rdma`. It runs uvloop as any node does. What is native blocks a worker thread, not the
loop; frames go over the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import msgspec
import numpy as np
import uvloop

from zbmd.tools.bench.peers.control import serve_on_loop
from zbmd.tools.bench.transport.pair import PIPE_CHANNEL, Pair, echo_frames, frame_round_trips
from zbmd.tools.bench.transport.perftest import given_pair
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.errors import PeerLost
from zbmd.transport.frames import FrameHeader
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, Link
from zbmd.transport.memory.memfd import PAGE_BYTES
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.staging import RING_BYTES, StagedPipe
from zbmd.transport.rdma.connect import RdmaMemory, dial_rdma, listen_rdma, open_rdma_plane
from zbmd.transport.rdma.message_device import open_rdma_device
from zbmd.transport.shm import connect as shm
from zbmd.transport.shm.death_notice import LifeThread
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import tcp_settings
from zbmd.transport.tcp.connect import join_bulk
from zbmd.transport.tcp.link import TcpLink

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
