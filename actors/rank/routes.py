"""A rank's ways to processes beyond its job: nodes, ranks of other jobs, sessions."""

from __future__ import annotations

import os

from zbmd.actors.host.contracts import NODE_NAME
from zbmd.actors.rank_env import RankEnvironment
from zbmd.actors.routing.contracts import external_address
from zbmd.actors.routing.dialer import ExternalDialer
from zbmd.actors.routing.routes import RemoteLocator, Routes
from zbmd.actors.system import ActorSystem
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.link.interface import Link
from zbmd.transport.tcp.address import tcp_settings


class RankWays:
    """Asks the host of its job, which knows the cluster's view. Guests of its host have an own door."""

    def __init__(
        self, system: ActorSystem, environment: RankEnvironment, cookie: bytes, deadlines: Deadlines
    ) -> None:
        self._door = ExternalDialer(
            system.name,
            environment.incarnation,
            environment.job,
            cookie,
            tcp_settings(os.environ),
            deadlines,
            host=environment.host,
        )
        self._ways = Routes(system, RemoteLocator(system, NODE_NAME), self._door.dial)

    def listen(self, address: str) -> None:
        """Take links of guests of this host, until the system stops. address: where siblings find us."""
        self._door.listen_near(external_address(address), self._ways)

    def accepted(self, link: Link) -> None:
        """Take a link of a guest, from wherever it came."""
        self._ways.accepted(link)
