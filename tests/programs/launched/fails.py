"""Ranks that join and enter each view to come; rank 1 fails in the way that the argument names."""

from __future__ import annotations

import sys

import numpy as np

import zbmd

CASE = sys.argv[1]


async def fail(worker: zbmd.Worker) -> None:
    if CASE == "reduces":
        group = await zbmd.group(worker)
        for step in range(4):
            if worker.rank == 1 and step == 3:
                raise RuntimeError("the reason")
            await group.all_reduce(np.ones(4))
    elif worker.rank != 1:
        return
    elif CASE == "raises":
        raise RuntimeError("the reason")
    elif CASE == "exits":
        sys.exit(3)
    else:
        raise [ValueError, KeyError, OSError][worker.incarnation - 1]


async def main() -> None:
    async with zbmd.join() as worker:
        await fail(worker)
        while True:
            await worker.view(after=worker.epoch)


zbmd.run(main())
