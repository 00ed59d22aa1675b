"""One of our two ranks under measurement: a segment, a link to the other rank, and a region of its inbox.

`python -m zbmd.tools.bench.transport.rank --control NAME --rank R --rendezvous READ WRITE --transport
shm|tcp|rdma
--bytes-max N`. It runs uvloop as any node does. What is native blocks a worker thread, not the loop; frames
go over the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable

import uvloop

from zbmd.tools.bench.peers.control import connect, encode_reply, parse_command
from zbmd.tools.bench.transport.join import joined
from zbmd.tools.bench.transport.pair import Pair, echo_frames, frame_round_trips
from zbmd.transport.host.prctl import end_with_parent
from zbmd.transport.link.interface import Link


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
        from zbmd.tools.bench.load import TrainingLoad  # a training job, for one case

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
    parser.add_argument("--rendezvous", type=int, nargs=2, required=True, metavar=("READ", "WRITE"))
    parser.add_argument("--transport", required=True, choices=("shm", "tcp", "rdma"))
    parser.add_argument("--bytes-max", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(os.getppid())
    uvloop.run(_serve(arguments))


if __name__ == "__main__":
    main()
