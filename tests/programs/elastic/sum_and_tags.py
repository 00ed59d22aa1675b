"""All-reduces, and tagged messages between the contributors; one receive is in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result
from zbmd.collectives.errors import MembersLost


async def exchange(group: zbmd.ElasticGroup, rank: int, of: Sequence[int], k: int) -> bool:
    for to in of:
        await group.send(np.full(3, 10 * rank + k), to, tag=k)
    return all([int((await group.recv(r, tag=k, timeout=40)).array[0]) == 10 * r + k for r in reversed(of)])


async def lost(call: Awaitable[Any]) -> list[int] | None:
    try:
        await call
    except MembersLost as error:
        return list(error.ranks)
    return None


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    call = lost(group.recv(1, tag=99, timeout=40)) if k == 2 and rank != 1 else asyncio.sleep(0)
    waits = asyncio.ensure_future(call)  # in vain: rank 1 dies in operation 2
    done = await group.all_reduce(zbmd.from_array(np.full(300, 10.0**rank * k)), timeout=60, **MODE)
    right = k in (2, 3) or await exchange(group, rank, done.contributors, k)
    return done, [right, await waits]


if __name__ == "__main__":
    run_operations(operate)
