"""Actors of a node: a worker each, one of which has the name `leader`, and a watcher of their group."""

from __future__ import annotations

import contextlib

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.actors.core.ref import Down, Ref
from zbmd.actors.directory.events import GroupNews
from zbmd.actors.errors import NameInUse
from zbmd.actors.system import Actor, ActorSystem
from zbmd.transport.errors import PeerLost


def say(system: ActorSystem, text: str) -> None:
    print(f"{system.name}: {text}", flush=True)


class WhoAreYou(Contract, id="app.who"):
    pass


class Me(Contract, id="app.me"):
    node: str


class Worker(Actor):
    """Says where it is."""

    @on(WhoAreYou)
    async def who(self, _: WhoAreYou) -> Me:
        return Me(self.system.name)


class Watcher(Actor):
    """Monitors the other workers of the group, and takes the name when a leader is gone."""

    def __init__(self, worker: Ref) -> None:
        self.worker = worker
        self.looked = False

    @on(GroupNews)
    async def news(self, news: GroupNews) -> None:
        group = await self.system.group("workers")
        if len(group.members) == 3 and not self.looked:
            self.looked = True
            for ref in group.members:
                if ref != self.worker:
                    self.monitor(ref)
            lives = sorted([(await ref.ask(WhoAreYou(), timeout=10)).node for ref in group.members])
            far = next(ref for ref in group.members if ref != self.worker)
            spawned = await self.system.spawn_on(far.process, f"{__name__}:Worker", timeout=10)
            answer = await spawned.ask(WhoAreYou(), timeout=10)
            say(self.system, f"group of {len(lives)}, spawned there: {answer.node == far.process}")

    @on(Down)
    async def down(self, down: Down) -> None:
        say(self.system, f"down: {down.reason.kind.value} {down.reason.text}")
        answer, found = None, None
        while answer is None or found is None:  # until the view is without it, the name is the dead one's
            with contextlib.suppress(NameInUse):
                await self.system.register("leader", self.worker)
            with contextlib.suppress(PeerLost):
                if (found := await self.system.whereis("leader")) is not None:
                    answer = await found.ask(WhoAreYou(), timeout=10)
        say(self.system, f"leader answers: {answer.node == found.process}")


async def start(system: ActorSystem) -> None:
    ref = await system.spawn(Worker, name="worker")
    group = await system.group("workers", timeout=30)
    await group.watch(await system.spawn(Watcher, ref))
    try:
        await system.register("leader", ref, timeout=30)
        say(system, "leads")
    except NameInUse:
        say(system, "follows")
    await group.join(ref)
