"""A rank of four: sub-groups whose ranks are not those of the job, plain and elastic, async and blocking."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import zbmd

CHOSEN = [3, 1, 2]


def refused(call: Any, name: str, valid: str) -> None:
    """Expect a `UserError` that names the argument and the valid range."""
    try:
        call()
    except zbmd.UserError as error:
        assert f"{name} is not a rank of this group: expected {valid}" in str(error), error
    else:
        raise AssertionError(f"{name} was taken")


async def use(worker: zbmd.Worker, part: Any, value: Any, result: Any) -> None:
    """Call every operation with a rank of a group of `CHOSEN`. result: the array of what a call returns."""
    me, mine = CHOSEN.index(worker.rank), np.full(2, float(worker.rank))
    assert part.rank == me and worker.rank == CHOSEN[part.rank]
    assert result(await part.broadcast(mine.copy(), root=0))[0] == CHOSEN[0]
    assert result(await part.broadcast(mine.copy(), 2))[0] == CHOSEN[2]
    total = result(await part.reduce(mine.copy(), 1))
    assert (total is None) if me != 1 else (total == 6.0).all()
    rows = result(await part.gather(mine, 0))
    assert (rows is None) if me else sorted(row[0] for row in rows) == [1.0, 2.0, 3.0]
    given = np.arange(3.0).reshape(3, 1) if me == 2 else None
    got = result(await part.scatter(given, 2, out=np.empty(1)))
    assert got[0] == me, "row r is for rank r of the group"
    sending = asyncio.ensure_future(part.send(mine, (me + 1) % 3, tag=4))
    came = await part.recv((me - 1) % 3, tag=4)
    assert came.source == (me - 1) % 3 and came.array[0] == CHOSEN[came.source]
    await sending
    for bad in (-1, 3):
        try:
            await part.broadcast(mine.copy(), bad)
        except zbmd.UserError as error:
            assert f"root={bad} is not a rank of this group: expected 0..2" in str(error), error
        else:
            raise AssertionError("there is no such rank")
    # Ranks of a sub-group of a sub-group are those of the sub-group.
    inner: Any = await part.subgroup([2, 0]) if value == "elastic" or me != 1 else None
    if me == 1:
        assert inner is None
    else:
        assert inner is not None and inner.rank == [2, 0].index(me)
        assert result(await inner.broadcast(mine.copy(), 0))[0] == CHOSEN[2]
        await inner.close()


def use_blocking(worker: zbmd.Worker, part: Any) -> None:
    """As `use`, on a thread that may wait."""
    me, mine, calls = CHOSEN.index(worker.rank), np.full(2, float(worker.rank)), part.blocking
    for _ in range(3):  # the later ones take the fast path
        assert calls.broadcast(mine.copy(), 0)[0] == CHOSEN[0]
        assert calls.broadcast(mine.copy(), 1)[0] == CHOSEN[1]
    rows = calls.gather(mine, 1)
    assert (rows is None) if me != 1 else [row[0] for row in rows] == [float(rank) for rank in CHOSEN]
    refused(lambda: calls.broadcast(mine, 3), "root=3", "0..2")
    refused(lambda: calls.reduce(mine, -1), "root=-1", "0..2")


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        elastic = await zbmd.elastic_group(worker, channel=1)
        assert group.rank == elastic.rank == worker.rank
        if worker.rank in CHOSEN:
            part = await group.subgroup(CHOSEN)
            assert part.members == tuple(CHOSEN) and part.members[part.rank] == worker.rank
            await use(worker, part, "plain", lambda end: end)
            await asyncio.to_thread(use_blocking, worker, part)
            await part.close()
        some = await elastic.subgroup(CHOSEN)
        assert (some is None) == (worker.rank not in CHOSEN)
        if some is not None:
            assert some.ranks == tuple(CHOSEN) and some.members == (1, 2, 3)
            await use(worker, some, "elastic", lambda end: end.value)
            done = await some.all_reduce(np.ones(1))
            assert done.contributors == (1, 2, 3), "contributors are ranks of the job"
            await some.close()
        await group.barrier()
        await elastic.close()
        await group.close()
        print(f"rank {worker.rank}: done")


zbmd.run(main())
