"""Priorities among real ranks: the order is the same on all, and that of the calls' priorities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.processes.one_killed import run_and_kill_the_last

import zbmd
from zbmd.actors.view import Outcome
from zbmd.transport.errors import UserError

JOB = """
import asyncio
import threading

import numpy as np

import zbmd
from zbmd.collectives.errors import Desynchronised


async def queued(group, priorities):
    # Calls of these priorities, made while the data plane waits at a gate; the order in which they ran.
    gate, order = threading.Event(), []
    group.submit(lambda c: gate.wait())

    def call(k):
        def run(c):
            order.append(k)
            return c.all_reduce(np.full(3, float(k)))
        return asyncio.wrap_future(group.submit(run, priorities[k]))

    calls = [call(k) for k in range(len(priorities))]
    gate.set()
    for k, total in enumerate(await asyncio.gather(*calls)):
        assert (total == group.size * k).all(), (k, total)
    return order


async def main():
    async with zbmd.join() as worker:
        group = await zbmd.group(worker, priorities=True)
        assert await queued(group, [0, -3, 5, 0, 9, 5]) == [4, 2, 5, 0, 3, 1]
        # By each in its own time: whatever is chosen, all choose the same.
        work = [group.all_reduce(np.full(4, float(k)), priority=k % 7) for k in range(60)]
        for k, total in enumerate(await asyncio.gather(*work)):
            assert (total == group.size * k).all(), k
        total = await asyncio.to_thread(group.blocking.all_reduce, np.ones(2), priority=1)
        assert (total == group.size).all()
        part = await group.split(group.rank // 2)
        assert await queued(part, [0, 1]) == [1, 0]
        await part.close()
        try:
            await group.barrier(priority=int(group.rank == 1))
        except Desynchronised as error:
            assert error.calls == {r: f"priority {int(r == 1)}" for r in group.members}, error.calls
        else:
            raise AssertionError("priorities that differ are told")
        await group.barrier()  # which harms nothing
        worker.report({"ready": worker.rank})
        if worker.rank == 2:
            await asyncio.Event().wait()
        waiting = [group.all_reduce(np.ones(2), priority=k) for k in range(3)]
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, zbmd.ZbmdError) for end in ends), ends
        # The other one, which was told sooner, may have left already, and is missing then, too.
        assert any(isinstance(end, zbmd.PeerLost) and 2 in end.ranks for end in ends), ends
        await group.close()
        worker.report({"done": worker.rank})


zbmd.run(main())
"""


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_what_is_urgent_goes_first_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    ended = await run_and_kill_the_last(JOB, tmp_path, monkeypatch, ranks=3, links=links)
    assert ended.result.outcome is Outcome.SUCCEEDED, "\n".join(ended.lines)
    assert ended.said["ready"] == {0, 1, 2} and ended.said["done"] == {0, 1}, ended.lines


async def test_a_group_without_priorities_says_so() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        for call in (group.barrier(priority=1), group.all_reduce(np.ones(1), priority=128)):
            with pytest.raises(UserError, match="priorities=True"):
                await call
        with pytest.raises(UserError, match="priorities=True"):
            group.blocking.barrier(priority=1)
        await group.barrier(priority=0)
        await group.close()
