"""A rank that hangs as its argument names: `hanging_ranks.py BEHAVIOUR`. Tests look for the marked lines."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Awaitable, Callable

import numpy as np

import zbmd
from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.group.group import Group

gate = threading.Event()
meeting: Group | None = None


class Work(Contract, id="test.hang.work"):
    to: str = ""


class Done(Contract, id="test.hang.done"):
    pass


class Busy(Actor):
    @on(Work)
    async def work(self, message: Work) -> Done:
        if message.to == "block":
            load_batch()
        elif message.to:
            if meeting is not None:
                await meeting.barrier()
            await self.system.ref(message.to).ask(Work(), reply=Done, timeout=60)  # ASKS HERE
        return Done()

    @on(Done)
    async def done(self, message: Done) -> None:
        pass


class Slow(Actor):
    @on(Work)
    async def work(self, message: Work) -> Done:
        await asyncio.get_running_loop().create_future()  # WAITS HERE
        return Done()


def load_batch() -> None:
    gate.wait()  # BLOCKS HERE


async def each_in_its_own_way(worker: Worker) -> None:
    ref = await worker.system.spawn(Busy, name="worker")
    await worker.system.spawn(Slow, name="slow")
    group = await zbmd.group(worker)
    await group.barrier()
    match worker.rank:
        case 0:
            await ref.ask(Work("rank3/slow"), reply=Done, timeout=60)
        case 1:
            await ref.tell(Work("block"))
        case 2:
            ctypes.PyDLL(None).pause()
        case _:
            pass
    await asyncio.get_running_loop().create_future()


async def never_enters_a_collective(worker: Worker) -> None:
    group = await zbmd.group(worker)
    with worker.progress.allow(3600):
        if worker.rank == 1:
            gate.wait(1.5)  # longer than the deadline, and not reported
        await group.barrier()
    if worker.rank == 2:
        with worker.progress.doing("step 41: load"):
            await asyncio.to_thread(gate.wait)  # ELSEWHERE
    await group.all_reduce(np.ones(4, np.float32))


async def meets_for_ever(worker: Worker) -> None:
    group = await zbmd.group(worker)
    for step in range(1_000_000_000):
        await group.barrier()
        if step == 10:
            worker.report({"ready": True})


async def deadlocks(worker: Worker) -> None:
    global meeting
    await worker.system.spawn(Busy, name="worker")
    meeting = await zbmd.group(worker)
    await worker.system.ref("worker").ask(Work(f"rank{1 - worker.rank}/worker"), reply=Done, timeout=60)


async def blocks_once(worker: Worker) -> None:
    if worker.rank == 1 and worker.incarnation == 1:
        load_batch()
    if worker.epoch == 1:
        await worker.view(after=1)


async def main(behaviour: Callable[[Worker], Awaitable[None]]) -> None:
    async with join() as worker:
        await behaviour(worker)


asyncio.run(main(globals()[sys.argv[1]]))
