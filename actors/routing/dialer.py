"""Links to processes of the cluster outside of the own view: dialed as an external client, and accepted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import structlog

from zbmd.actors.contracts import fingerprints
from zbmd.actors.core.scopes import external_name, scope_of_job
from zbmd.transport.errors import PeerLost
from zbmd.transport.identity import Identity
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.shm import connect as shm
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress

if TYPE_CHECKING:
    from zbmd.actors.routing.contracts import Route
    from zbmd.actors.routing.routes import Routes
    from zbmd.transport.clock.deadlines import Deadlines
    from zbmd.transport.link.interface import Link
    from zbmd.transport.tcp.address import TcpSettings

log: Final = structlog.stdlib.get_logger("zbmd.actors.routes")


class ExternalDialer:
    """Dials by shared memory within one memory domain, by TCP elsewhere.

    name, incarnation, job: of the process; host: its memory domain, empty if it does not say. Nothing of the
    process's own memory is shown: it is no member.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        job: int,
        cookie: bytes,
        settings: TcpSettings,
        deadlines: Deadlines,
        *,
        host: str = "",
    ) -> None:
        self._host = host
        self._settings = settings
        identity = Identity(
            name=external_name(name, scope_of_job(job)),
            pid=os.getpid(),
            uid=os.getuid(),
            incarnation=incarnation,
            contracts=fingerprints(),
        )
        self.endpoint = Endpoint(identity=identity, cookie=cookie, deadlines=deadlines)
        """The external client's endpoint, for dialing, and for listening to other clients of this host."""

    async def dial(self, way: Route) -> Link:
        """Return a link to a process. Raises as `shm.dial` and `tcp.dial`."""
        if way.near and self._host and way.host == self._host:
            return await shm.dial(way.near, self.endpoint)
        if not way.far:
            raise PeerLost(way.process, "it takes no links from other hosts")
        return await tcp.dial(way.far, self.endpoint, settings=self._settings)

    def listen_near(self, address: str, routes: Routes) -> None:
        """Accept links of external clients of this host, until `routes` is closed. Raises as `shm.listen`."""
        routes.listens(shm.listen(address, routes.accepted, self.endpoint))

    async def listen_far(self, host: str, routes: Routes) -> str:
        """Return the same of those of other hosts, at an address of ours; where. Raises as `tcp.listen`."""
        where = TcpAddress(host=host, port=0)
        listener = await tcp.listen(where, routes.accepted, self.endpoint, settings=self._settings)
        routes.listens(listener)
        return str(TcpAddress(host=host, port=listener.address.port))
