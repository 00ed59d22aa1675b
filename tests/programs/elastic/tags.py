"""Tagged messages while rank 2 dies, without a word to those who wait for it, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from typing import Any

import numpy as np
from support.jobs.elastic_rank import INCARNATION, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result
from zbmd.collectives.errors import MembersLost

LARGE = 20_000


async def exchange(group: zbmd.ElasticGroup, rank: int, others: list[int], k: int) -> bool:
    posted = [(to, n) for to in others for n in (3, LARGE)]
    sends = [group.send(np.full(n, 10.0 * rank + k), to, tag=10 * k + (n > 3)) for to, n in posted]
    sending, right = asyncio.gather(*sends), True
    for source, n in reversed([(source, n) for source in others for n in (3, LARGE)]):
        got = await group.recv(source, tag=10 * k + (n > 3), timeout=40)
        right &= got.array.size == n and bool((got.array == 10.0 * source + k).all())
    await sending
    return right


async def lost(call: Awaitable[Any]) -> list[int] | None:
    try:
        await call
    except MembersLost as error:
        return list(error.ranks)
    return None


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    told: list[Any] = []
    if k == 2 and INCARNATION == 1:
        if rank == 2:
            for source in (0, 1):  # both wait for what never comes
                await group.recv(source, tag=77, timeout=40)
            os.kill(os.getpid(), signal.SIGKILL)
        calls = (group.recv(2, tag=99, timeout=40), group.send(np.zeros(LARGE), 2, tag=55, timeout=40))
        waits = [asyncio.ensure_future(lost(call)) for call in calls]
        await group.send(np.ones(1), 2, tag=77)
        told = [await call for call in waits]
        told += [await lost(group.send(np.ones(1), 2)), await lost(group.recv(tag=66, timeout=40))]
        told += [await exchange(group, rank, [1 - rank], 9)]  # who lives does not notice
    done = await group.barrier(on_loss="wait_for_replacement", timeout=60)
    known, right = group.group.communicator, await exchange(group, rank, [0, 1, 2], k)
    return done, [told, right, str(known.model), known._executor.reads_peers]


if __name__ == "__main__":
    run_operations(operate)
