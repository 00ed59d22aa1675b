"""A rank's ways to processes beyond its job: nodes, ranks of other jobs, sessions."""

from __future__ import annotations

import os

from zbmd.actors.guest_door import GuestDoor
from zbmd.actors.host_contracts import NODE_NAME
from zbmd.actors.runtime_env import RankEnvironment
from zbmd.actors.system import ActorSystem
from zbmd.actors.ways import AskedFinder, Ways
from zbmd.actors.ways_contracts import guests_address
from zbmd.transport.budget import Deadlines
from zbmd.transport.link import Link
from zbmd.transport.shm import Listener, listen
from zbmd.transport.tcp_settings import tcp_settings


class RankWays:
    """Asks the host of its job, which knows the cluster's view. Guests of its host have an own door."""

    def __init__(
        self, system: ActorSystem, environment: RankEnvironment, cookie: bytes, deadlines: Deadlines
    ) -> None:
        self._door = GuestDoor(
            system.name,
            environment.incarnation,
            environment.job,
            cookie,
            tcp_settings(os.environ),
            deadlines,
            host=environment.host,
        )
        self._ways = Ways(system, AskedFinder(system, NODE_NAME), self._door.dial)
        self._listener: Listener | None = None

    def listen(self, address: str) -> None:
        """Take links of guests of this host. address: where siblings find us."""
        self._listener = listen(guests_address(address), self.accepted, self._door.endpoint)

    def accepted(self, link: Link) -> None:
        """Take a link of a guest, from wherever it came."""
        self._ways.accepted(link)

    async def close(self) -> None:
        """Take no more; the links end with the system."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
