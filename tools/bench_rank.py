"""One of our two ranks under measurement: a segment, a link to the other rank, and a region of its inbox.

`python -m zbmd.tools.bench_rank --control NAME --rank R --address NAME --bytes-max N`. It runs uvloop as any
node does. What is native blocks a worker thread, not the loop; frames go over the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import msgspec
import numpy as np
import uvloop

from zbmd.actors.prctl import end_with_parent
from zbmd.tools.bench_load import TrainingLoad
from zbmd.tools.bench_pair import Pair, echo_frames, frame_round_trips
from zbmd.tools.peers.control import connect, encode_reply, parse_command
from zbmd.transport.endpoint import Endpoint
from zbmd.transport.errors import PeerLost
from zbmd.transport.frames import FrameHeader
from zbmd.transport.hello import Identity
from zbmd.transport.link import Link
from zbmd.transport.liveness import LifeThread
from zbmd.transport.placement import PAGE_BYTES
from zbmd.transport.region import RegionHandle
from zbmd.transport.segment import Segment
from zbmd.transport.shm import dial, listen

COOKIE: Final = bytes(32)
DIALS_MAX: Final = 3000
DIAL_PAUSE_S: Final = 0.01
CONNECT_S: Final = DIALS_MAX * DIAL_PAUSE_S


class Rank:
    """Everything that this process measures with."""

    def __init__(self, link: Link, pair: Pair) -> None:
        self._link = link
        self._pair = pair
        self._native: dict[str, Callable[[int, int], list[float]]] = {
            "p2p-arena": pair.p2p_arena,
            "echo": pair.echo,
            "p2p-foreign": pair.p2p_foreign,
            "put-arena": pair.put_arena,
            "put-foreign": pair.put_foreign,
        }
        self._frames: dict[str, Callable[[int, int], Awaitable[list[float]]]] = {
            "frame": self._frame,
            "frame-training": self._frame_training,
        }

    async def measure(self, what: str, nbytes: int, iterations: int) -> list[float]:
        """Nanoseconds an operation; those of rank 1, which only takes part, are not used."""
        if what in self._frames:
            return await self._frames[what](nbytes, iterations)
        return await asyncio.to_thread(self._native[what], nbytes, iterations)

    async def _frame(self, nbytes: int, iterations: int) -> list[float]:
        if self._pair.rank == 0:
            return await frame_round_trips(self._link, nbytes, iterations)
        await echo_frames(self._link)
        return []

    async def _frame_training(self, nbytes: int, iterations: int) -> list[float]:
        load = TrainingLoad()
        await asyncio.to_thread(load.start)
        try:
            return await self._frame(nbytes, iterations)
        finally:
            await asyncio.to_thread(load.stop)


@contextlib.asynccontextmanager
async def joined(rank: int, address: str, nbytes_max: int) -> AsyncGenerator[Rank]:
    """Make a segment with room for `nbytes_max` and join the other rank at the abstract `address`."""
    room = nbytes_max + PAGE_BYTES
    segment = Segment.create(slot=rank, incarnation=1, arena_bytes=room, inbox_bytes=room)
    life = LifeThread(segment)
    identity = Identity(name=f"rank{rank}", pid=os.getpid(), uid=os.getuid(), incarnation=1)
    link = await _connect(rank, address, Endpoint(identity=identity, cookie=COOKIE, segment=segment))
    inbox, arena = segment.inbox.empty(nbytes_max, np.uint8), segment.arena.empty(nbytes_max, np.uint8)
    regions = segment.regions
    theirs = link.open_region(await _exchange(link, regions.register(inbox)))
    try:
        yield Rank(link, Pair(segment, theirs, inbox=inbox, arena=arena))
    finally:
        theirs.close()
        link.close()
        life.goodbye()
        segment.close()


async def _connect(rank: int, address: str, endpoint: Endpoint) -> Link:
    if rank == 0:
        came: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        listener = listen(address, came.set_result, endpoint)
        try:
            return await asyncio.wait_for(came, CONNECT_S)
        finally:
            listener.close()
    for _ in range(DIALS_MAX - 1):
        try:
            return await dial(address, endpoint)
        except PeerLost:  # the other rank does not listen yet
            await asyncio.sleep(DIAL_PAUSE_S)
    return await dial(address, endpoint)


async def _exchange(link: Link, ours: RegionHandle) -> RegionHandle:
    """Send our handle as a frame, and take theirs."""
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_frame(header: FrameHeader, payload: memoryview) -> None:
        came.set_result(bytes(payload))

    link.on_frame = on_frame
    link.send(msgspec.msgpack.encode(ours))
    theirs = msgspec.msgpack.decode(await came, type=RegionHandle)
    link.on_frame = None
    return theirs


async def _serve(arguments: argparse.Namespace) -> None:
    async with joined(arguments.rank, arguments.address, arguments.bytes_max) as rank:
        reader, writer = await asyncio.open_unix_connection(sock=connect(arguments.control, arguments.rank))
        while line := await reader.readline():
            writer.write(encode_reply(await rank.measure(*parse_command(line))))
            await writer.drain()
        writer.close()


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, required=True, choices=(0, 1))
    parser.add_argument("--address", required=True)
    parser.add_argument("--transport", required=True, choices=("shm",))
    parser.add_argument("--bytes-max", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    uvloop.run(_serve(arguments))


if __name__ == "__main__":
    main()
