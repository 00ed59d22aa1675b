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

    def listen(self, address: str) -> None:
        """Take links of guests of this host, until the system stops. address: where siblings find us."""
        self._door.listen_near(guests_address(address), self._ways)

    def accepted(self, link: Link) -> None:
        """Take a link of a guest, from wherever it came."""
        self._ways.accepted(link)
