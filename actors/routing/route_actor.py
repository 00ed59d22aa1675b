"""The actor that answers where processes listen, for every process that is linked with its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import sender_process
from zbmd.actors.core.deferred import Deferred, DeferredReply
from zbmd.actors.routing.contracts import (
    Enrol,
    Enrolled,
    Gone,
    NoRoute,
    ProcessesReply,
    ProcessesRequest,
    Route,
    RouteRequest,
    UntilGone,
)
from zbmd.actors.routing.routes import ClusterLocator, Routes
from zbmd.transport.errors import LocalProtocolError


class RouteTable(ClusterLocator, Protocol):
    """Knows the routes to all processes of a cluster, and when one of them is gone."""

    def notify_end(self, process: str, life: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell` once when that incarnation is gone; return what undoes it. Raises `TooManyPending`."""
        ...


class RoutesActor(Actor):
    """Answers every linked process where others listen, at `ROUTES_ACTOR`."""

    captured = False

    def __init__(self, finder: RouteTable) -> None:
        self._finder = finder
        self._waits: dict[tuple[str, str, int], tuple[Deferred, Callable[[], None]]] = {}
        self._finding: set[asyncio.Task[None]] = set()
        """At most as many as deferred answers may be owed."""

    @on(RouteRequest)
    async def find(self, message: RouteRequest) -> Route | NoRoute | DeferredReply:
        """See `RouteTable.find`. Another node may answer slowly, which delays no other request."""
        deferred = self.defer()
        task = asyncio.get_running_loop().create_task(self._find(message.process, deferred))
        self._finding.add(task)
        task.add_done_callback(self._finding.discard)
        return deferred

    async def _find(self, process: str, deferred: Deferred) -> None:
        routes = self._owner_of(process)
        found = await (self._finder if routes is None else routes.clients).find(process)
        with contextlib.suppress(LocalProtocolError):  # the asker has withdrawn
            deferred.reply(found)

    @on(ProcessesRequest)
    async def processes(self, _: ProcessesRequest) -> ProcessesReply:
        """See `RouteTable.processes`."""
        return await self._finder.processes()

    @on(Enrol)
    async def enrol(self, message: Enrol) -> Enrolled | NoRoute:
        """See `Enrol`: a linked process enrols only itself."""
        process = sender_process()
        routes, peer = self._owner_of(process), self.system.peer(process)
        if routes is None or peer is None:
            return NoRoute(f"{process} is not in the cluster through {self.system.name}")
        route = Route(process, peer.incarnation, message.host, message.near, message.far)
        return (
            Enrolled()
            if routes.clients.enrol(route)
            else NoRoute(f"another incarnation of {process} is linked")
        )

    @on(UntilGone)
    async def until_gone(self, message: UntilGone) -> Gone | DeferredReply:
        """See `RouteTable.notify_end`. Each asker is owed one answer for each process it asks about."""
        self._forget_askers_that_are_gone()
        key = (sender_process(), message.process, message.life)
        before = self._waits.pop(key, None)
        if before is not None:
            before[1]()
        deferred, told = self.defer(), list[str]()

        def tell(reason: str) -> None:
            told.append(reason)
            self._waits.pop(key, None)
            with contextlib.suppress(LocalProtocolError):  # the asker has withdrawn
                deferred.reply(Gone(reason))

        routes = self._owner_of(message.process)
        knows = self._finder if routes is None else routes.clients
        undo = knows.notify_end(message.process, message.life, tell)
        if not told:
            self._waits[key] = (deferred, undo)
        return deferred

    def _owner_of(self, process: str) -> Routes | None:
        """Return our routes, if that process is in the cluster through this one."""
        routes = self.system.service(Routes)
        return routes if routes is not None and routes.owns(process) else None

    async def stopping(self, reason: object) -> None:
        """Cancel all waits."""
        for _, undo in self._waits.values():
            undo()
        self._waits.clear()
        for task in self._finding:
            task.cancel()

    def _forget_askers_that_are_gone(self) -> None:
        for key in [key for key in self._waits if self.system.peer(key[0]) is None]:
            if key[0]:  # else it is of this process
                self._waits.pop(key)[1]()
