"""A rank whose actor has a name and a group; rank 2 is replaced; argv: a file that its first run makes."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import Deferred, DeferredReply
from zbmd.actors.core.ref import Ref
from zbmd.actors.rank.member import Worker, join
from zbmd.actors.system import ActorGroup, ActorSystem
from zbmd.transport.errors import PeerLost


class WhoAreYou(Contract, id="directory_ranks.who"):
    pass


class Life(Contract, id="directory_ranks.life"):
    rank: int
    incarnation: int


class Bye(Contract, id="directory_ranks.bye"):
    """Answered once all have said it."""


class Member(Actor):
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.leaving = list[Deferred]()

    @on(Bye)
    async def bye(self, _: Bye) -> DeferredReply | None:
        self.leaving.append(later := self.defer())
        if len(self.leaving) == self.worker.world_size:
            for each in self.leaving:
                each.reply(None)
        return later

    @on(WhoAreYou)
    async def who(self, _: WhoAreYou) -> Life:
        return Life(self.worker.rank, self.worker.incarnation)


def is_first() -> bool:
    try:
        open(sys.argv[1], "x").close()
    except FileExistsError:
        return False
    return True


async def first_life(worker: Worker, group: ActorGroup, victim: Ref) -> None:
    """Rank 2 waits for its end; the others see it, and its replacement."""
    before = await victim.ask(WhoAreYou(), timeout=10, reply=Life)
    assert before.rank == 2
    monitor = worker.system.monitor(victim)
    worker.report({"first": worker.rank})
    if worker.rank == 2:
        await asyncio.Event().wait()
    down = await monitor.down(timeout=20)
    assert (down.ref, down.reason.kind.value) == (victim, "lost"), down
    await worker.view(after=worker.epoch)
    others = list[Ref]()
    async for _ in group.changes():
        others = [ref for ref in group.members if ref.process == "rank2" and ref != victim]
        if others:
            break
    new = None
    while new is None:  # until the replacement has the name
        new = await worker.system.whereis("worker2", timeout=10)
        assert new is None or new == others[0], (new, others)
    after = await new.ask(WhoAreYou(), timeout=10, reply=Life)
    assert after.rank == 2 and after.incarnation > before.incarnation


async def found(system: ActorSystem, name: str) -> Ref:
    """Return the actor with this name, which is there."""
    ref = await system.whereis(name, timeout=10)
    assert ref is not None
    return ref


async def main() -> None:
    async with join() as worker:
        system = worker.system
        me = await system.spawn(Member, worker)
        await system.register(f"worker{worker.rank}", me)
        group = await system.group("workers")
        await group.join(me)
        async for _ in group.changes():
            if len(group.members) == worker.world_size:
                break
        if worker.rank != 2 or is_first():
            await first_life(worker, group, await found(system, "worker2"))
        worker.report({"second": worker.rank})
        with contextlib.suppress(PeerLost):
            await (await found(system, "worker0")).ask(Bye(), timeout=20)


asyncio.run(main())
