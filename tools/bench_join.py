"""How the two ranks of a benchmark find each other: one transport after the other, over the public API.

Rank 0 listens and tells where through a pipe that both have inherited; rank 1 dials.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator
from typing import Final

import msgspec
import numpy as np

from zbmd.tools.bench_pair import PIPE_CHANNEL, Pair
from zbmd.transport.endpoint import Endpoint
from zbmd.transport.frames import FrameHeader
from zbmd.transport.hello import Identity
from zbmd.transport.link import Link
from zbmd.transport.liveness import LifeThread
from zbmd.transport.placement import PAGE_BYTES
from zbmd.transport.region import RegionHandle
from zbmd.transport.segment import Segment
from zbmd.transport.shm import dial, listen
from zbmd.transport.staging import RING_BYTES, StagedPipe

COOKIE: Final = bytes(32)
CONNECT_S: Final = 60
ADDRESS_BYTES_MAX: Final = 256


class Handles(msgspec.Struct, array_like=True):
    """What the ranks tell each other first."""

    inbox: RegionHandle
    pipe: RegionHandle


@contextlib.asynccontextmanager
async def joined(
    rank: int, rendezvous: tuple[int, int], nbytes_max: int
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
    life = LifeThread(segment)
    identity = Identity(name=f"rank{rank}", pid=os.getpid(), uid=os.getuid(), incarnation=1)
    link = await _connect(rank, rendezvous, Endpoint(identity=identity, cookie=COOKIE, segment=segment))
    inbox, arena = segment.inbox.empty(nbytes_max, np.uint8), segment.arena.empty(nbytes_max, np.uint8)
    pipe = StagedPipe(segment, channel=PIPE_CHANNEL)
    theirs = await _exchange(link, Handles(inbox=segment.regions.register(inbox), pipe=pipe.handle))
    remote = link.open_region(theirs.inbox)
    pipe.connect(link.open_region(theirs.pipe))
    try:
        yield link, Pair(segment, remote, inbox=inbox, arena=arena, pipe=pipe)
    finally:
        remote.close()
        pipe.close()
        link.close()
        life.goodbye()
        segment.close()


async def _connect(rank: int, rendezvous: tuple[int, int], endpoint: Endpoint) -> Link:
    reading, writing = rendezvous
    if rank == 0:
        os.close(reading)
        return await _listen(writing, endpoint)
    os.close(writing)  # so that the pipe ends if rank 0 does
    address = await asyncio.to_thread(_read_address, reading)
    return await dial(address, endpoint)


async def _listen(writing: int, endpoint: Endpoint) -> Link:
    came: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    address = f"zbmd-bench-{os.getpid()}-{secrets.token_hex(8)}"
    listener = listen(address, came.set_result, endpoint)
    try:
        os.write(writing, address.encode())
        os.close(writing)
        return await asyncio.wait_for(came, CONNECT_S)
    finally:
        listener.close()


def _read_address(reading: int) -> str:
    """Read to the end of the pipe. Raises RuntimeError if rank 0 has ended without a word."""
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
