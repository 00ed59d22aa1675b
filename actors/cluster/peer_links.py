"""The links of one incarnation of a node: kept to the peers it beats with, dialed on demand to others.

A link belongs to one incarnation at either end: a message for another incarnation of the peer is never sent
on it. Two nodes that dial each other at the same time have two links; both then send on the one that the
lower key dialed, so the other falls idle and is dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final, Protocol

import msgspec
import structlog

from zbmd.actors.cluster.contracts import PROTOCOL_VERSION, Hail, NotUnderstood, decode
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.errors import UnknownContract
from zbmd.transport.errors import LinkClosed, LinkFull, RemoteProtocolError, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpSettings
from zbmd.transport.tcp.link import TcpLink

# Fragments: a message may be larger than a frame, as a view with many jobs is. Its parts follow one another
# on one link, though other messages may come in between. A message that was dropped halfway for want of room
# is forgotten when the next one begins.

PART_BYTES: Final = 1 << 19
MESSAGE_BYTES_MAX: Final = 8 << 20
"""Also what may wait for room in a link: so a message fits into one that is empty."""
PARTS_MAX: Final = MESSAGE_BYTES_MAX // PART_BYTES


class Part(Contract, id="zbmd.cluster.part"):
    """Bytes of another contract. index: which of `count` parts, from 0."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=PARTS_MAX)]
    count: Annotated[int, msgspec.Meta(ge=2, le=PARTS_MAX)]
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PART_BYTES)]


def frames_of(encoded: bytes) -> list[bytes]:
    """The payloads of frames for an encoded contract; none if it is over `MESSAGE_BYTES_MAX`."""
    if len(encoded) <= PART_BYTES:
        return [encoded]
    if len(encoded) > MESSAGE_BYTES_MAX:
        return []
    cut = [encoded[at : at + PART_BYTES] for at in range(0, len(encoded), PART_BYTES)]
    parts = [Part(index=index, count=len(cut), data=data) for index, data in enumerate(cut)]
    return [msgspec.msgpack.encode(part) for part in parts]


class Assembly:
    """The message that comes in parts over one link. Holds `MESSAGE_BYTES_MAX` bytes at most."""

    def __init__(self) -> None:
        self._count = 0
        self._parts: list[bytes] = []

    def take(self, part: Part) -> bytes | None:
        """The whole message, with its last part. Raises `RemoteProtocolError` on one out of its turn."""
        if part.index == 0:
            self._count, self._parts = part.count, []
        if (part.index, part.count) != (len(self._parts), self._count):
            raise RemoteProtocolError(
                f"part {part.index} of {part.count} where {len(self._parts)} of {self._count} is next"
            )
        self._parts.append(part.data)
        if len(self._parts) < self._count:
            return None
        whole = b"".join(self._parts)
        self._count, self._parts = 0, []
        return whole


log: Final = structlog.stdlib.get_logger("zbmd.cluster")

ROUTES_MAX: Final = 4096
"""Incarnations of nodes that a node has links to, or wants to have."""
WIRES_MAX: Final = 4
"""Links to one incarnation. One is enough; two come of dialing each other at once."""
PENDING_MAX: Final = 64
"""Messages that wait for a link to be dialed; the oldest goes for one more."""
DIALS_MAX: Final = 64
"""At once."""
DIAL_PAUSE_NS_MAX: Final = 1_000_000_000
"""From a dial that failed to the next, doubled with each."""
IDLE_BUDGETS: Final = 10
"""A link that was not used for so many recovery budgets is dropped, if it is not one to be kept."""

_NODE_NAME: Final = re.compile(r"node([1-9]\d{0,18})")


def process_name(node_id: int) -> str:
    """Return the process name of a node, as it appears in the handshake."""
    return f"node{node_id}"


def node_key(name: str, incarnation: int) -> NodeKey | None:
    """Return the incarnation that a process name stands for; None if it is not a node's."""
    found = _NODE_NAME.fullmatch(name)
    return NodeKey(int(found[1]), incarnation) if found is not None and incarnation > 0 else None


