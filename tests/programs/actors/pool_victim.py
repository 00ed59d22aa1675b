"""Prints the pid of a process of its pool, and waits in a handler that never returns."""

from __future__ import annotations

import asyncio

from support.actors.calculator import Calculator, Cube, Hang, Result

from zbmd.actors.system import ActorSystem


async def main() -> None:
    system = ActorSystem("victim")
    ref = await system.spawn(Calculator)
    print((await ref.ask(Cube(2), timeout=60, reply=Result)).pid, flush=True)
    await ref.ask(Hang(), timeout=60)


asyncio.run(main())
