"""Connections of heartbeats to each peer: a TCP stripe beside a link, and RDMA where both ends have it.

Stripes are opened beside links that we dialed, and accepted beside links that peers dialed. By RDMA each beat
is written into the observer's memory: `route_machine` decides for each peer, in messages over the peer's
link; the driver here makes the queue pairs and hands them to the native thread. Without a device it only
states why.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import structlog

from zbmd.actors.cluster.contracts import BeatsAt, BeatsSaid
from zbmd.actors.cluster.heartbeats import route_machine as w
from zbmd.actors.cluster.heartbeats.driver import WAY_LABEL, Heartbeats, beat_keys
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.rank.remote_links import wanted_devices, why_not_rdma
from zbmd.transport.bulk.stripe_io import Stripe
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.host.link_choice import LINK_LOCKED_BYTES, rdma_paths
from zbmd.transport.host.topology import HostFacts, read_host_facts
from zbmd.transport.identity import Side
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.secure.protection import STRIPES_MAX, Keys, Protection, Session
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.link import TcpLink

if TYPE_CHECKING:
    from zbmd.transport.rdma.native._rdma_beat import BeatEnd
    from zbmd.transport.rdma.native._rdma_device import Device
    from zbmd.transport.rdma.plane import PortAt


REASONS_MAX: Final = 64
"""Reasons kept so that none is logged twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevice:
    """The RDMA device of a node's heartbeats."""

    device: Device
    port: PortAt


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDevice:
    """The node has no device. why: one line for both hosts; tells: whether peers get a report."""

    why: str
    tells: bool


NO_DEVICE: Final = NoDevice(why="this node has no RDMA device", tells=False)


def own_device(environment: Mapping[str, str], protection: Protection) -> OwnDevice | NoDevice:
    """Open the best device, if RDMA is wanted and available. Raises `UserError` on an invalid setting."""
    facts, wanted = read_host_facts(), wanted_devices(environment)
    why = why_not_rdma(facts, environment, wanted, protection, locked_bytes=LINK_LOCKED_BYTES)
    if why is not None:
        return NoDevice(why=why, tells=bool(facts.rdma_devices))
    from zbmd.transport.rdma.native._rdma_device import Device
    from zbmd.transport.rdma.plane import choose_port

    path = rdma_paths(facts, wanted)[0]
    try:
        device = Device(path.device)
        return OwnDevice(device=device, port=choose_port(device, path.address))
    except UserError as error:
        return NoDevice(why=_on(facts, error), tells=True)


def _on(facts: HostFacts, error: UserError) -> str:
    return f"{facts.name}: {error}"


@dataclass(slots=True)
class _Peer:
    """A peer that has or had a heartbeat connection."""

    machine: w.HeartbeatRoute
    keys: Keys | None = None
    """The keys of the route."""
    end: BeatEnd | None = None
    psn: int = 0


