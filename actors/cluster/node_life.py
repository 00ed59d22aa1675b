"""One life of a node: the machine, the detector and the heartbeats over real links. Decides nothing.

Runs on the loop of the cluster's thread (`node_thread`), where nothing else does: so heartbeats go out, and
are judged, whatever keeps the process's own loop busy.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, assert_never

import structlog

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.cluster_contracts import PROTOCOL_VERSION, Hail
from zbmd.actors.cluster.detector import Detector
from zbmd.actors.cluster.jobs import Order
from zbmd.actors.cluster.local_deaths import LocalDeaths, boot_id, pid_space, started
from zbmd.actors.cluster.members import ClusterView
from zbmd.actors.cluster.membership import ClusterMachine, State
from zbmd.actors.cluster.nodes import Node, NodeKey
from zbmd.actors.cluster.peer_links import PeerLinks
from zbmd.actors.cluster.witness import Given
from zbmd.actors.contracts import Contract
from zbmd.transport._native import now_ns
from zbmd.transport.endpoint import Endpoint
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.tcp_link import TcpLink
from zbmd.transport.tcp_settings import TcpSettings

log: Final = structlog.stdlib.get_logger("zbmd.cluster")

BEATS_SPARED_MAX: Final = 4
"""In a row, to one who was just sent something else."""
SWEEP_BEATS: Final = 20
"""Heartbeats from one look at idle links to the next."""


class LifeDesk(Protocol):
    """What a life tells. Called on its loop; must not block."""

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """Every member of this view knows it."""
        ...

    def told(self, sender: NodeKey, contract: Contract) -> None:
        """A node said something that is not about membership. Raises `RemoteProtocolError`."""
        ...

    def visited(self, link: TcpLink) -> None:
        """A process that is no node has linked with us; the link is the desk's."""
        ...


class Witness(Protocol):
    """What is asked which half of a view may go on. Used on the life's loop; must not block."""

    def want(self, epoch: int) -> None:
        """Half of a view wants to agree on the view of `epoch`."""
        ...

    def over(self, epoch: int) -> None:
        """The view of `epoch` is decided."""
        ...

    async def close(self) -> None:
        """Ask nothing any more."""
        ...


MakeWitness: TypeAlias = Callable[[NodeKey, int, Callable[[Given], None]], Witness]
"""Of who asks, after how many ns it asks again, and who takes the answers."""


@dataclass(slots=True)
class _Beaten:
    """What an observer was last told."""

    said: m.Beat | None = None
    spared: int = 0


