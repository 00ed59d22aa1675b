"""An operator that fails now and then, and is retried by its next incarnation.

Run it: python examples/operators.py
"""

import asyncio

import numpy as np

import zbmd


class Scale(zbmd.SlotActor):
    calls = 0

    def multiply(self, x: np.ndarray, factor: float) -> np.ndarray:
        Scale.calls += 1
        if Scale.calls % 3 == 0:
            raise RuntimeError("this device has had enough")
        return x * factor


def compute(slot: zbmd.ActorSlot[Scale]) -> float:
    total = 0.0
    for step in range(10):  # each a message by reference, without the loop
        total += float(slot.call(Scale.multiply, np.ones(4), float(step)).sum())
    return total


async def main() -> None:
    system = zbmd.ActorSystem("example")
    slot = zbmd.ActorSlot[Scale]("scale")
    boss = await system.spawn(zbmd.SupervisorActor, [slot.child(Scale)], name="boss")
    total = await asyncio.to_thread(compute, slot)
    print(f"{total:g}, by {slot.incarnations} incarnations of one operator, after {slot.failures} failures")
    await system.terminate(boss)
    await system.stop()


zbmd.run(main())
