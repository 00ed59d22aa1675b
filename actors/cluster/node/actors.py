"""The actors of a node: a system for each incarnation, linked with those of all other members of the cluster.

Ranks and sessions link with a node's actors, and it with theirs, when something is sent there (`routes`).
A node sends the others the address of its actors; of each two the higher key dials. Names and groups follow
the views that the node acts on. A node that leaves the view is lost, whatever its link does. At the end of an
incarnation all its actors are killed, before the next one begins with a system of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec
import structlog

from zbmd.actors.cluster.contracts import ADDRESS_CHARS_MAX
from zbmd.actors.cluster.peer_links import node_key, process_name
from zbmd.actors.cluster.port import ClusterPort
from zbmd.actors.cluster.state.job_table import RankEntry, SlotState
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.ref import MARK, abroad, is_global, owner_of, scope_of_job
from zbmd.actors.errors import TooManyPending
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, Inside
from zbmd.actors.routing.clients import EndNotices
from zbmd.actors.routing.contracts import (
    PROCESSES_MAX,
    REASON_CHARACTERS_MAX,
    ROUTES_ACTOR,
    NoRoute,
    ProcessesReply,
    Route,
    external_address,
)
from zbmd.actors.routing.dialer import ExternalDialer
from zbmd.actors.routing.routes import Routes, RoutesActor
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade.keeper import CodeKeeper
from zbmd.actors.view import rank_name
from zbmd.transport.clock.deadlines import Deadlines, derive
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, Link
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, parse_address

# --- routes to processes, by the view that the node acts on -----------------------------------------------


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
    incarnation: int
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
            gone = self.gone(one.process, one.incarnation)
            if gone:
                self._heeded.discard(one)
                one.tell(f"{gone} in view {view.epoch} ({reason})"[:REASON_CHARACTERS_MAX])

    async def find(self, process: str) -> Route | NoRoute:
        """Return where a process listens. process: its global name (`zbmd.actors.core.ref`)."""
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
        if entry.state is not SlotState.UP:
            return NoRoute(f"{process} is {entry.state.value}: it accepts links once it has joined its job")
        near = external_address(entry.address) if entry.host else ""
        return Route(process, entry.incarnation, entry.host, near, entry.tcp_address)

    def gone(self, process: str, incarnation: int) -> str:
        """Return why that incarnation is out of the cluster; empty while it is in."""
        if not self.view.epoch or owner_of(process):
            return ""
        node = self._nodes.get(process)
        if node is not None:
            return (
                ""
                if node.key.incarnation <= incarnation
                else f"{process} is incarnation {node.key.incarnation}"
            )
        entry = self._entries.get(process)
        if entry is None:
            was = self._seen.get(process, 0) >= incarnation
            return f"{process} has left the cluster" if was else ""
        if entry.incarnation > incarnation:
            return f"{process} is incarnation {entry.incarnation}"
        over = entry.incarnation == incarnation and entry.state in (SlotState.FINISHED, SlotState.LOST)
        vacant = entry.incarnation == incarnation and entry.state is SlotState.VACANT
        return f"{process} is {entry.state.value}" if over or vacant else ""

    def notify_end(self, process: str, incarnation: int, tell: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell` once when that incarnation is gone; return what undoes it. Raises `TooManyPending`."""
        gone = self.gone(process, incarnation)
        if gone:
            tell(gone)
            return lambda: None
        if len(self._heeded) >= HEEDED_MAX:
            raise TooManyPending(f"the ends of {HEEDED_MAX} processes are waited for")
        one = _Heeded(process, incarnation, tell)
        self._heeded.add(one)
        return lambda: self._heeded.discard(one)

    async def processes(self) -> ProcessesReply:
        """Return all nodes and the ranks that are up."""
        names = {node.key: node.name or str(node.key) for node in self.view.nodes}
        found = [(process_name(key.id), key.incarnation, name) for key, name in names.items()]
        found += [
            (process, entry.incarnation, names.get(entry.node, "?"))
            for process, entry in self._entries.items()
            if entry.state is SlotState.UP and entry.node is not None
        ]
        shown = tuple(found[:PROCESSES_MAX])
        return ProcessesReply(shown, len(found) - len(shown))

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


