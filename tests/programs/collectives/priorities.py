"""A rank that queues calls with priorities, in its group and in a sub-group; the last one is killed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

import zbmd
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import Desynchronised, MembersLost


async def queued(group: zbmd.Group, priorities: list[int]) -> list[int]:
    """Make calls with these priorities while the data plane waits at a gate; return the order they ran in."""
    gate, order = threading.Event(), list[int]()
    group.submit(lambda c: gate.wait())

    def call(k: int) -> asyncio.Future[Any]:
        def run(c: Communicator) -> Any:
            order.append(k)
            return c.all_reduce(np.full(3, float(k)))

        return asyncio.wrap_future(group.submit(run, priorities[k]))

    calls = [call(k) for k in range(len(priorities))]
    gate.set()
    for k, total in enumerate(await asyncio.gather(*calls)):
        assert (total == group.size * k).all(), (k, total)
    return order


async def main() -> None:
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
        assert part is not None
        assert await queued(part, [0, 1]) == [1, 0]
        await part.close()
        try:
            await group.barrier(priority=int(group.rank == 1))
        except Desynchronised as error:
            assert error.calls == {r: f"priority {int(r == 1)}" for r in group.members}, error.calls
        else:
            raise AssertionError("priorities that differ are reported")
        await group.barrier()  # which harms nothing
        worker.report({"ready": worker.rank})
        if worker.rank == 2:
            await asyncio.Event().wait()
        waiting = [group.all_reduce(np.ones(2), priority=k) for k in range(3)]
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, zbmd.ZbmdError) for end in ends), ends
        # The other one, which heard sooner, may have left already, and is missing then, too.
        assert any(isinstance(end, MembersLost) and 2 in end.ranks for end in ends), ends
        await group.close()
        worker.report({"done": worker.rank})


zbmd.run(main())
