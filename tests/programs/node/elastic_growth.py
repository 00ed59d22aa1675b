"""A rank of an elastic group and its sub-group, until the file `done` is there."""

from __future__ import annotations

import asyncio

import numpy as np
from support.processes.polling import is_done, pause

import zbmd


async def work(worker: zbmd.Worker, name: str, group: zbmd.ElasticGroup, first: int) -> None:
    """Run operations by number: a rank that comes later takes part from its `sequence` on."""
    of: tuple[int, ...] = ()
    over = False
    while not over:
        if group.sequence % 2 != first:
            await group.refresh(timeout=60)
            continue
        x = np.array([10.0**worker.rank, is_done()])
        done = await group.all_reduce(x, inputs="preserve", timeout=60)
        assert done.value[0] == sum(10.0**rank for rank in done.contributors), done
        over = done.value[1] > 0
        if done.contributors != of:
            of = done.contributors
            print(f"{name} of rank {worker.rank}#{worker.incarnation}: {of}", flush=True)
        await pause()


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.elastic_group(worker, timeout=60)
        part = await group.subgroup((2, 0), timeout=60)  # rank 2 is absent yet
        both = [work(worker, "all", group, 0)]
        if part is not None:
            assert part.ranks == (2, 0)
            both.append(work(worker, "part", part, 1))
        await asyncio.gather(*both)
        for each in (part, group):
            if each is not None:
                await each.close()


zbmd.run(main())
