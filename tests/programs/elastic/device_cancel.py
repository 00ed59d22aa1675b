"""Rank 0 cancels a call that rank 1 makes later: rank 1 has all of it, and rank 0's `out` stays as it is."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from support.devices.device_rank import device, look
from support.devices.device_worlds import on_device
from support.jobs.elastic_rank import run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    if rank == 1:
        await group.recv(0, timeout=40)
    x = np.full(20_000, rank + 1.0)
    out = (on_device(device(), np.zeros((2, 20_000))), np.zeros((2, 20_000)))[k // 2 % 2]
    calling = asyncio.ensure_future(group.all_gather(x, out=out, timeout=60))
    reducing = asyncio.ensure_future(group.all_reduce(x, out=on_device(device(), x), timeout=60))
    if rank == 0:
        await asyncio.sleep(0)
        calling.cancel()
        for ended in await asyncio.gather(calling, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
        await group.send(x[:1], 1)
    done = await reducing
    assert (look(done.value) == 3).all()
    found = look(out)
    right = not found.any() if rank == 0 else bool((found[:, 7] == (1, 2)).all())
    return done, bool(right)


if __name__ == "__main__":
    run_operations(operate)
