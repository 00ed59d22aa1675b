"""A session of the simulation: no node, but a guest of one, whose actors talk to those of all others."""

from __future__ import annotations

import asyncio
from typing import Final

from zbmd.actors.contracts import fingerprints
from zbmd.actors.ref import Ref
from zbmd.actors.simulated.clients import CALM_ROUND_S, RETRY_S, ROUND_S, Talker, Tormentor
from zbmd.actors.simulated.node import DIAL_TIMEOUT_S
from zbmd.actors.simulated.stand import Stand
from zbmd.actors.simulated.workers import Here, Who
from zbmd.actors.supervision_scenario import Watch
from zbmd.actors.system import ActorSystem
from zbmd.actors.ways import AskedFinder, Ways
from zbmd.actors.ways_contracts import Way
from zbmd.transport.errors import ZbmdError
from zbmd.transport.link import Link
from zbmd.transport.sim import SimProcess

GUEST: Final = "session-1"
GUEST_HELLO: Final = f"{GUEST}@"
"""What its process is called: as guests call themselves at the hello."""


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


class Guest:
    """The program of a session. host: the node that it is a guest of, one that is never lost."""

    def __init__(self, stand: Stand, host: str) -> None:
        self._stand, self._host = stand, host

    async def __call__(self, process: SimProcess) -> None:
        """Until the simulation ends."""

        async def dial(way: Way) -> Link:
            return await process.dial(way.far, contracts=fingerprints(), timeout_s=DIAL_TIMEOUT_S)

        system = ActorSystem(GUEST, process.incarnation)
        ways = Ways(system, AskedFinder(system, self._host), dial)
        while system.peer(self._host) is None:
            try:
                ways.dialed(self._host, await dial(Way(self._host, 0, "", "", self._host)))
            except ZbmdError as error:
                self._stand.note(f"{GUEST}: {error}")
                await asyncio.sleep(RETRY_S)
        self._stand.guests.append((process.name, process.incarnation))
        async with asyncio.TaskGroup() as tasks:
            for client in (GuestTalker, GuestTalker, GuestWatcher):
                tasks.create_task(client(process, system, self._stand).run())
