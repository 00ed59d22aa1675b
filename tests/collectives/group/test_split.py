"""Sub-groups of a group among real ranks, over shared memory and over TCP; one rank is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.processes.kept_lines import Lines
from support.processes.one_killed import run_and_kill_the_last

import zbmd
from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.view import Outcome
from zbmd.collectives.programs.channels import SUBGROUPS_MAX
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, UserError

JOB = '''
import asyncio

import numpy as np

import zbmd
from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.group.flight_dump import FLIGHTS


async def rows_and_columns(group):
    """A 2 x 2 mesh, both ways, used at once."""
    me = group.rank
    row, column = await group.split(me // 2), await group.split(me % 2, key=-me)
    assert row.members == (me // 2 * 2, me // 2 * 2 + 1)
    assert column.members == (me % 2 + 2, me % 2), column.members
    for count in (3, 100_000):
        x = np.full(count, 10.0**me)
        totals = await asyncio.gather(*(g.all_reduce(x, out=np.empty(count)) for g in (row, column, group)))
        for g, total in zip((row, column, group), totals):
            assert (total == sum(10.0**rank for rank in g.members)).all(), (g, total[:2])
    gathered = await column.all_gather(np.array([me]))
    assert tuple(gathered.ravel()) == column.members
    other = row.members[1 - row.members.index(me)]
    sent = asyncio.ensure_future(row.send(np.array([me]), other, tag=7))
    got = await row.recv(other, tag=7)
    assert got.array[0] == other
    await sent
    total = await asyncio.to_thread(column.blocking.all_reduce, np.ones(2))
    assert (total == 2).all()
    titles = {g.communicator.title for g in (row, column)}
    assert len(titles) == 2 and all(title.startswith("sub-group") for title in titles), titles
    return row, column


async def remade_again_and_again(group):
    for k in range(24 + 3):  # more often than there are channels
        part = await group.split(group.rank % 2 if k % 3 else group.rank // 2)
        assert (await part.all_reduce(np.ones(1)))[0] == 2
        await part.close()
    await group.barrier()
    names = [(g.channel, g.epoch) for g in FLIGHTS.taken("test").groups if not g.closed]
    assert len(names) == 3, names  # with row and column


async def only_some(group):
    left_out = await group.split(None if group.rank == 1 else 5)
    assert (left_out is None) == (group.rank == 1)
    if left_out is not None:
        assert left_out.members == (0, 2, 3)
        await left_out.barrier()
        await left_out.close()
    if group.rank in (1, 3):  # the others hear nothing of it
        pair = await asyncio.to_thread(group.blocking.subgroup, [3, 1])
        assert pair.members == (3, 1) and (await pair.broadcast(np.full(2, group.rank), 3))[0] == 3
        try:
            await pair.all_reduce(np.ones(2 if group.rank == 1 else 3), algorithm="direct")
        except Desynchronised as error:
            assert "sub-group" in str(error) and set(error.calls) == {1, 3}, error
        else:
            raise AssertionError("calls that differ are told")
        await pair.close()
    await group.barrier()


async def main():
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
            except zbmd.PeerLost as error:
                assert error.ranks == (3,), error
            else:
                raise AssertionError("a member was lost")
        if worker.rank < 2:  # a sub-group without the dead goes on
            assert ((await row.all_reduce(np.ones(5))) == 2).all()
        try:
            await group.subgroup([0, 1, 2, 3], timeout=30)
        except zbmd.PeerLost as error:
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
        pair = await group.split(int(worker.rank == 1))
        assert pair.members == ((1,) if worker.rank == 1 else (0, 2))
        assert (await pair.all_reduce(np.ones(3)))[0] == pair.size
        await pair.close()
        await group.close()
        worker.report({"done": worker.rank})

asyncio.run(main())
'''


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_a_mesh_of_ranks_one_of_which_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    ended = await run_and_kill_the_last(
        JOB, tmp_path, monkeypatch, ranks=4, links=links, arena_bytes=16 << 20
    )
    assert ended.result.outcome is Outcome.SUCCEEDED, "\n".join(ended.lines)
    assert ended.said["ready"] == {0, 1, 2, 3} and ended.said["done"] == {0, 1, 2}, ended.lines


async def test_who_closes_and_leaves_behind_the_last_operation_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_ALGORITHM", "tree")  # the root is done long before the others
    script = tmp_path / "job.py"
    script.write_text("""
import zbmd

async def main():
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        x = zbmd.empty(1 << 20, "f8")
        x.fill(worker.rank)
        await group.broadcast(x, 0)
        await group.close()
    print("sum", x.sum())

zbmd.run(main())
""")
    output = Lines()
    config = HostConfig(target=str(script), world_size=3, preload=("zbmd",), arena_bytes=16 << 20)
    result = await Host(config, output=output).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert sum("sum 0.0" in line for line in output.lines) == 3, output.lines


async def test_a_world_of_one_has_sub_groups_too() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        parts = [await group.subgroup([0]) for _ in range(SUBGROUPS_MAX)]
        assert (await parts[-1].all_reduce(np.ones(3)) == 1).all()
        with pytest.raises(LocalProtocolError, match="close one"):
            await group.split(0)
        await parts[0].close()
        await parts[0].close()  # again, it does nothing
        nested = await parts[1].split(3)
        assert nested is not None
        await nested.barrier()
        await nested.close()
        for part in parts:
            await part.close()
        await group.close()


async def test_misuse_is_told() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        for ranks in ([], [1], [0, 0], [0, 5]):
            with pytest.raises(UserError, match="are not members"):
                await group.subgroup(ranks)
        with pytest.raises(UserError, match="out of bounds"):
            await group.split(2**70)
        with pytest.raises(LocalProtocolError, match="is for sub-groups"):
            await zbmd.group(worker, channel=8)
        await group.close()


async def test_a_member_that_does_not_come_is_waited_for_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    script = tmp_path / "job.py"
    script.write_text(f"""
import numpy as np
import zbmd

async def main():
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        if worker.rank == 0:
            try:
                await group.subgroup([0, 1], timeout=0.05)
            except zbmd.{DeadlineExceeded.__name__} as error:
                assert "sub-group of ranks [0, 1]" in str(error), error
            else:
                raise AssertionError("nobody came")
        await group.barrier()
        again = await group.subgroup([0, 1])  # the other has called this once less
        assert (await again.all_reduce(np.ones(1)))[0] == 2
        await group.barrier()
        await again.close()
        pair = await group.subgroup([1, 0])
        if worker.rank == 0:  # the other may still be in the pair's last operation, and read our descriptor
            await pair.close()
        part = await group.subgroup([worker.rank])
        assert part.communicator.channel != pair.communicator.channel
        await part.barrier()
        await group.barrier()  # once both have closed the pair, its channel may be used again
        await pair.close()
        await part.close()
        await group.close()

zbmd.run(main())
""")
    output = Lines()
    host = Host(HostConfig(target=str(script), world_size=2, preload=("zbmd",)), output=output)
    result = await host.run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
