"""What a node knows of the routes to processes: the nodes and jobs of the view that it acts on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from zbmd.actors.cluster.jobs.table import RankEntry, RankState
from zbmd.actors.cluster.node_id import Node, NodeKey
from zbmd.actors.cluster.peer_links import process_name
from zbmd.actors.cluster.view import ClusterView
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import sender_process
from zbmd.actors.core.deferred import Deferred, DeferredReply
from zbmd.actors.core.scopes import abroad, owner_of, scope_of_job
from zbmd.actors.errors import TooManyPending
from zbmd.actors.routing.contracts import (
    PROCESSES_TOLD_MAX,
    REASON_CHARACTERS_MAX,
    Enrol,
    Enrolled,
    Gone,
    NoRoute,
    ProcessesReply,
    ProcessesRequest,
    Route,
    RouteRequest,
    UntilGone,
    external_address,
)
from zbmd.actors.routing.end_notice import EndNotices
from zbmd.actors.routing.routes import Routes
from zbmd.actors.view import child_id
from zbmd.transport.errors import LocalProtocolError

HEEDED_MAX: Final = 16_384
"""Ends of processes that are waited for, by all who ask a node."""

SEEN_MAX: Final = 1 << 17
"""Processes that were in a view, the newest."""

NO_VIEW: Final = ClusterView(epoch=0, nodes=())
WhereActors = Callable[[NodeKey], Awaitable[str]]
"""Where the actors of another node listen; empty if it does not say in time."""


@dataclass(slots=True, eq=False)
class _Heeded:
    """Somebody waits for the end of a life."""

    process: str
    life: int
    tell: Callable[[str], None]


@dataclass(slots=True)
class WayFinder(EndNotices):
    """See the module. To be told of each view; `where` asks other nodes. A `Finder` of its own node."""

    where: WhereActors
    view: ClusterView = NO_VIEW
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    """The last life of each process that was in a view: others may be in one that this node does not know."""
    _heeded: set[_Heeded] = field(default_factory=set[_Heeded])
    _nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    _entries: dict[str, RankEntry] = field(default_factory=dict[str, RankEntry])
    """Those of the view, by the names of their processes."""

    def __post_init__(self) -> None:
        self._see(self.view)

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """The node acts on another view: who waits for the end of what is not in it is told."""
        self.view = view
        self._see(view)
        for one in list(self._heeded):
            gone = self.gone(one.process, one.life)
            if gone:
                self._heeded.discard(one)
                one.tell(f"{gone} in view {view.epoch} ({reason})"[:REASON_CHARACTERS_MAX])

    async def find(self, process: str) -> Route | NoRoute:
        """Where a process listens. process: as all call it (`zbmd.actors.core.scopes`)."""
        if not self.view.epoch:
            return NoRoute("the node is in no cluster at the moment")
        node = self._nodes.get(process)
        if node is not None:
            address = await self.where(node.key)
            if not address:
                return NoRoute(f"{node} does not say where its actors listen")
            return Route(process, node.key.incarnation, "", "", address)
        if owner_of(process):
            return NoRoute(f"where {process} is, {owner_of(process)} knows")
        entry = self._entries.get(process)
        if entry is None:
            return NoRoute(f"no node or rank of the cluster is called {process}")
        if entry.state is not RankState.UP:
            return NoRoute(f"{process} is {entry.state.value}: it takes links once it has joined its job")
        near = external_address(entry.address) if entry.host else ""
        return Route(process, entry.incarnation, entry.host, near, entry.tcp_address)

    def gone(self, process: str, life: int) -> str:
        """Why the cluster goes on without that life; empty while it does not."""
        if not self.view.epoch or owner_of(process):
            return ""
        node = self._nodes.get(process)
        if node is not None:
            return "" if node.key.incarnation <= life else f"{process} is incarnation {node.key.incarnation}"
        entry = self._entries.get(process)
        if entry is None:
            was = self._seen.get(process, 0) >= life
            return f"{process} is in the cluster no more" if was else ""
        if entry.incarnation > life:
            return f"{process} is incarnation {entry.incarnation}"
        over = entry.incarnation == life and entry.state in (RankState.FINISHED, RankState.LOST)
        vacant = entry.incarnation == life and entry.state is RankState.VACANT
        return f"{process} is {entry.state.value}" if over or vacant else ""

    def notify_end(self, process: str, life: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell`, once, when that life is gone; returns what undoes it. Raises `TooManyPending`."""
        gone = self.gone(process, life)
        if gone:
            tell(gone)
            return lambda: None
        if len(self._heeded) >= HEEDED_MAX:
            raise TooManyPending(f"the ends of {HEEDED_MAX} processes are waited for")
        one = _Heeded(process, life, tell)
        self._heeded.add(one)
        return lambda: self._heeded.discard(one)

    async def processes(self) -> ProcessesReply:
        """All nodes and the ranks that are up."""
        names = {node.key: node.name or str(node.key) for node in self.view.nodes}
        found = [(process_name(key.id), key.incarnation, name) for key, name in names.items()]
        found += [
            (process, entry.incarnation, names.get(entry.node, "?"))
            for process, entry in self._entries.items()
            if entry.state is RankState.UP and entry.node is not None
        ]
        told = tuple(found[:PROCESSES_TOLD_MAX])
        return ProcessesReply(told, len(found) - len(told))

    def _see(self, view: ClusterView) -> None:
        self._nodes = {process_name(node.id): node for node in view.nodes}
        self._entries = {
            abroad(child_id(entry.rank), scope_of_job(job.id)): entry
            for job in view.jobs.jobs
            for entry in job.ranks
        }
        now = {process: node.key.incarnation for process, node in self._nodes.items()}
        now |= {process: e.incarnation for process, e in self._entries.items() if e.incarnation}
        for process in now:
            self._seen.pop(process, None)  # so that the newest are last
        self._seen |= now
        while len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]


