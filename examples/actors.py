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
    async with zbmd.join() as node:
        if node.rank == 0:
            await node.system.spawn(Counter, name="counter")
        group = await zbmd.group(node)
        await group.barrier()  # the counter is there
        counter = node.system.ref("rank0/counter")
        total = await counter.ask(Add(node.rank + 1), reply=Total, timeout=5.0)
        print(f"rank {node.rank} added {node.rank + 1}, the counter said {total.value}")
        await group.barrier()  # everybody has asked
        await group.close()


zbmd.run(main())
