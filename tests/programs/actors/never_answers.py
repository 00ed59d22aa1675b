"""A rank that asks an actor of rank 0 for ever, which never answers."""

from __future__ import annotations

import asyncio
import contextlib

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.errors import DeadActor
from zbmd.actors.rank.member import join


class Question(Contract, id="test.question"):
    number: int


class Mute(Actor):
    @on(Question)
    async def question(self, message: Question) -> None:
        await asyncio.Event().wait()


async def main() -> None:
    async with join() as worker:
        if worker.rank == 0:
            await worker.system.spawn(Mute, name="mute")
            await asyncio.Event().wait()
        while True:
            with contextlib.suppress(DeadActor):  # not spawned yet
                await worker.system.ref("rank0/mute").ask(Question(7), timeout=3000)


asyncio.run(main())
