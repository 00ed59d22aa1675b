"""One of our two ranks under measurement over TCP on loopback; rank 0 puts, rank 1 listens and takes.

`python -m zbmd.tools.bench_bulk_rank --control NAME --rank R --port P --bytes-max N`, with `ZBMD_PROTECTION`
and certificates as for any node. What is native blocks a worker thread, not the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from typing import Final

import msgspec
import numpy as np
import uvloop

from zbmd.actors.prctl import end_with_parent
from zbmd.tools.bench_pair import Pair
from zbmd.tools.peers.control import connect, encode_reply, parse_command
from zbmd.transport import tcp
from zbmd.transport.bulk_plane import DataPlane
from zbmd.transport.endpoint import Endpoint
from zbmd.transport.errors import PeerLost
from zbmd.transport.frames import FrameHeader
from zbmd.transport.hello import Identity
from zbmd.transport.region import RegionHandle
from zbmd.transport.segment import Segment
from zbmd.transport.tcp_bulk import join_bulk
from zbmd.transport.tcp_link import TcpLink
from zbmd.transport.tcp_settings import TcpSettings, tcp_settings

COOKIE: Final = bytes(32)
DIALS_MAX: Final = 3000
DIAL_PAUSE_S: Final = 0.01
ROOM_BYTES: Final = 1 << 20
"""Beside the array, in the inbox and the arena."""
CONNECT_S: Final = DIALS_MAX * DIAL_PAUSE_S


@contextlib.asynccontextmanager
async def joined(rank: int, port: int, nbytes_max: int, lanes: int | None) -> AsyncGenerator[Pair]:
    """Make a segment with room for `nbytes_max` and join the other rank over TCP."""
    room = nbytes_max + ROOM_BYTES
    segment = Segment.create(slot=rank, incarnation=1, arena_bytes=room, inbox_bytes=room)
    identity = Identity(name=f"rank{rank}", pid=os.getpid(), uid=os.getuid(), incarnation=1)
    endpoint = Endpoint(identity=identity, cookie=COOKIE, segment=segment)
    plane = DataPlane()
    stack = contextlib.ExitStack()
    link = await _connect(rank, f"127.0.0.1:{port}", endpoint, tcp_settings(), stack)
    bulk = await join_bulk(link, endpoint, plane, slot=1 - rank, lanes=lanes)
    inbox, arena = segment.inbox.empty(nbytes_max, np.uint8), segment.arena.empty(nbytes_max, np.uint8)
    theirs = link.open_region(await _exchange(link, segment.regions.register(inbox)))
    try:
        yield Pair(segment, theirs, inbox=inbox, arena=arena)
    finally:
        theirs.close()
        link.close()
        with contextlib.suppress(PeerLost):  # the other may have gone first
            await bulk.ended
        plane.close()
        segment.close()
        stack.close()


async def _connect(
    rank: int, address: str, endpoint: Endpoint, settings: TcpSettings, stack: contextlib.ExitStack
) -> TcpLink:
    if rank == 1:
        came: asyncio.Future[TcpLink] = asyncio.get_running_loop().create_future()
        listener = await tcp.listen(address, came.set_result, endpoint, settings=settings)
        stack.callback(listener.close)  # not before: the lanes come to it, too
        return await asyncio.wait_for(came, CONNECT_S)
    for _ in range(DIALS_MAX - 1):
        try:
            return await tcp.dial(address, endpoint, settings=settings)
        except PeerLost:  # the other rank does not listen yet
            await asyncio.sleep(DIAL_PAUSE_S)
    return await tcp.dial(address, endpoint, settings=settings)


async def _exchange(link: TcpLink, ours: RegionHandle) -> RegionHandle:
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
    async with joined(arguments.rank, arguments.port, arguments.bytes_max, arguments.lanes) as pair:
        reader, writer = await asyncio.open_unix_connection(sock=connect(arguments.control, arguments.rank))
        while line := await reader.readline():
            _, nbytes, iterations = parse_command(line)
            writer.write(encode_reply(await asyncio.to_thread(pair.put_arena, nbytes, iterations)))
            await writer.drain()
        writer.close()


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, required=True, choices=(0, 1))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bytes-max", type=int, required=True)
    parser.add_argument("--lanes", type=int)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    uvloop.run(_serve(arguments))


if __name__ == "__main__":
    main()