class LinkHandler(Protocol):
    """Handles what links bring. Called on the incarnation's loop; must not block."""

    def hail(self) -> Hail:
        """Return the first message of a link."""
        ...

    def hailed(self, key: NodeKey, hail: Hail, link: TcpLink) -> None:
        """A link to this incarnation is up."""
        ...

    def sent(self, key: NodeKey) -> None:
        """A frame was handed to a link to this incarnation."""
        ...

    def received(self, sender: Node, contract: Contract) -> None:
        """A message of a node arrived. Raises `RemoteProtocolError` to end its link."""
        ...

    def ended(self, key: NodeKey, reason: str) -> None:
        """The last link to this incarnation ended, or no link can be made."""
        ...

    def superseded(self, key: NodeKey) -> None:
        """This incarnation is over: a newer one of the same node connected."""
        ...

    def visited(self, link: TcpLink) -> None:
        """A process that is not a node connected; the handler owns the link."""
        ...


@dataclass(slots=True, eq=False)
class _Wire:
    """One link to an incarnation."""

    link: TcpLink
    preferred: bool
    used_ns: int
    hail: Hail | None = None
    assembly: Assembly = field(default_factory=Assembly)


@dataclass(slots=True, eq=False)
class _Route:
    """The route to one incarnation, or to whichever node listens at an address."""

    to: Node
    wires: list[_Wire] = field(default_factory=list[_Wire])
    pending: deque[Contract] = field(default_factory=lambda: deque[Contract](maxlen=PENDING_MAX))
    dialing: asyncio.Task[None] | None = None
    failures: int = 0
    not_before_ns: int = 0
    used_ns: int = 0
    why: str = ""