class RdmaHeartbeats:
    """The RDMA routes of one incarnation. say: sends a peer a message. Use on the incarnation's loop."""

    def __init__(
        self, beats: Heartbeats, own: OwnDevice | NoDevice, say: Callable[[NodeKey, BeatsSaid], None]
    ) -> None:
        self._beats = beats
        self._own = own
        self._say = say
        self._peers: dict[NodeKey, _Peer] = {}
        self._told: set[tuple[bool, str]] = set()

    def stripe_stands(self, key: NodeKey, stripe: Session, control: Session) -> None:
        """Beats with this peer use this stripe; control: the session of its link."""
        peer = self._peer(key)
        peer.keys = beat_keys(control, stripe, WAY_LABEL)
        self._feed(key, w.ConnectionUp(lane=stripe.session_id, offers=stripe.side is Side.DIALER))

    def stripe_ended(self, key: NodeKey) -> None:
        """The peer's stripe ended."""
        if key in self._peers:
            self._feed(key, w.ConnectionDown())

    def forget(self, key: NodeKey) -> None:
        """The last link to this incarnation ended."""
        self.stripe_ended(key)
        self._peers.pop(key, None)

    def received(self, key: NodeKey, what: BeatsSaid) -> None:
        """A message of the peer arrived."""
        self._peer(key)
        self._feed(key, w.PeerMessage(what=what))

    def failed(self, key: NodeKey, reason: str) -> None:
        """The native thread stopped using the route."""
        peer = self._peers.get(key)
        if peer is not None and peer.end is not None:
            status = f" (status {peer.end.status})" if peer.end.status else ""
            self._feed(key, w.RouteFailed(why=f"the RDMA connection failed: {reason}{status}"))

    def by_rdma(self) -> frozenset[NodeKey]:
        """Return the peers with RDMA heartbeats in both directions."""
        return frozenset(
            key for key, peer in self._peers.items() if peer.machine.state is w.RouteState.BOTH_WAYS
        )

    def close(self) -> None:
        """Release every endpoint, after the heartbeats are closed. Idempotent."""
        for key in list(self._peers):
            self.forget(key)

    def _peer(self, key: NodeKey) -> _Peer:
        peer = self._peers.get(key)
        if peer is None:
            own = self._own
            machine = (
                w.HeartbeatRoute(why_not=own.why, tells=own.tells)
                if isinstance(own, NoDevice)
                else w.HeartbeatRoute(why_not=None)
            )
            peer = self._peers[key] = _Peer(machine)
        return peer

    def _feed(self, key: NodeKey, event: w.Event) -> None:
        peer = self._peers[key]
        actions = peer.machine.handle(event)
        peer.machine.check_invariants()
        for action in actions:
            self._perform(key, peer, action)

    def _perform(self, key: NodeKey, peer: _Peer, action: w.Action) -> None:
        match action:
            case w.MakeEndpoint():
                self._feed(key, self._made(peer))
            case w.Connect(to=to):
                self._feed(key, self._connected(key, peer, to))
            case w.SendByRdma():
                self._beats.use_way(key)
            case w.DropEndpoint():
                end, peer.end = peer.end, None
                self._beats.drop_way(key)
                if end is not None:
                    end.close()
            case w.SendToPeer(what=what):
                self._say(key, what)
            case w.RouteChosen(rdma=rdma, reason=reason):
                self._tell(key, rdma, reason)
            case _:
                assert_never(action)

    def _made(self, peer: _Peer) -> w.EndpointMade | w.RouteFailed:
        from zbmd.transport.rdma.native._rdma_beat import BeatEnd

        assert isinstance(self._own, OwnDevice)
        try:
            end = peer.end = BeatEnd(self._own.device)
        except UserError as error:
            return w.RouteFailed(why=str(error))
        peer.psn = secrets.randbits(24)
        at = self._own.port.queue_pair(end.number, peer.psn)
        return w.EndpointMade(at=BeatsAt(at=at, address=end.address, key=end.key))

    def _connected(self, key: NodeKey, peer: _Peer, to: BeatsAt) -> w.Connected | w.RouteFailed:
        assert isinstance(self._own, OwnDevice) and peer.end is not None and peer.keys is not None
        path = self._own.port.path_to(to.at, peer.psn)
        try:
            peer.end.connect(path, address=to.address, key=to.key)
        except UserError as error:
            return w.RouteFailed(why=str(error))
        if not self._beats.add_way(key, peer.end.way, peer.keys):
            return w.RouteFailed(why="its heartbeat connection ended")
        return w.Connected()

    def _tell(self, key: NodeKey, rdma: bool, reason: str) -> None:
        """Log each reason once."""
        if (rdma, reason) in self._told:
            return
        if len(self._told) == REASONS_MAX:
            self._told.clear()
        self._told.add((rdma, reason))
        log.info("heartbeat route chosen", to=str(key), by="rdma" if rdma else "tcp", reason=reason)


log: Final = structlog.stdlib.get_logger("zbmd.cluster")


@dataclass(slots=True)
class _Dialed:
    """A link that we dialed. stripes: side connections opened so far; each has its own number."""

    link: TcpLink
    stripes: int = 0
    opening: asyncio.Task[None] | None = None


class HeartbeatConnections:
    """Keeps one heartbeat connection to every peer that this node watches, or that watches it."""

    def __init__(self, beats: Heartbeats, rdma_routes: RdmaHeartbeats, endpoint: Endpoint) -> None:
        self._beats = beats
        self._rdma_routes = rdma_routes
        self._endpoint = endpoint
        self._dialed: dict[NodeKey, _Dialed] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False

    def linked(self, key: NodeKey, link: TcpLink) -> None:
        """A link to this incarnation is up."""
        link.on_stripe = partial(self._accept, key, link)
        if link.dialed is not None:
            self._dialed[key] = _Dialed(link)
            self.open_missing()

    def unlinked(self, key: NodeKey) -> None:
        """The last link to this incarnation ended: drop its connection as well."""
        self._dialed.pop(key, None)
        self._beats.drop_stripe(key)

    def open_missing(self) -> None:
        """Open the missing connections; call it periodically.

        A link has a bounded number of side connections. Once they are used up, the link is closed and
        redialed.
        """
        for key in self._beats.lacking() if not self._closed else ():
            dialed = self._dialed.get(key)
            if dialed is None or dialed.opening is not None or dialed.link.closed:
                continue
            if dialed.stripes == STRIPES_MAX:
                log.warning(
                    "heartbeat connections keep failing; closing the link to redial it", peer=str(key)
                )
                dialed.link.close()
                continue
            task = asyncio.get_running_loop().create_task(self._open(key, dialed), name=f"stripe to {key}")
            dialed.opening = task
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        """Stop opening connections. Idempotent."""
        self._closed = True
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(self._opening)

    async def _open(self, key: NodeKey, dialed: _Dialed) -> None:
        number, dialed.stripes = dialed.stripes, dialed.stripes + 1
        try:
            stripe = await tcp.open_stripe(dialed.link, number, self._endpoint)
        except (ZbmdError, OSError) as error:
            log.debug("heartbeat connection failed", peer=str(key), reason=str(error))
            return
        finally:
            dialed.opening = None
        self._adopt(key, dialed.link, stripe)

    def _accept(self, key: NodeKey, link: TcpLink, stripe: Stripe) -> None:
        self._adopt(key, link, stripe)

    def _adopt(self, key: NodeKey, link: TcpLink, stripe: Stripe) -> None:
        if self._closed or link.closed:
            stripe.sock.close()
        elif self._beats.adopt(key, stripe, link.session):
            self._rdma_routes.stripe_stands(key, stripe.session, link.session)
