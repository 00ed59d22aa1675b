"""One rank of the soak: barriers, asks between ranks and numpy, until it is told to end."""

from __future__ import annotations

import asyncio

import numpy as np

import zbmd
from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on

REPORT_EVERY = 200
ASK_S = 60.0


class Ping(Contract, id="zbmd.soak.ping"):
    """The smallest question."""


class Echo(Actor):
    """Answers."""

    @on(Ping)
    async def ping(self, message: Ping) -> Ping:
        """Answer."""
        return message


def work() -> float:
    """Some milliseconds of numpy and of plain Python."""
    matrix = np.ones((256, 256), np.float32)
    total = float((matrix @ matrix).sum())
    return total + sum(range(20_000))


async def main() -> None:
    """Take part until the process ends."""
    async with zbmd.join() as worker:
        await worker.system.spawn(Echo, name="echo")
        group = await zbmd.group(worker)
        neighbour = worker.system.ref(f"rank{(worker.rank + 1) % worker.world_size}/echo")
        values = np.ones(50_000, np.float32)
        turns = 0
        while True:
            await group.all_reduce(values)
            values.fill(1.0)
            await neighbour.ask(Ping(), reply=Ping, timeout=ASK_S)
            await asyncio.to_thread(work)
            turns += 1
            if worker.rank == 0 and turns % REPORT_EVERY == 1:
                worker.report({"turns": turns})


if __name__ == "__main__":
    zbmd.run(main())
