"""The stay of a process in a cluster by way of another, its owner: linked with it, and found there by all.

When that link is lost, the process cannot be found, nor find others, until it is linked with its owner again,
which it tries for as long as it lives. Links that it has with others stay, unless they hear that it has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from zbmd.actors.core.scopes import at_home, owner_of
from zbmd.actors.core.signals import Down
from zbmd.actors.core.system import CoreSystem
from zbmd.actors.routing.contracts import WAYS_ACTOR, Enrol, Enrolled
from zbmd.actors.routing.routes import Ways
from zbmd.transport.errors import PeerLost, ZbmdError
from zbmd.transport.link.interface import Link

ENROL_S: Final = 10.0
"""How long the owner may take to answer."""
AGAIN_S: Final = 0.2
"""After the link was lost, it is tried again so much later; then twice as much, up to"""
AGAIN_S_MAX: Final = 5.0

log: Final = structlog.stdlib.get_logger("zbmd.actors.ways")

LinkUp = Callable[[], Awaitable[tuple[Link, Enrol]]]
"""Links with the owner; returns the link, and where we listen. Raises `ZbmdError` or OSError."""


class Stay:
    """See the module. system: named as `owned_name` says; it lasts until that is stopped."""

    def __init__(self, system: CoreSystem, ways: Ways, link_up: LinkUp) -> None:
        self.owner = at_home(owner_of(system.name), system.scope)
        """The process by way of which we are in."""
        self._system = system
        self._ways = ways
        self._link_up = link_up

    async def enter(self) -> None:
        """Be found from now on. Raises as `LinkUp` and `Ref.ask`."""
        link, enrol = await self._link_up()
        self._ways.dialed(self.owner, link)
        ways = self._system.ref(f"{self.owner}/{WAYS_ACTOR}")
        try:
            answer = await ways.ask(enrol, timeout=ENROL_S)
            if not isinstance(answer, Enrolled):
                raise PeerLost(self.owner, f"it does not tell others of us: {answer.reason}")
        except BaseException:
            self._system.dismiss(self.owner, link.peer.incarnation, "it does not take us in")
            raise
        self._system.watch(ways, self._lost)

    def _lost(self, down: Down) -> None:
        if not self._ways.closed:
            why = str(down.reason)
            log.warning("not in the cluster until its owner is back", owner=self.owner, reason=why)
            self._ways.task(self._come_back(), "come back into the cluster")

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