class PeerLinks:
    """All links of one incarnation. Use on its loop."""

    def __init__(self, me: NodeKey, endpoint: Endpoint, settings: TcpSettings, handler: LinkHandler) -> None:
        self.dropped = 0
        """Messages dropped for want of room or of a route."""
        self._me = me
        self._endpoint = endpoint
        self._settings = settings
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._routes: dict[NodeKey, _Route] = {}
        self._doors: dict[str, _Route] = {}
        self._kept: frozenset[NodeKey] = frozenset()
        self._dials: set[asyncio.Task[None]] = set()
        self._idle_ns = IDLE_BUDGETS * endpoint.deadlines.recovery_budget_ns
        self._closed = False

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, to: Node, contract: Contract) -> bool:
        """Send to one incarnation of a node, or with incarnation 0 to whichever node listens at its address.

        Dials if there is no link. Returns whether a link took the message now. Messages that find no room are
        dropped: senders repeat what matters.
        """
        route = self._route(to)
        if route is None or self._closed:
            self.dropped += 1
            return False
        wire = self._wire(route)
        if wire is not None:
            return self._put(route, wire, contract)
        if len(route.pending) == PENDING_MAX:
            self.dropped += 1
        route.pending.append(contract)
        self._dial(route)
        return False

    def keep(self, peers: Iterable[Node]) -> None:
        """Keep links to these peers; other links are closed once they fall idle."""
        nodes = tuple(peers)
        self._kept = frozenset(node.key for node in nodes)
        for node in nodes:
            route = self._route(node)
            if route is not None and not route.wires:
                self._dial(route)

    def sweep(self) -> None:
        """Close idle links and redial kept ones. Call it periodically."""
        at_ns = now_ns()
        for key, route in list(self._routes.items()):
            best = self._wire(route)
            for wire in list(route.wires):
                spare = wire is not best or key not in self._kept
                if spare and at_ns - wire.used_ns > self._idle_ns:
                    wire.link.close()
            if key in self._kept:
                if not route.wires:
                    self._dial(route)
            elif not route.wires and route.dialing is None and at_ns - route.used_ns > self._idle_ns:
                del self._routes[key]
        for address, route in list(self._doors.items()):
            if route.dialing is None and at_ns - route.used_ns > self._idle_ns:
                del self._doors[address]

    async def flush(self) -> None:
        """Wait, for a bounded time, until queued frames are written."""
        wires = [wire.link for route in self._routes.values() for wire in route.wires]
        flushing = [self._loop.create_task(_flush(link)) for link in wires]
        if flushing:
            _, late = await asyncio.wait(flushing, timeout=self._endpoint.deadlines.flush_ns / 1e9)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def close(self) -> None:
        """Close every link and cancel every dial. Idempotent."""
        self._closed = True
        for task in self._dials:
            task.cancel()
        if self._dials:
            await asyncio.wait(self._dials)
        for route in [*self._routes.values(), *self._doors.values()]:
            for wire in list(route.wires):
                wire.link.close()
        self._routes.clear()
        self._doors.clear()

    # -- how it stands -----------------------------------------------------------------------------------

    def links(self, key: NodeKey) -> tuple[int, int, str]:
        """Return how many links to an incarnation we dialed and it dialed, and why there is none."""
        route = self._routes.get(key)
        if route is None:
            return 0, 0, ""
        dialed = sum(1 for wire in route.wires if wire.link.dialed is not None)
        return dialed, len(route.wires) - dialed, "" if route.wires else route.why

    # -- links that stand --------------------------------------------------------------------------------

    def accepted(self, link: TcpLink) -> None:
        """Take a link that a peer dialed."""
        key = node_key(link.peer.name, link.peer.incarnation)
        if self._closed:
            link.close()
        elif key is None:
            self._handler.visited(link)
        else:
            self._adopt(key, link)

    def _adopt(self, key: NodeKey, link: TcpLink) -> _Route | None:
        if key.id == self._me.id:
            what = "ourselves" if key == self._me else f"{key}: is its state directory a copy of ours?"
            log.warning(
                "closed the link of a node with our own id", peer=what, address=str(link.remote_address)
            )
            link.close()
            return None
        for other in [k for k in self._routes if k.id == key.id and k.incarnation < key.incarnation]:
            self._supersede(other)
        route = self._route(Node(key))
        if route is None or len(route.wires) >= WIRES_MAX:
            link.close()
            return None
        ours = link.dialed is not None
        wire = _Wire(link=link, preferred=ours == (self._me < key), used_ns=now_ns())
        route.wires.append(wire)
        route.failures, route.why = 0, ""
        link.on_closed = partial(self._ended, route, wire)
        link.on_frame = partial(self._on_frame, route, wire)
        self._put(route, wire, self._handler.hail())
        while route.pending and not link.closed:
            self._put(route, wire, route.pending.popleft())
        return route

    def _supersede(self, key: NodeKey) -> None:
        route = self._routes.pop(key)
        for wire in list(route.wires):
            wire.link.close()
        self._handler.superseded(key)

    def _ended(self, route: _Route, wire: _Wire, error: ZbmdError | None) -> None:
        route.wires.remove(wire)
        if self._closed or route.wires:
            return
        route.why = "it closed the link" if error is None else str(error)
        self._handler.ended(route.to.key, route.why)
        if route.to.key in self._kept:
            self._dial(route)

    def _on_frame(self, route: _Route, wire: _Wire, _: FrameHeader, payload: memoryview) -> None:
        wire.used_ns = now_ns()
        try:
            contract = _whole(wire, decode(payload))
        except UnknownContract as error:
            log.warning("unknown contract from a node", peer=str(route.to.key), reason=str(error))
            self._put(route, wire, NotUnderstood(text=str(error)[:1000]))
            return
        match contract:
            case None:
                pass
            case Hail():
                self._hailed(route, wire, contract)
            case NotUnderstood(text=text):
                log.warning("a node does not know our contract", peer=str(route.to.key), reason=text)
            case _ if wire.hail is None:
                raise RemoteProtocolError(f"{route.to.key} began with {contract_tag(contract)}, not a hail")
            case _:
                self._handler.received(wire.hail.node, contract)

    def _hailed(self, route: _Route, wire: _Wire, hail: Hail) -> None:
        key = route.to.key
        if hail.node.key != key:
            raise RemoteProtocolError(f"{key} calls itself {hail.node.key}")
        if hail.protocol != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"{key} (release {hail.release}) speaks version {hail.protocol} of the cluster's protocol, "
                f"we speak {PROTOCOL_VERSION}: run the same release of zbmd on all nodes"
            )
        wire.hail = hail
        route.to = hail.node
        self._handler.hailed(key, hail, wire.link)

    # -- dialing -----------------------------------------------------------------------------------------

    def _route(self, to: Node) -> _Route | None:
        known = self._routes.get(to.key) if to.key.incarnation else self._doors.get(to.address)
        if known is None:
            if len(self._routes) + len(self._doors) >= ROUTES_MAX:
                return None
            known = _Route(to=to)
            if to.key.incarnation:
                self._routes[to.key] = known
            else:
                self._doors[to.address] = known
        elif to.address and not known.to.address:
            known.to = to
        known.used_ns = now_ns()
        return known

    def _wire(self, route: _Route) -> _Wire | None:
        best: _Wire | None = None
        for wire in route.wires:
            if not wire.link.closed and (best is None or wire.preferred > best.preferred):
                best = wire
        return best

    def _put(self, route: _Route, wire: _Wire, contract: Contract) -> bool:
        frames = frames_of(msgspec.msgpack.encode(contract))
        if not frames:
            self.dropped += 1
            log.error("message too large; dropped", to=str(route.to.key), what=contract_tag(contract))
            return False
        try:
            for frame in frames:
                wire.link.send(frame)
        except (LinkFull, LinkClosed) as error:
            self.dropped += 1
            log.debug("not sent", to=str(route.to.key), what=contract_tag(contract), reason=str(error))
            return False
        wire.used_ns = now_ns()
        self._handler.sent(route.to.key)
        return True

    def _dial(self, route: _Route) -> None:
        busy = route.dialing is not None or len(self._dials) >= DIALS_MAX or self._closed
        if busy or not route.to.address or now_ns() < route.not_before_ns:
            return
        task = self._loop.create_task(self._dial_once(route), name=f"dial {route.to.address}")
        route.dialing = task
        self._dials.add(task)
        task.add_done_callback(partial(self._dialed, route))

    def _dialed(self, route: _Route, task: asyncio.Task[None]) -> None:
        self._dials.discard(task)
        route.dialing = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler({"message": "a dial failed", "exception": error, "task": task})

    async def _dial_once(self, route: _Route) -> None:
        to = route.to
        try:
            link = await tcp.dial(to.address, self._endpoint, settings=self._settings)
        except (ZbmdError, OSError) as error:
            if self._closed:
                return
            beat_ns = self._endpoint.deadlines.heartbeat_ns
            route.not_before_ns = now_ns() + min(DIAL_PAUSE_NS_MAX, beat_ns << min(route.failures, 10))
            route.failures += 1
            self.dropped += len(route.pending)
            route.pending.clear()
            if route.why != str(error):
                route.why = str(error)
                self._handler.ended(to.key, f"{to.address}: {error}")
            return
        key = node_key(link.peer.name, link.peer.incarnation)
        if key is None or self._closed:
            link.close()
            return
        waiting = list(route.pending)
        route.pending.clear()
        if key != to.key and to.key.incarnation:
            waiting = []  # for an incarnation that is absent
            if key.id == to.key.id and key.incarnation > to.key.incarnation and to.key in self._routes:
                self._supersede(to.key)
        found = self._adopt(key, link)
        if found is not None:
            for contract in waiting:
                self.send(found.to, contract)


def _whole(wire: _Wire, contract: Contract) -> Contract | None:
    """Return the message once all its parts arrived. Raises `RemoteProtocolError`, `UnknownContract`."""
    if not isinstance(contract, Part):
        return contract
    if wire.hail is None:
        raise RemoteProtocolError("it began with a part, not a hail")
    data = wire.assembly.take(contract)
    whole = None if data is None else decode(data)
    if isinstance(whole, Part | Hail):
        raise RemoteProtocolError(f"{contract_tag(whole)} never comes in parts")
    return whole


async def _flush(link: TcpLink) -> None:
    try:
        await link.flush()
    except LinkClosed:
        return
