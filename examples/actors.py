"""Define an actor, and ask it from every rank. Run it: zbmd-node run -n 3 examples/actors.py"""

import zbmd


class Add(zbmd.Contract):
    amount: int


class Total(zbmd.Contract):
    value: int


class Counter(zbmd.Actor):
    def __init__(self) -> None:
        self.value = 0

    @zbmd.on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        return Total(self.value)


async def main() -> None:
    async with zbmd.join() as worker:
        if worker.rank == 0:
            await worker.system.spawn(Counter, name="counter")
        group = await zbmd.group(worker)
        await group.barrier()  # the counter has been spawned
        counter = worker.system.ref("rank0/counter")
        total = await counter.ask(Add(worker.rank + 1), reply=Total, timeout=5.0)
        print(f"rank {worker.rank} added {worker.rank + 1}, the counter said {total.value}")
        await group.barrier()  # every rank has its reply
        await group.close()


zbmd.run(main())
