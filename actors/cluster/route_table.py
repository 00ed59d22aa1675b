"""What a node knows of the routes to processes: the nodes and jobs of the view that it acts on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from zbmd.actors.cluster.peer_links import process_name
from zbmd.actors.cluster.state.job_table import RankEntry, RankState
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.core.scopes import abroad, owner_of, scope_of_job
from zbmd.actors.errors import TooManyPending
from zbmd.actors.routing.clients import EndNotices
from zbmd.actors.routing.contracts import (
    PROCESSES_TOLD_MAX,
    REASON_CHARACTERS_MAX,
    NoRoute,
    ProcessesReply,
    Route,
    external_address,
)
from zbmd.actors.view import rank_name

HEEDED_MAX: Final = 16_384
"""Ends of processes that are waited for at one node."""

SEEN_MAX: Final = 1 << 17
"""Processes remembered from earlier views, the newest."""

NO_VIEW: Final = ClusterView(epoch=0, nodes=())
WhereActors = Callable[[NodeKey], Awaitable[str]]
"""Returns where the actors of another node listen; empty if it does not answer in time."""


@dataclass(slots=True, eq=False)
class _Heeded:
    """A wait for the end of an incarnation."""

    process: str
    life: int
    tell: Callable[[str], None]


@dataclass(slots=True)
class ClusterRoutes(EndNotices):
    """The `RouteTable` of a node, updated with each view; `where` asks other nodes."""

    where: WhereActors
    view: ClusterView = NO_VIEW
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    """The last incarnation of each process that was in a view; other nodes may know a newer view."""
    _heeded: set[_Heeded] = field(default_factory=set[_Heeded])
    _nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    _entries: dict[str, RankEntry] = field(default_factory=dict[str, RankEntry])
    """Those of the view, by the names of their processes."""

    def __post_init__(self) -> None:
        self._see(self.view)

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """Take a new view, and report the end of awaited processes that are not in it."""
        self.view = view
        self._see(view)
        for one in list(self._heeded):
            gone = self.gone(one.process, one.life)
            if gone:
                self._heeded.discard(one)
                one.tell(f"{gone} in view {view.epoch} ({reason})"[:REASON_CHARACTERS_MAX])

    async def find(self, process: str) -> Route | NoRoute:
        """Return where a process listens. process: its global name (`zbmd.actors.core.scopes`)."""
        if not self.view.epoch:
            return NoRoute("the node is in no cluster at the moment")
        node = self._nodes.get(process)
        if node is not None:
            address = await self.where(node.key)
            if not address:
                return NoRoute(f"{node} did not answer where its actors listen")
            return Route(process, node.key.incarnation, "", "", address)
        if owner_of(process):
            return NoRoute(f"{process} belongs to {owner_of(process)}, which knows where it is")
        entry = self._entries.get(process)
        if entry is None:
            return NoRoute(f"no node or rank of the cluster is called {process}")
        if entry.state is not RankState.UP:
            return NoRoute(f"{process} is {entry.state.value}: it accepts links once it has joined its job")
        near = external_address(entry.address) if entry.host else ""
        return Route(process, entry.incarnation, entry.host, near, entry.tcp_address)

    def gone(self, process: str, life: int) -> str:
        """Return why that incarnation is out of the cluster; empty while it is in."""
        if not self.view.epoch or owner_of(process):
            return ""
        node = self._nodes.get(process)
        if node is not None:
            return "" if node.key.incarnation <= life else f"{process} is incarnation {node.key.incarnation}"
        entry = self._entries.get(process)
        if entry is None:
            was = self._seen.get(process, 0) >= life
            return f"{process} has left the cluster" if was else ""
        if entry.incarnation > life:
            return f"{process} is incarnation {entry.incarnation}"
        over = entry.incarnation == life and entry.state in (RankState.FINISHED, RankState.LOST)
        vacant = entry.incarnation == life and entry.state is RankState.VACANT
        return f"{process} is {entry.state.value}" if over or vacant else ""

    def notify_end(self, process: str, life: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell` once when that incarnation is gone; return what undoes it. Raises `TooManyPending`."""
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
        """Return all nodes and the ranks that are up."""
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
            abroad(rank_name(entry.rank), scope_of_job(job.id)): entry
            for job in view.jobs.jobs
            for entry in job.ranks
        }
        now = {process: node.key.incarnation for process, node in self._nodes.items()}
        now |= {process: e.incarnation for process, e in self._entries.items() if e.incarnation}
        for process in now:
            self._seen.pop(process, None)  # keeps the newest last
        self._seen |= now
        while len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
