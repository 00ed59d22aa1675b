"""A rank that prints a digest of its collectives' results and its kinds of links; the last rank is killed."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np

import zbmd
from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.transport.errors import PeerLost


class Double(Contract, id="test.double"):
    number: int
    padding: bytes = b""


class Doubled(Contract, id="test.doubled"):
    number: int


class Doubler(Actor):
    @on(Double)
    async def double(self, message: Double) -> Doubled:
        return Doubled(2 * message.number + len(message.padding))


async def everything(group: zbmd.Group, rank: int, ranks: int) -> bytes:
    digest = hashlib.sha256()
    for count in (1, 300, 5000, 1 << 18):
        for make in (zbmd.from_array, np.array):  # in the arena, and elsewhere
            # Of integers and a product: no processor draws others.
            numbers = make(np.random.default_rng([count, rank]).random(count, np.float32) * np.float32(1000))
            digest.update((await group.all_reduce(numbers)).tobytes())
            digest.update((await group.all_gather(numbers)).tobytes())
            digest.update((await group.broadcast(numbers, root=1)).tobytes())
    pieces = np.arange(999 * ranks, dtype=np.int64).reshape(ranks, 999) * (rank + 1)
    digest.update((await group.reduce_scatter(pieces)).tobytes())
    digest.update((await group.all_to_all(pieces)).tobytes())
    return digest.digest()


async def actors(worker: zbmd.Worker, group: zbmd.Group) -> None:
    await worker.system.spawn(Doubler, name="doubler")
    await group.barrier()
    for peer in range(worker.world_size):
        far = worker.system.ref(f"rank{peer}/doubler")
        for padding in (0, 100_000):
            answer = await far.ask(Double(peer, bytes(padding)), timeout=60, reply=Doubled)
            assert answer.number == 2 * peer + padding


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        kinds = {type(peer.memory).__name__ for peer in worker.peers.values()}
        kinds |= {type(link).__name__ for link in worker._links._links.values()}
        await actors(worker, group)
        digest = await everything(group, worker.rank, worker.world_size)
        print("digest", digest.hex(), *sorted(kinds))
        lost = asyncio.Event()
        worker.on_peer_lost(lambda *what: lost.set())
        await group.barrier()
        worker.report({"ready": worker.rank})
        await lost.wait()
        try:
            await group.barrier(timeout=30)  # a rank that is gone is reported, not waited for
        except PeerLost:
            worker.report({"lost": worker.rank})
        await group.close()
        await worker.view(after=1)
        group = await zbmd.group(worker)
        assert (await group.all_reduce(np.ones(1 << 16))).tolist() == [2.0] * (1 << 16)
        await group.close()
        worker.report({"done": worker.rank})


zbmd.run(main())
