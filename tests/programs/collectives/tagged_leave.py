"""A rank of three: rank 2 sends to the others and leaves without closing anything."""

from __future__ import annotations

import asyncio

import numpy as np

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        gone = asyncio.Event()
        worker.on_peer_lost(lambda *notice: gone.set())
        group = await zbmd.group(worker)
        total = await group.all_reduce(np.full(300_000, 1.0))  # who is slower in it than the one that leaves
        assert (total == 3).all()
        if worker.rank == 2:
            for to in (0, 1):
                for k in range(50):
                    await group.send(np.full(9, k), to, tag=k)
            worker.report({"left": worker.rank})
            return  # without a word, and closing nothing
        await gone.wait()
        for k in reversed(range(50)):
            assert (await group.recv(2, tag=k)).array[0] == k, "what it sent before has come"
        other = 1 - worker.rank
        await group.send(np.full(9, worker.rank), other)
        assert (await group.recv(other)).array[0] == other, "those who are there go on"
        for call in (group.recv(2), group.send(np.ones(9), 2), group.recv(), group.barrier()):
            try:
                await call
            except zbmd.OperationAborted:
                pass
            else:
                raise AssertionError("nobody was there for it")
        worker.report({"stayed": worker.rank})


asyncio.run(main())