class NodeLife:
    """From a key to the end of it. `over` is done with the reason."""

    def __init__(
        self,
        me: Node,
        endpoint: Endpoint,
        settings: TcpSettings,
        desk: LifeDesk,
        *,
        release: str,
        witness: MakeWitness | None = None,
    ) -> None:
        self.me = me
        self.machine = machine = ClusterMachine(me, endpoint.deadlines, witnessed=witness is not None)
        self._witness = None if witness is None else witness(me.key, machine.retry_ns, self._witness_gave)
        self.detector = Detector(endpoint.deadlines)
        self.links = PeerLinks(me.key, endpoint, settings, self)
        self.deaths = LocalDeaths(self._died)
        self.hails: dict[NodeKey, tuple[Hail, int]] = {}
        """Of lives that we have links to: how they began, and how far their wall clock was ahead, ns."""
        self.acting: ClusterView | None = None
        self.beats_sent = self.beats_spared = 0
        self._desk = desk
        self._release = release
        self._deadlines = endpoint.deadlines
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._beat_due_ns = 0
        self._beats = 0
        self._beaten: dict[NodeKey, _Beaten] = {}
        self._observers: tuple[Node, ...] = ()

    # -- its course --------------------------------------------------------------------------------------

    def found(self) -> None:
        """Begin as the only member of a new cluster."""
        self._feed(m.Found())
        self._start_beating()

    def enter(self, doors: tuple[Node, ...]) -> None:
        """Begin by knocking at these doors."""
        self._feed(m.Enter(doors=doors))
        self._start_beating()

    def leave(self) -> None:
        """Ask to be let go."""
        self._feed(m.LeaveRequested())

    def order(self, order: Order) -> None:
        """Ask for a command. Raises `CommandRefused`."""
        self._feed(m.Ordered(order=order))

    def tell(self, to: NodeKey, contract: Contract) -> None:
        """Say something to another member that is not about membership; dropped if that life is gone."""
        node = self.machine.view.by_id.get(to.id)
        if node is not None and node.key == to:
            self.links.send(node, contract)

    async def close(self) -> None:
        """Say what is still to be said, and give everything back. Idempotent."""
        for timer in (self._timer, self._beating):
            if timer is not None:
                timer.cancel()
        self.deaths.close()
        if self._witness is not None:
            await self._witness.close()
        await self.links.flush()
        await self.links.close()

    def _feed(self, event: m.Event) -> None:
        machine = self.machine
        actions = machine.handle(event, now_ns=now_ns())
        machine.check_invariants()
        for action in actions:
            self._perform(action)

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=message):
                self.links.send(to, message)
            case m.SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_later(
                    max(0, at_ns - now_ns()) / 1e9, self._feed, m.TimerFired()
                )
            case m.Watch(subjects=subjects, observers=observers):
                self._watch(subjects, observers)
            case m.Installed(view=view, reason=reason):
                self.acting = view
                if self._witness is not None:
                    self._witness.over(view.epoch)
                self.deaths.forget_all_but({*self.hails, *(node.key for node in view.nodes)})
                self._desk.acts_on(view, reason)
            case m.AskWitness(epoch=epoch):
                assert self._witness is not None, f"there is no witness to ask for epoch {epoch}"
                self._witness.want(epoch)
            case m.Stopped(reason=reason):
                if not self.over.done():
                    self.over.set_result(reason)
            case _:
                assert_never(action)

    def _witness_gave(self, given: Given) -> None:
        self._feed(m.WitnessGave(epoch=given.epoch, holder=given.holder, reason=given.reason))

    def _watch(self, subjects: tuple[Node, ...], observers: tuple[Node, ...]) -> None:
        self.detector.watch((node.key for node in subjects), now_ns())
        self._observers = observers
        self._beaten = {node.key: self._beaten.get(node.key) or _Beaten() for node in observers}
        self.links.keep({node.key: node for node in (*subjects, *observers)}.values())

    # -- heartbeats --------------------------------------------------------------------------------------

    def _start_beating(self) -> None:
        self._beat_due_ns = now_ns()
        self._beat()

    def _beat(self) -> None:
        at_ns, every_ns = now_ns(), self._deadlines.heartbeat_ns
        late_ns = at_ns - self._beat_due_ns
        self._beat_due_ns = max(self._beat_due_ns + every_ns, at_ns + every_ns // 2)
        self._beating = self._loop.call_later((self._beat_due_ns - at_ns) / 1e9, self._beat)
        if self.over.done():
            return
        self._beats += 1
        if self.machine.state is State.MEMBER:
            beat = m.Beat(known=self.machine.view.epoch, entered=self.machine.entered)
            for node in self._observers:
                self._beat_to(node, beat, at_ns)
        # Whoever was stopped or starved has silence in its own ears: what came meanwhile is heard first.
        if late_ns <= every_ns:
            for key, reason in self.detector.silent(at_ns):
                self._feed(m.Suspected(key=key, reason=reason))
        if self._beats % SWEEP_BEATS == 0:
            self.links.sweep()

    def _beat_to(self, node: Node, beat: m.Beat, at_ns: int) -> None:
        beaten = self._beaten[node.key]
        just_sent = at_ns - self.links.sent_ns(node.key) < self._deadlines.heartbeat_ns // 2
        if just_sent and beaten.said == beat and beaten.spared < BEATS_SPARED_MAX:
            beaten.spared += 1
            self.beats_spared += 1
            return
        beaten.said, beaten.spared = beat, 0
        self.beats_sent += 1
        self.links.send(node, beat)

    # -- what links bring: `LinksDesk` -------------------------------------------------------------------

    def hail(self) -> Hail:
        """See `LinksDesk`."""
        return Hail(
            node=self.me,
            protocol=PROTOCOL_VERSION,
            release=self._release,
            wall_ns=time.time_ns(),
            boot_id=boot_id(),
            pid_space=pid_space(),
            pid=os.getpid(),
            started=started(os.getpid()),
        )

    def hailed(self, key: NodeKey, hail: Hail) -> None:
        """See `LinksDesk`."""
        self.hails[key] = hail, hail.wall_ns - time.time_ns()
        self.deaths.watch(
            key, boot=hail.boot_id, space=hail.pid_space, pid=hail.pid, started_ticks=hail.started
        )
        self._heard(key)

    def received(self, sender: Node, contract: Contract) -> None:
        """See `LinksDesk`."""
        self._heard(sender.key)
        if not isinstance(contract, m.Message):
            self._desk.told(sender.key, contract)
            return
        try:
            self._feed(m.Received(sender=sender, message=contract))
        except LocalProtocolError as error:  # views that contradict each other
            raise RemoteProtocolError(f"{sender.key} says what cannot be: {error}") from error

    def ended(self, key: NodeKey, reason: str) -> None:
        """See `LinksDesk`."""
        self.hails.pop(key, None)
        log.debug("link ended", node=str(self.me.key), peer=str(key), reason=reason)

    def superseded(self, key: NodeKey) -> None:
        """See `LinksDesk`."""
        self.hails.pop(key, None)
        self._died(key)

    def visited(self, link: TcpLink) -> None:
        """See `LinksDesk`."""
        self._desk.visited(link)

    def _heard(self, key: NodeKey) -> None:
        if self.detector.heard(key, now_ns()):
            self._feed(m.Trusted(key=key))

    def _died(self, key: NodeKey) -> None:
        self._feed(m.Proven(key=key))
