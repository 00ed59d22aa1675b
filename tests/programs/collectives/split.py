"""A rank of a 2 x 2 mesh: split a group into rows and columns, remake sub-groups, lose rank 3."""

from __future__ import annotations

import asyncio

import numpy as np

import zbmd
from zbmd.collectives.errors import Desynchronised, MembersLost, OperationAborted
from zbmd.collectives.group.flight_dump import FLIGHTS


async def part_of(group: zbmd.Group, color: int, *, key: int = 0) -> zbmd.Group:
    """Return the sub-group of this color, which is not None."""
    part = await group.split(color, key=key)
    assert part is not None
    return part


async def rows_and_columns(group: zbmd.Group) -> tuple[zbmd.Group, zbmd.Group]:
    """A 2 x 2 mesh, both ways, used at once."""
    me = group.rank
    row, column = await part_of(group, me // 2), await part_of(group, me % 2, key=-me)
    assert row.members == (me // 2 * 2, me // 2 * 2 + 1)
    assert column.members == (me % 2 + 2, me % 2), column.members
    for count in (3, 100_000):
        x = np.full(count, 10.0**me)
        totals = await asyncio.gather(*(g.all_reduce(x, out=np.empty(count)) for g in (row, column, group)))
        for g, total in zip((row, column, group), totals, strict=True):
            assert (total == sum(10.0**rank for rank in g.members)).all(), (g, total[:2])
    gathered = await column.all_gather(np.array([me]))
    assert tuple(gathered.ravel()) == column.members
    assert row.rank == me % 2 and row.members[row.rank] == me
    other = 1 - row.rank
    sent = asyncio.ensure_future(row.send(np.array([me]), other, tag=7))
    got = await row.recv(other, tag=7)
    assert got.source == other and got.array[0] == row.members[other]
    await sent
    total = await asyncio.to_thread(column.blocking.all_reduce, np.ones(2))
    assert (total == 2).all()
    titles = {g.communicator.title for g in (row, column)}
    assert len(titles) == 2 and all(title.startswith("sub-group") for title in titles), titles
    return row, column


async def remade_again_and_again(group: zbmd.Group) -> None:
    for k in range(24 + 3):  # more often than there are channels
        part = await part_of(group, group.rank % 2 if k % 3 else group.rank // 2)
        assert (await part.all_reduce(np.ones(1)))[0] == 2
        await part.close()
    await group.barrier()
    names = [(g.channel, g.epoch) for g in FLIGHTS.taken("test").groups if not g.closed]
    assert len(names) == 3, names  # with row and column


async def only_some(group: zbmd.Group) -> None:
    left_out = await group.split(None if group.rank == 1 else 5)
    assert (left_out is None) == (group.rank == 1)
    if left_out is not None:
        assert left_out.members == (0, 2, 3)
        await left_out.barrier()
        await left_out.close()
    if group.rank in (1, 3):  # the others hear nothing of it
        pair = await asyncio.to_thread(group.blocking.subgroup, [3, 1])
        assert pair.members == (3, 1) and (await pair.broadcast(np.full(2, group.rank), 0))[0] == 3
        try:
            await pair.all_reduce(np.ones(2 if group.rank == 1 else 3), algorithm="direct")
        except Desynchronised as error:
            assert "sub-group" in str(error) and set(error.calls) == {1, 3}, error
        else:
            raise AssertionError("calls that differ are reported")
        await pair.close()
    await group.barrier()


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        row, column = await rows_and_columns(group)
        await remade_again_and_again(group)
        await only_some(group)
        worker.report({"ready": worker.rank})
        if worker.rank == 3:
            await asyncio.Event().wait()
        with_dead = row if worker.rank == 2 else column if worker.rank == 1 else None
        if with_dead is not None:
            try:
                await with_dead.all_reduce(np.ones(10))
            except MembersLost as error:
                assert error.ranks == (3,), error
            else:
                raise AssertionError("a member was lost")
        if worker.rank < 2:  # a sub-group without the dead goes on
            assert ((await row.all_reduce(np.ones(5))) == 2).all()
        try:
            await group.subgroup([0, 1, 2, 3], timeout=30)
        except MembersLost as error:
            assert error.ranks == (3,), error
        except OperationAborted:
            pass  # another has noticed first, and has given up
        for g in (row, column, group):
            await g.close()
        first, group = group, await zbmd.group(worker, after=group.epoch)
        try:
            await first.split(0)
        except OperationAborted as error:
            assert "view that is over" in str(error)
        pair = await part_of(group, int(worker.rank == 1))
        assert pair.members == ((1,) if worker.rank == 1 else (0, 2))
        assert (await pair.all_reduce(np.ones(3)))[0] == pair.size
        await pair.close()
        await group.close()
        worker.report({"done": worker.rank})


asyncio.run(main())