class WaysActor(Actor):
    """Answers whoever is linked with its process, at `ROUTES_ACTOR`."""

    captured = False

    def __init__(self, finder: WayFinder) -> None:
        self._finder = finder
        self._waits: dict[tuple[str, str, int], tuple[Deferred, Callable[[], None]]] = {}
        self._finding: set[asyncio.Task[None]] = set()
        """As many as askers may be owed answers."""

    @on(RouteRequest)
    async def find(self, message: RouteRequest) -> Route | NoRoute | DeferredReply:
        """See `WayFinder.find`. Another node may take its time to answer: others do not wait for that."""
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
        """See `WayFinder.processes`."""
        return await self._finder.processes()

    @on(Enrol)
    async def enrol(self, message: Enrol) -> Enrolled | NoRoute:
        """See `Enrol`: who is linked with us speaks for itself alone."""
        process = sender_process()
        routes, peer = self._owner_of(process), self.system.peer(process)
        if routes is None or peer is None:
            return NoRoute(f"{process} is not in the cluster by way of {self.system.name}")
        way = Route(process, peer.incarnation, message.host, message.near, message.far)
        return Enrolled() if routes.clients.enrol(way) else NoRoute(f"another life of {process} is linked")

    @on(UntilGone)
    async def until_gone(self, message: UntilGone) -> Gone | DeferredReply:
        """See `WayFinder.heed`. One answer is owed to each process that asks, for each that it asks about."""
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
        """Our routes, if that process is in the cluster by way of this one."""
        routes = self.system.service(Routes)
        return routes if routes is not None and routes.owns(process) else None

    async def stopping(self, reason: object) -> None:
        """Nobody is told any more."""
        for _, undo in self._waits.values():
            undo()
        self._waits.clear()
        for task in self._finding:
            task.cancel()

    def _forget_askers_that_are_gone(self) -> None:
        for key in [key for key in self._waits if self.system.peer(key[0]) is None]:
            if key[0]:  # else it is of this process
                self._waits.pop(key)[1]()
