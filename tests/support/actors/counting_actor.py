"""An actor to record and replay, and what it understands."""

from __future__ import annotations

import asyncio
from asyncio import sleep as real_sleep  # nobody waits for it: actors' timers are what is tried

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on


class Add(Contract, id="counting.add"):
    amount: int


class Total(Contract, id="counting.total"):
    value: int


class Nap(Contract, id="counting.nap"):
    seconds: float


class Crash(Contract, id="counting.crash"):
    text: str


class Throw(Contract, id="counting.throw"):
    pass


class Thrown(Contract, id="counting.thrown"):
    values: list[float]
    clock_ns: int
    wall_ns: int


class Never(Contract, id="counting.never"):
    pass


class Counter(Actor):
    """Adds up, and can do so slowly, wrongly, or not at all."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        return Total(self.value)

    @on(Nap)
    async def nap(self, message: Nap) -> Total:
        await real_sleep(message.seconds)
        return Total(self.value)

    @on(Crash)
    async def crash(self, message: Crash) -> None:
        raise ValueError(message.text)

    @on(Throw)
    async def throw(self, _: Throw) -> Thrown:
        values = [self.random.random() for _ in range(3)]
        return Thrown(values, self.clock.monotonic_ns(), self.clock.wall_ns())

    @on(Never)
    async def never(self, _: Never) -> None:
        await asyncio.get_running_loop().create_future()
