"""One of two processes on different hosts of a laboratory, with a TCP link and bulk stripes between them.

Run as a script: `netns_peer.py listen ADDRESS BUDGET` or `netns_peer.py dial ADDRESS BUDGET`. What happens
comes out as lines; the dialer takes commands as lines of standard input: `frames COUNT BYTES`, `put BYTES
STRIPES`, `hold`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import uvloop

from support.bulk.bulk_host import BulkHost
from zbmd.transport.clock.deadlines import derive, parse_recovery_budget
from zbmd.transport.errors import LinkFull, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.connect import join_bulk
from zbmd.transport.tcp.link import TcpLink

REGION_BYTES = 16 << 20
STRIPES = 4
CHANNEL = 3
NUMBER_BYTES = 8


def say(*words: object) -> None:
    # In one piece, also where Python does not buffer: the log goes to the same pipe, from other threads.
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Peer:
    """Either end."""

    def __init__(self, slot: int, budget: str) -> None:
        self.host = BulkHost(slot, nbytes=2 * REGION_BYTES)
        self.endpoint = Endpoint(
            identity=Identity(name=f"rank{slot}", pid=1, uid=0, incarnation=slot + 1, job=7),
            cookie=b"a cookie of the tests, 32 bytes ",
            segment=self.host.segment,
            deadlines=derive(parse_recovery_budget(budget)),
        )
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, link: TcpLink) -> None:
        link.on_frame = self._on_frame
        link.on_closed = self._on_closed

    def _on_frame(self, header: FrameHeader, payload: memoryview) -> None:
        self.frames.put_nowait(bytes(payload))

    def _on_closed(self, error: ZbmdError | None) -> None:
        say("ended", type(error).__name__, error)
        self.ended.set_result(None)


async def listen(address: str, budget: str) -> None:
    peer = Peer(0, budget)
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await tcp.listen(address, links.put_nowait, peer.endpoint)
    say("listening", listener.address)
    link = await links.get()
    peer.take(link)
    serving = asyncio.ensure_future(serve(peer, link))
    await peer.ended
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    listener.close()
    peer.host.__exit__(None, None, None)


async def serve(peer: Peer, link: TcpLink) -> None:
    """Count frames and check their order; say what was put."""
    inbox = peer.host.segment.inbox.empty(REGION_BYTES, np.uint8)
    await join_bulk(link, peer.endpoint, peer.host.plane, slot=1)
    link.send(msgspec.msgpack.encode(peer.host.regions.register(inbox)))
    expected = 0
    while True:
        frame = await peer.frames.get()
        if frame.startswith(b"count"):
            link.send(str(expected).encode())
            expected = 0
        elif frame.startswith(b"digest"):
            value, nbytes = map(int, frame.split()[1:])
            await asyncio.to_thread(peer.host.wait, 1, CHANNEL, value)
            link.send(hashlib.sha256(inbox[:nbytes].data).hexdigest().encode())
        else:
            number = int.from_bytes(frame[:NUMBER_BYTES], "big")
            assert number == expected, f"frame {number}, where {expected} was due"
            expected += 1


async def dial(address: str, budget: str) -> None:
    peer = Peer(1, budget)
    link = await tcp.dial(address, peer.endpoint)
    peer.take(link)
    await join_bulk(link, peer.endpoint, peer.host.plane, slot=0, stripes=STRIPES)
    region = link.open_region(msgspec.msgpack.decode(await peer.frames.get(), type=RegionHandle))
    say("linked")
    numbers = itertools.count(1)
    async for command, *arguments in commands():
        if command == "frames":
            count, nbytes = map(int, arguments)
            for number in range(count):
                frame = number.to_bytes(NUMBER_BYTES, "big") + bytes(nbytes - NUMBER_BYTES)
                await send(link, frame)
            await send(link, b"count")
            say("framed", (await peer.frames.get()).decode())
        elif command == "put":
            value, data = next(numbers), np.random.default_rng().integers(0, 256, int(arguments[0]), np.uint8)
            try:
                await region.put(data, channel=CHANNEL, value=value)
            except ZbmdError as error:
                say(f"put failed {type(error).__name__}")
                continue
            await send(link, f"digest {value} {data.nbytes}".encode())
            same = (await peer.frames.get()).decode() == hashlib.sha256(data.data).hexdigest()
            say("put", "intact" if same else "CHANGED")
        elif command == "hold":
            await peer.ended
    link.close()
    await asyncio.wait([peer.ended])
    peer.host.__exit__(None, None, None)


async def send(link: TcpLink, frame: bytes) -> None:
    while True:
        try:
            link.send(frame)
            return
        except LinkFull:
            await link.writable()


async def commands() -> AsyncIterator[list[str]]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line.split()


if __name__ == "__main__":
    role, where, recovery_budget = sys.argv[1:]
    uvloop.run((listen if role == "listen" else dial)(where, recovery_budget))
