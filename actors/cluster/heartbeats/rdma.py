"""Ways for heartbeats by RDMA: each beat is written into the memory of who observes. Decides nothing.

`route_machine` decides of each peer, over the link that its lane has; this makes the queue pairs, and gives
them to the native thread that beats. Without a device it only tells why.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

import structlog

from zbmd.actors.cluster.heartbeats import route_machine as w
from zbmd.actors.cluster.heartbeats.contracts import BeatsAt, BeatsSaid
from zbmd.actors.cluster.heartbeats.driver import WAY_LABEL, Heartbeats, beat_keys
from zbmd.actors.cluster.node_id import NodeKey
from zbmd.actors.rank.rdma_choice import wanted_devices, why_not_rdma
from zbmd.transport.errors import UserError
from zbmd.transport.host.facts import HostFacts, read_host_facts
from zbmd.transport.host.rdma_device_choice import LINK_LOCKED_BYTES, rdma_paths
from zbmd.transport.identity import Side
from zbmd.transport.secure.session_keys import Keys, Protection, Session

if TYPE_CHECKING:
    from zbmd.transport.rdma.native._rdma_beat import BeatEnd
    from zbmd.transport.rdma.native._rdma_device import Device
    from zbmd.transport.rdma.port import PortAt

log: Final = structlog.stdlib.get_logger("zbmd.cluster")

REASONS_MAX: Final = 64
"""Kept, so that none is told twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevice:
    """What a node's heartbeats go by."""

    device: Device
    port: PortAt


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDevice:
    """A node has none. why: in a line that makes sense on both hosts; tells: and its peers are to know."""

    why: str
    tells: bool


NO_DEVICE: Final = NoDevice(why="this node was given no RDMA device", tells=False)


def own_device(environment: Mapping[str, str], protection: Protection) -> OwnDevice | NoDevice:
    """Open the best device, if RDMA is wanted and there is one. Raises `UserError` on a setting of no use."""
    facts, wanted = read_host_facts(), wanted_devices(environment)
    why = why_not_rdma(facts, environment, wanted, protection, locked_bytes=LINK_LOCKED_BYTES)
    if why is not None:
        return NoDevice(why=why, tells=bool(facts.rdma_devices))
    from zbmd.transport.rdma.native._rdma_device import Device
    from zbmd.transport.rdma.port import choose_port

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
    """One that has a lane, or has had one."""

    machine: w.BeatWay
    keys: Keys | None = None
    """Of the way beside its lane."""
    end: BeatEnd | None = None
    psn: int = 0


class RdmaBeats:
    """The ways of one life. say: tells a peer something. Use on the life's loop."""

    def __init__(
        self, beats: Heartbeats, own: OwnDevice | NoDevice, say: Callable[[NodeKey, BeatsSaid], None]
    ) -> None:
        self._beats = beats
        self._own = own
        self._say = say
        self._peers: dict[NodeKey, _Peer] = {}
        self._told: set[tuple[bool, str]] = set()

    def lane_stands(self, key: NodeKey, lane: Session, control: Session) -> None:
        """Beats with this peer go over this lane; control: the session of its link."""
        peer = self._peer(key)
        peer.keys = beat_keys(control, lane, WAY_LABEL)
        self._feed(key, w.LaneStands(lane=lane.session_id, offers=lane.side is Side.DIALER))

    def lane_ended(self, key: NodeKey) -> None:
        """They do not any more."""
        if key in self._peers:
            self._feed(key, w.LaneEnded())

    def forget(self, key: NodeKey) -> None:
        """There is no link to this life any more."""
        self.lane_ended(key)
        self._peers.pop(key, None)

    def said(self, key: NodeKey, what: BeatsSaid) -> None:
        """The peer has said this."""
        self._peer(key)
        self._feed(key, w.Said(what=what))

    def failed(self, key: NodeKey, reason: str) -> None:
        """The native thread uses this way no more."""
        peer = self._peers.get(key)
        if peer is not None and peer.end is not None:
            status = f" (status {peer.end.status})" if peer.end.status else ""
            self._feed(key, w.Failed(why=f"the RDMA connection failed: {reason}{status}"))

    def by_rdma(self) -> frozenset[NodeKey]:
        """The peers whose beats go by RDMA, and ours to them."""
        return frozenset(key for key, peer in self._peers.items() if peer.machine.state is w.State.BOTH_WAYS)

    def close(self) -> None:
        """Give every end back. Idempotent; the heartbeats have been closed."""
        for key in list(self._peers):
            self.forget(key)

    def _peer(self, key: NodeKey) -> _Peer:
        peer = self._peers.get(key)
        if peer is None:
            own = self._own
            machine = (
                w.BeatWay(why_not=own.why, tells=own.tells)
                if isinstance(own, NoDevice)
                else w.BeatWay(why_not=None)
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
            case w.Make():
                self._feed(key, self._made(peer))
            case w.Connect(to=to):
                self._feed(key, self._connected(key, peer, to))
            case w.Use():
                self._beats.use_way(key)
            case w.Drop():
                end, peer.end = peer.end, None
                self._beats.drop_way(key)
                if end is not None:
                    end.close()
            case w.Say(what=what):
                self._say(key, what)
            case w.Chosen(rdma=rdma, reason=reason):
                self._tell(key, rdma, reason)
            case _:
                assert_never(action)

    def _made(self, peer: _Peer) -> w.Made | w.Failed:
        from zbmd.transport.rdma.native._rdma_beat import BeatEnd

        assert isinstance(self._own, OwnDevice)
        try:
            end = peer.end = BeatEnd(self._own.device)
        except UserError as error:
            return w.Failed(why=str(error))
        peer.psn = secrets.randbits(24)
        at = self._own.port.queue_pair(end.number, peer.psn)
        return w.Made(at=BeatsAt(at=at, address=end.address, key=end.key))

    def _connected(self, key: NodeKey, peer: _Peer, to: BeatsAt) -> w.Connected | w.Failed:
        assert isinstance(self._own, OwnDevice) and peer.end is not None and peer.keys is not None
        path = self._own.port.path_to(to.at, peer.psn)
        try:
            peer.end.connect(path, address=to.address, key=to.key)
        except UserError as error:
            return w.Failed(why=str(error))
        if not self._beats.add_way(key, peer.end.way, peer.keys):
            return w.Failed(why="its lane has ended")
        return w.Connected()

    def _tell(self, key: NodeKey, rdma: bool, reason: str) -> None:
        """Once for each reason: it is one of this host, or of a few others."""
        if (rdma, reason) in self._told:
            return
        if len(self._told) == REASONS_MAX:
            self._told.clear()
        self._told.add((rdma, reason))
        log.info("heartbeats chosen", to=str(key), by="rdma" if rdma else "tcp", reason=reason)