log: Final = structlog.stdlib.get_logger("zbmd.node_actors")

ANNOUNCE_S: Final = 0.25
"""From one word to those that should dial us, and have not, to the next."""
ASKS_MAX: Final = 16
"""So often a node is asked where its actors listen."""
ACTOR_NODES_MAX: Final = 256
"""Every node has a link to every other: in a larger cluster actors stay as linked as they were."""

Start = Callable[[ActorSystem], Awaitable[None]]
"""Starts what a node runs, in a system that has just become a member."""


class ActorsAt(Contract, id="zbmd.node.actors_at"):
    """A node tells another where its actors listen."""

    address: Annotated[str, msgspec.Meta(min_length=1, max_length=ADDRESS_CHARS_MAX)]


class ActorsWanted(Contract, id="zbmd.node.actors_wanted"):
    """Tell us where your actors listen."""


class ActorEndpoint(Protocol):
    """Reaches the actors of other nodes for one incarnation of a node. Dialing raises as a link's does."""

    async def listen(self, accept: Callable[[Link], None]) -> str:
        """Take links from now on; the address to dial."""
        ...

    async def dial(self, address: str) -> Link:
        """A link to whoever listens there."""
        ...

    async def dial_route(self, route: Route) -> Link:
        """A link to a process of the cluster, as its client."""
        ...

    async def close(self) -> None:
        """Take no more links. Idempotent."""
        ...


MakeActorEndpoint: TypeAlias = Callable[[Node], ActorEndpoint]


