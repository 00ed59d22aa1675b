"""Change an actor's code while all ranks ask it. Run it: zbmd-node run -n 3 examples/upgrade.py"""

import asyncio

import numpy as np

import zbmd


class Add(zbmd.Contract):
    amount: int


class Total(zbmd.Contract):
    value: int
    version: int


class Counter(zbmd.Actor, remote=True, version=1):
    value = 0

    @zbmd.on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        return Total(self.value, self.version)


class Better(Counter, remote=True, version=2):
    pass


class Wrong(Better, remote=True, version=3):
    @zbmd.on(Add)
    async def add(self, message: Add) -> Total:
        self.value = 0
        raise ValueError("this version is wrong")


async def change(worker: zbmd.Worker, group: zbmd.Group) -> None:
    if worker.rank == 0:
        print(await worker.upgrade(Counter, Better, probation_s=0.1))
        try:
            await worker.upgrade(Better, Wrong)
        except zbmd.UpgradeUndone as undone:
            print(f"taken back: {undone}")
    await group.barrier()


async def main() -> None:
    async with zbmd.join() as worker:
        if worker.rank == 0:
            await worker.system.spawn(Counter, name="counter")
        group = await zbmd.group(worker)
        await group.barrier()  # the counter has been spawned
        counter, asked = worker.system.ref("rank0/counter"), 0
        changing = asyncio.create_task(change(worker, group))
        while not changing.done():
            await counter.ask(Add(1), timeout=5.0)
            asked += 1
        await changing
        total = await group.all_reduce(np.array([asked]))
        if worker.rank == 0:
            last = await counter.ask(Add(0), reply=Total, timeout=5.0)
            print(f"version {last.version} counted {last.value} of {total[0]}")
        await group.close()


zbmd.run(main())
