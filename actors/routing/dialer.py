"""Links to processes of the cluster outside of the own view: dialed as an external client, and accepted.

A `Lease` keeps a process in a cluster by way of another, its owner: linked with it, and found there by all.
While that link is lost, the process can neither be found nor find others. It links with its owner again as
soon as it can. Its links with other processes stay, unless these get a notice of its end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import structlog

from zbmd.actors.contracts import fingerprints
from zbmd.actors.core.ref import Down, at_home, external_name, owner_of, scope_of_job
from zbmd.actors.core.system import CoreSystem
from zbmd.actors.routing.contracts import ROUTES_ACTOR, Enrol, Enrolled
from zbmd.actors.routing.routes import Routes
from zbmd.transport.errors import PeerLost, ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, Link
from zbmd.transport.shm import connect as shm
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress

if TYPE_CHECKING:
    from zbmd.actors.routing.contracts import Route
    from zbmd.transport.clock.deadlines import Deadlines
    from zbmd.transport.tcp.address import TcpSettings


ENROL_S: Final = 10.0
"""Timeout of the owner's reply, seconds."""
AGAIN_S: Final = 0.2
"""First delay before a lost link is made again, seconds; it doubles up to `AGAIN_S_MAX`."""
AGAIN_S_MAX: Final = 5.0


LinkUp = Callable[[], Awaitable[tuple[Link, Enrol]]]
"""Links with the owner; returns the link and our own addresses. Raises `ZbmdError` or OSError."""


class Lease:
    """A lease that lasts until `system`, named by `owned_name`, is stopped."""

    def __init__(self, system: CoreSystem, routes: Routes, link_up: LinkUp) -> None:
        self.owner = at_home(owner_of(system.name), system.scope)
        """The process by way of which this one joined."""
        self._system = system
        self._routes = routes
        self._link_up = link_up

    async def enter(self) -> None:
        """Join the cluster: others find this process from now on. Raises as `LinkUp` and `Ref.ask`."""
        link, enrol = await self._link_up()
        self._routes.dialed(self.owner, link)
        routes = self._system.ref(f"{self.owner}/{ROUTES_ACTOR}")
        try:
            answer = await routes.ask(enrol, timeout=ENROL_S)
            if not isinstance(answer, Enrolled):
                raise PeerLost(self.owner, f"it refused the lease: {answer.reason}")
        except BaseException:
            self._system.dismiss(self.owner, link.peer.incarnation, "it refused the lease")
            raise
        self._system.watch(routes, self._lost)

    def _lost(self, down: Down) -> None:
        if not self._routes.closed:
            why = str(down.reason)
            log.warning("not in the cluster until its owner is back", owner=self.owner, reason=why)
            self._routes.task(self._come_back(), "come back into the cluster")

    async def _come_back(self) -> None:
        again_s = AGAIN_S
        while True:
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_S_MAX)
            try:
                await self.enter()
            except (ZbmdError, OSError) as error:
                log.info("not in the cluster yet", owner=self.owner, reason=str(error))
            else:
                log.info("in the cluster again", owner=self.owner)
                return


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

    async def dial(self, route: Route) -> Link:
        """Return a link to a process. Raises as `shm.dial` and `tcp.dial`."""
        if route.near and self._host and route.host == self._host:
            return await shm.dial(route.near, self.endpoint)
        if not route.far:
            raise PeerLost(route.process, "it takes no links from other hosts")
        return await tcp.dial(route.far, self.endpoint, settings=self._settings)

    def listen_near(self, address: str, routes: Routes) -> None:
        """Accept links of external clients of this host, until `routes` is closed. Raises as `shm.listen`."""
        routes.listens(shm.listen(address, routes.accepted, self.endpoint))

    async def listen_far(self, host: str, routes: Routes) -> str:
        """Return the same of those of other hosts, at an address of ours; where. Raises as `tcp.listen`."""
        where = TcpAddress(host=host, port=0)
        listener = await tcp.listen(where, routes.accepted, self.endpoint, settings=self._settings)
        routes.listens(listener)
        return str(TcpAddress(host=host, port=listener.address.port))