class TcpActorEndpoint:
    """By TCP, on the host that the node is reached at."""

    def __init__(self, me: Node, cookie: bytes, settings: TcpSettings, deadlines: Deadlines) -> None:
        self._host = parse_address(me.address).host
        identity = Identity(
            name=process_name(me.id),
            pid=os.getpid(),
            uid=os.getuid(),
            incarnation=me.key.incarnation,
            contracts=fingerprints(),
        )
        self._endpoint = Endpoint(identity=identity, cookie=cookie, deadlines=deadlines)
        self._dialer = ExternalDialer(identity.name, identity.incarnation, 0, cookie, settings, deadlines)
        self._settings = settings
        self._listener: tcp.TcpListener | None = None

    async def listen(self, accept: Callable[[Link], None]) -> str:
        """See `ActorEndpoint`."""
        where = TcpAddress(host=self._host, port=0)
        self._listener = await tcp.listen(where, accept, self._endpoint, settings=self._settings)
        return str(TcpAddress(host=self._host, port=self._listener.address.port))

    async def dial(self, address: str) -> Link:
        """See `ActorEndpoint`."""
        return await tcp.dial(address, self._endpoint, settings=self._settings)

    async def dial_route(self, route: Route) -> Link:
        """See `ActorEndpoint`."""
        return await self._dialer.dial(route)

    async def close(self) -> None:
        """See `ActorEndpoint`."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()


class NodeActors:
    """A node's actors over all its incarnations: a `ClusterListener`. Use on the port's loop; `close` it.

    start: called once in each incarnation, when the node has become a member; if it raises, `failed` does.
    endpoint: how each incarnation reaches the others; None: by TCP, with `cookie` and `settings`. linked:
    whether all nodes whose actors are linked share names and groups with this one; else it is reached, and
    reaches others, on demand. on_listening: told where the actors of each incarnation listen.
    """

    def __init__(
        self,
        port: ClusterPort,
        *,
        cookie: bytes,
        settings: TcpSettings | None = None,
        deadlines: Deadlines | None = None,
        start: Start | None = None,
        endpoint: MakeActorEndpoint | None = None,
        linked: bool = True,
        on_listening: Callable[[str], None] | None = None,
    ) -> None:
        self.finder = ClusterRoutes(self._where)
        """The routes to processes that this node knows, through all its incarnations."""
        self._port = port
        self._linked = linked
        self._on_listening = on_listening
        self._endpoint: MakeActorEndpoint = endpoint or partial(
            TcpActorEndpoint,
            cookie=cookie,
            settings=settings or TcpSettings(),
            deadlines=deadlines or derive(),
        )
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._incarnation: _IncarnationActors | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        port.listen(self)

    @property
    def system(self) -> ActorSystem | None:
        """The actor system of this incarnation; None while the node is in no cluster."""
        return None if self._incarnation is None else self._incarnation.system

    async def failed(self) -> None:
        """Raise what `start`, or the listener of an incarnation, has raised, once that has happened."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """End all actors and links. Idempotent."""
        self._end("the node ends")
        if self._ending:
            await asyncio.wait(self._ending)
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # nobody need have asked

    # -- `ClusterListener` -------------------------------------------------------------------------------

    def began(self, me: Node) -> None:
        """See `ClusterListener`."""
        self._end("another incarnation begins")
        self._incarnation = _IncarnationActors(
            me, self._port, self._endpoint(me), self._start, self._fail, self
        )

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """See `ClusterListener`."""
        self.finder.acts_on(view, reason)
        if self._incarnation is not None:
            self._incarnation.acts_on(view, reason)

    def received(self, sender: NodeKey, message: Contract) -> None:
        """See `ClusterListener`."""
        if self._incarnation is None:
            return
        match message:
            case ActorsAt(address=address):
                self._incarnation.address_learned(sender, address)
            case ActorsWanted():
                self._incarnation.say_where(sender)
            case _:
                pass  # for others who listen

    def stopped(self, reason: str) -> None:
        """See `ClusterListener`."""
        self.finder.acts_on(NO_VIEW, reason)
        self._end(reason)

    def listening(self, address: str) -> None:
        """The actors of this incarnation listen there."""
        if self._on_listening is not None:
            self._on_listening(address)

    @property
    def linked(self) -> bool:
        """Whether the actors of all nodes are linked."""
        return self._linked

    async def _where(self, key: NodeKey) -> str:
        return "" if self._incarnation is None else await self._incarnation.where(key)

    def _end(self, reason: str) -> None:
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is not None:
            self.listening("")
            task = self._loop.create_task(incarnation.close(reason), name="end of a node's actors")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


class _IncarnationActors:
    """The actors of one incarnation, and their links."""

    def __init__(
        self,
        me: Node,
        port: ClusterPort,
        endpoint: ActorEndpoint,
        start: Start | None,
        fail: Callable[[BaseException], None],
        node: NodeActors,
    ) -> None:
        self.system = ActorSystem(process_name(me.id), me.key.incarnation)
        self._node = node
        self._routes = Routes(self.system, node.finder, endpoint.dial_route, leads_to=self._leads_to)
        self._code = CodeKeeper(self.system, lambda name: node_key(name, 1) is not None)
        self._directory = self.system.open_directory(alone=False)
        self._me = me
        self._port = port
        self._endpoint = endpoint
        self._start = start
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._members: dict[NodeKey, Node] = {}
        self._dials: dict[NodeKey, asyncio.Task[None]] = {}
        self._wheres: dict[NodeKey, asyncio.Future[str]] = {}
        """The addresses of members' actors, known or to come."""
        self._announcing: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._address = ""
        self._closed = False
        self._listening = self._loop.create_task(self._listen(), name="listen for actors")
        self._listening.add_done_callback(self._ran)

    def _leads_to(self, process: str) -> bool:
        is_node = node_key(process, 1) is not None
        return is_global(process) and not (is_node and self._node.linked)

    async def where(self, key: NodeKey) -> str:
        """Return where the actors of a member listen; empty if it does not say in time."""
        if key == self._me.key:
            return self._address
        known = self._wheres.setdefault(key, self._loop.create_future())
        for _ in range(ASKS_MAX):
            if known.done():
                break
            self._port.send(key, ActorsWanted())
            await asyncio.wait([known], timeout=ANNOUNCE_S)
        return known.result() if known.done() else ""

    def say_where(self, key: NodeKey) -> None:
        """Tell a member where ours listen."""
        if self._address and key in self._members:
            self._port.send(key, ActorsAt(self._address))

    def acts_on(self, view: ClusterView, reason: str) -> None:
        if len(view.nodes) > ACTOR_NODES_MAX:
            log.error("too many nodes to link the actors of all", nodes=len(view.nodes), most=ACTOR_NODES_MAX)
            return
        self._members = {node.key: node for node in view.nodes}
        self._wheres = {key: where for key, where in self._wheres.items() if key in self._members}
        if not self._node.linked:
            return
        present = {(process_name(key.id), key.incarnation) for key in self._members}
        for process in [process for process in self.system.peers.items() if process not in present]:
            lost = f"node lost: the cluster goes on without it in view {view.epoch} ({reason})"
            self.system.detach(process[0], lost)
        for key in [key for key in self._dials if key not in self._members]:
            self._dials[key].cancel()
        self._directory.enter(view.epoch, sorted(present))
        self._announce()
        if self._start is not None and self._starting is None:
            self._starting = self._loop.create_task(self._run_start(self._start), name="start of actors")
            self._starting.add_done_callback(self._ran)

    def address_learned(self, sender: NodeKey, address: str) -> None:
        """A member tells where its actors listen; the higher key dials."""
        waiting = self._wheres.get(sender)
        if waiting is not None and not waiting.done():
            waiting.set_result(address)
        fits = self._node.linked and sender in self._members and sender < self._me.key
        if self._closed or not fits or self._is_linked(sender) or sender in self._dials:
            return
        self._dials[sender] = self._loop.create_task(self._dial(sender, address), name=f"dial {sender}")

    async def close(self, reason: str) -> None:
        """Kill all actors, and end all links."""
        self._closed = True
        if self._announcing is not None:
            self._announcing.cancel()
        tasks = [self._listening, *self._dials.values(), *([self._starting] if self._starting else [])]
        for task in tasks:
            task.cancel()
        log.debug("the actors of an incarnation end", node=str(self._me), reason=reason)
        await self.system.stop(timeout=0.0)
        await asyncio.wait(tasks)
        await self._endpoint.close()

    def _ran(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            self._fail(error)

    async def _run_start(self, start: Start) -> None:
        await start(self.system)

    async def _listen(self) -> None:
        await self.system.spawn(RoutesActor, self._node.finder, name=ROUTES_ACTOR)
        await self.system.spawn(Inside, name=INSIDE_ACTOR)
        await self._code.open()
        self._address = await self._endpoint.listen(self._accepted)
        if not self._closed:
            self._node.listening(self._address)
        self._announce()

    def _is_linked(self, key: NodeKey) -> bool:
        return self.system.peers.get(process_name(key.id)) == key.incarnation

    def _announce(self) -> None:
        """Tell those where we are that should dial us and have not, until they do."""
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None
        waited = [key for key in self._members if key > self._me.key and not self._is_linked(key)]
        if self._closed or not self._address or not waited or not self._node.linked:
            return
        for key in waited:
            self._port.send(key, ActorsAt(self._address))
        self._announcing = self._loop.call_later(ANNOUNCE_S, self._announce)

    async def _dial(self, key: NodeKey, address: str) -> None:
        try:
            link = await self._endpoint.dial(address)
        except (ZbmdError, UserError, OSError) as error:
            log.info(
                "actors of a node not reached; it will say again where", node=str(key), reason=str(error)
            )
            return
        finally:
            del self._dials[key]
        self._take(link, key if node_key(link.peer.name, link.peer.incarnation) == key else None)

    def _accepted(self, link: Link) -> None:
        if MARK in link.peer.name:
            self._routes.accepted(link)
            return
        key = node_key(link.peer.name, link.peer.incarnation)
        self._take(link, key if key is not None and key > self._me.key else None)

    def _take(self, link: Link, key: NodeKey | None) -> None:
        """Put a link to a member's actors to use; it takes the place of one whose end we have not seen."""
        if key is None or key not in self._members or self._closed:
            log.warning("link to actors closed: not of a member", name=link.peer.name)
            link.close()
            return
        if self._is_linked(key):
            self.system.detach(link.peer.name, "it has made another link")
        try:
            self.system.attach(link, on_closed=partial(self._ended, key))
        except ZbmdError as error:
            log.warning("link to actors not taken", node=str(key), reason=str(error))
            link.close()

    def _ended(self, key: NodeKey, error: ZbmdError | None) -> None:
        log.debug("link to actors ended", node=str(key), reason=str(error))
        if key in self._members and not self._closed:
            self._loop.call_soon(self._announce)
