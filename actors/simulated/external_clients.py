"""Sessions of the simulation: no nodes, but guests of one, whose actors talk to those of all others."""

from __future__ import annotations

import asyncio

from zbmd.actors.core.ref import Ref
from zbmd.actors.core.scopes import owner_of
from zbmd.actors.routing.contracts import Enrol, Route
from zbmd.actors.routing.dialer import Lease
from zbmd.actors.routing.routes import RemoteLocator, Routes
from zbmd.actors.simulated.clients import CALM_ROUND_S, RETRY_S, ROUND_S, Client, Talker, Tormentor
from zbmd.actors.simulated.node import accept_guests, dial_guest
from zbmd.actors.simulated.stand import ERRAND, Stand
from zbmd.actors.simulated.supervision_scenario import Watch
from zbmd.actors.simulated.workers import Here, Who, Worker
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import ZbmdError
from zbmd.transport.link.interface import Link
from zbmd.transport.sim import SimProcess


class GuestTalker(Talker):
    """Talks to workers that it finds by address: names and groups are those of the nodes."""

    async def _find(self) -> Ref | None:
        return self.anybody() if self.stand.tormented else self._unheard()

    async def _pause(self) -> None:
        mean_s = ROUND_S if self.stand.tormented else CALM_ROUND_S
        await asyncio.sleep(self.rng.expovariate(1 / mean_s))


class GuestWatcher(Tormentor):
    """Watches workers anywhere."""

    async def act(self) -> None:
        """Watch one."""
        other = (await self.ask(self.anybody(), Who(), Here)).ref
        watch = Watch(other)
        self.stand.watches.append((self.process, watch))
        self.system.watch(other, watch.tell)


class Errands(Client):
    """Has a worker of the session that others may ask, again and again."""

    async def run(self) -> None:
        """Spawn it, wait for its end."""
        while True:
            try:
                ref = await self.system.spawn(Worker, name=ERRAND)
            except ZbmdError as error:
                self.stand.note(f"no errand: {error}")
                await asyncio.sleep(RETRY_S)
                continue
            await self.system.monitor(ref).down()


class Guest:
    """The program of a session, whose node is never lost."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand

    async def __call__(self, process: SimProcess) -> None:
        """Until the simulation ends."""
        name = process.name

        async def dial(way: Route) -> Link:
            return await dial_guest(process, way, name)

        system = ActorSystem(name, process.incarnation)
        ways = Routes(system, RemoteLocator(system, owner_of(name)), dial)
        accept_guests(process, ways.accepted)

        async def link_up() -> tuple[Link, Enrol]:
            node = owner_of(name)
            return await dial(Route(node, 0, "", "", node)), Enrol("", "", name)

        while True:
            try:
                await Lease(system, ways, link_up).enter()
                break
            except ZbmdError as error:
                self._stand.note(f"{name}: {error}")
                await asyncio.sleep(RETRY_S)
        self._stand.guests[name] = process.incarnation
        async with asyncio.TaskGroup() as tasks:
            for client in (GuestTalker, GuestTalker, GuestWatcher, Errands):
                tasks.create_task(client(process, system, self._stand).run())
