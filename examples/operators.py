"""An operator that fails now and then, done again by its next life. Run it: python examples/operators.py"""

import asyncio

import numpy as np

import zbmd


class Scale(zbmd.SeatedActor):
    calls = 0

    def multiply(self, x: np.ndarray, factor: float) -> np.ndarray:
        Scale.calls += 1
        if Scale.calls % 3 == 0:
            raise RuntimeError("this device has had enough")
        return x * factor


def compute(seat: zbmd.Seat[Scale]) -> float:
    total = 0.0
    for step in range(10):  # each a message by reference, without the loop
        total += float(seat.call(Scale.multiply, np.ones(4), float(step)).sum())
    return total


async def main() -> None:
    system = zbmd.ActorSystem("example")
    seat = zbmd.Seat[Scale]("scale")
    boss = await system.spawn(zbmd.SupervisorActor, [seat.child(Scale)], name="boss")
    total = await asyncio.to_thread(compute, seat)
    print(f"{total:g}, by {seat.lives} lives of one operator, after {seat.failures} failures")
    await system.terminate(boss)
    await system.stop()


zbmd.run(main())
