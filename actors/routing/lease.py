"""The lease of a process in a cluster by way of another, its owner: linked with it, and found there by all.

While that link is lost, the process can neither be found nor find others. It links with its owner again as
soon as it can. Its links with other processes stay, unless these get a notice of its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from zbmd.actors.core.scopes import at_home, owner_of
from zbmd.actors.core.signals import Down
from zbmd.actors.core.system import CoreSystem
from zbmd.actors.routing.contracts import ROUTES_ACTOR, Enrol, Enrolled
from zbmd.actors.routing.routes import Routes
from zbmd.transport.errors import PeerLost, ZbmdError
from zbmd.transport.link.interface import Link

ENROL_S: Final = 10.0
"""Timeout of the owner's reply, seconds."""
AGAIN_S: Final = 0.2
"""First delay before a lost link is made again, seconds; it doubles up to `AGAIN_S_MAX`."""
AGAIN_S_MAX: Final = 5.0

log: Final = structlog.stdlib.get_logger("zbmd.actors.routes")

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
