"""Blocking calls on another thread than the loop's, which repairs the group meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result
from zbmd.collectives.errors import MembersLost
from zbmd.transport.errors import LocalProtocolError


def blocked(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    told, call = list[int](), group.blocking
    if k == 4 and rank != 2:
        try:
            call.recv(2, tag=7, timeout=40)  # which dies without a word
        except MembersLost as error:
            told = list(error.ranks)
    done = call.all_reduce(np.full(300, 10.0**rank * k), timeout=60, **MODE)
    return done, [float(done.value.min()), float(done.value.max()), told]


def parted(group: zbmd.ElasticGroup, rank: int) -> zbmd.ElasticGroup:
    part = group.blocking.split(rank % 2, timeout=60)  # operation 1
    assert part is not None
    if rank != 1:
        assert part.rank == rank // 2
        part.blocking.send(np.full(3, rank), 1 - part.rank, tag=5)
        got = part.blocking.recv(tag=5, timeout=40)
        assert (got.source, int(got.array.sum())) == (1 - part.rank, 3 * (2 - rank)), got
    return part


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    if k == 1:
        try:
            group.blocking.barrier()
        except LocalProtocolError as error:
            assert "await" in str(error), error
        else:
            raise AssertionError("a call that holds up the loop was taken")
        await (await asyncio.to_thread(parted, group, rank)).close()
    return await asyncio.to_thread(blocked, group, rank, k)


if __name__ == "__main__":
    run_operations(operate)
