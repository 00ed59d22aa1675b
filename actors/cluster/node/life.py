"""One life of a node: the machine, the detector and the heartbeats over real links. Decides nothing.

Runs on the loop of the cluster's thread (`node`), where nothing else does: so views are agreed on, and
heartbeats are judged, whatever keeps the process's own loop busy.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, assert_never

import structlog

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.capture_kinds import CLUSTER, cluster_config
from zbmd.actors.cluster.clocks import ClockWatch, wall_ns
from zbmd.actors.cluster.contracts import PROTOCOL_VERSION, Hail, check
from zbmd.actors.cluster.heartbeats.contracts import BeatsSaid
from zbmd.actors.cluster.heartbeats.driver import Heartbeats
from zbmd.actors.cluster.heartbeats.lanes import HeartbeatLanes
from zbmd.actors.cluster.heartbeats.rdma import NO_DEVICE, NoDevice, OwnDevice, RdmaBeats
from zbmd.actors.cluster.jobs.table import Order
from zbmd.actors.cluster.local_deaths import LocalDeaths, boot_id, pid_space, started
from zbmd.actors.cluster.membership.machine import ClusterMachine, State
from zbmd.actors.cluster.membership.witness import Given
from zbmd.actors.cluster.node_id import Node, NodeKey
from zbmd.actors.cluster.peer_links import PeerLinks
from zbmd.actors.cluster.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp.address import TcpSettings
from zbmd.transport.tcp.link import TcpLink

log: Final = structlog.stdlib.get_logger("zbmd.cluster")


class LifeDesk(Protocol):
    """What a life tells. Called on its loop; must not block."""

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """Every member of this view knows it."""
        ...

    def suspects(self, key: NodeKey, reason: str) -> None:
        """A member is no longer heard; what becomes of it, the next view tells."""
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
        rdma: OwnDevice | NoDevice = NO_DEVICE,
        wall_clock: Callable[[], int] = wall_ns,
    ) -> None:
        self.me = me
        self.machine = machine = ClusterMachine(me, endpoint.deadlines, witnessed=witness is not None)
        config = cluster_config(me, endpoint.deadlines.recovery_budget_ns, witnessed=witness is not None)
        self._tap = Tap(endpoint.recorder, CLUSTER, "cluster", machine, config)
        self._witness = (
            None if witness is None else witness(me.key, machine.waits.retry_ns, self._witness_gave)
        )
        self.beats = Heartbeats(me.key, endpoint.deadlines, self, endpoint.recorder)
        self.links = PeerLinks(me.key, endpoint, settings, self)
        self.ways = RdmaBeats(self.beats, rdma, self._say_of_beats)
        self._lanes = HeartbeatLanes(self.beats, self.ways, endpoint)
        self.deaths = LocalDeaths(self._died)
        self.hails: dict[NodeKey, tuple[Hail, int]] = {}
        """Of lives that we have links to: how they began, and how far their wall clock was ahead, ns."""
        self.acting: ClusterView | None = None
        self._desk = desk
        self._release = release
        self._wall_clock = wall_clock
        self._clocks = ClockWatch()
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    # -- its course --------------------------------------------------------------------------------------

    def found(self) -> None:
        """Begin as the only member of a new cluster."""
        self._feed(m.Found())

    def enter(self, doors: tuple[Node, ...]) -> None:
        """Begin by knocking at these doors."""
        self._feed(m.Enter(doors=doors))

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
        if self._timer is not None:
            self._timer.cancel()
        self.deaths.close()
        await self._lanes.close()
        if self._witness is not None:
            await self._witness.close()
        await self.links.flush()
        await self.links.close()
        self.beats.close()
        self.ways.close()
        self._tap.close("this life is over")

    def _feed(self, event: m.Event) -> None:
        machine = self.machine
        actions = self._tap.handle(event, now_ns=now_ns())
        self._tap.check_invariants()
        for action in actions:
            self._perform(action)
        self.beats.say(machine.state is State.MEMBER, machine.view.epoch, machine.entered)
        # It has something under way for as long as it wants to be woken: then it counts on every beat.
        self.beats.attend(self._timer is not None)

    def _timer_fired(self) -> None:
        self._timer = None
        self._feed(m.TimerFired())

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=message):
                self.links.send(to, message)
            case m.SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_later(max(0, at_ns - now_ns()) / 1e9, self._timer_fired)
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
        keys = [[node.key for node in nodes] for nodes in (subjects, observers)]
        self.beats.watch(*keys, busy=self.machine.view.jobs.busy)
        self.links.keep({node.key: node for node in (*subjects, *observers)}.values())
        self._lanes.open_missing()

    # -- what heartbeats bring: `BeatsDesk` --------------------------------------------------------------

    def suspected(self, key: NodeKey, reason: str) -> None:
        """See `BeatsDesk`."""
        self._desk.suspects(key, reason)
        self._feed(m.Suspected(key=key, reason=reason))

    def trusted(self, key: NodeKey) -> None:
        """See `BeatsDesk`."""
        self._feed(m.Trusted(key=key))

    def beaten(self, key: NodeKey, known: int, entered: int) -> None:
        """See `BeatsDesk`."""
        if key not in self.hails:
            return  # its link has just ended
        beat = m.Beat(known=known, entered=entered)
        try:
            check(beat)
        except RemoteProtocolError as error:
            log.warning("a heartbeat says what cannot be", peer=str(key), reason=str(error))
            self.beats.drop_lane(key)
            return
        self._feed(m.Received(sender=self.hails[key][0].node, message=beat))

    def beat_by_link(self, key: NodeKey) -> None:
        """See `BeatsDesk`."""
        node = self.machine.view.by_id.get(key.id)
        if node is not None and node.key == key:
            self.links.send(node, m.Beat(known=self.machine.view.epoch, entered=self.machine.entered))

    def lane_ended(self, key: NodeKey) -> None:
        """See `BeatsDesk`."""
        self.ways.lane_ended(key)

    def way_ended(self, key: NodeKey, reason: str) -> None:
        """See `BeatsDesk`."""
        self.ways.failed(key, reason)

    def _say_of_beats(self, key: NodeKey, said: BeatsSaid) -> None:
        if key in self.hails:
            self.links.send(self.hails[key][0].node, said)

    def paced(self) -> None:
        """See `BeatsDesk`."""
        self.links.sweep()
        self._lanes.open_missing()

    # -- what links bring: `LinksDesk` -------------------------------------------------------------------

    def hail(self) -> Hail:
        """See `LinksDesk`."""
        return Hail(
            node=self.me,
            protocol=PROTOCOL_VERSION,
            release=self._release,
            wall_ns=self._wall_clock(),
            boot_id=boot_id(),
            pid_space=pid_space(),
            pid=os.getpid(),
            started=started(os.getpid()),
        )

    def hailed(self, key: NodeKey, hail: Hail, link: TcpLink) -> None:
        """See `LinksDesk`."""
        ahead_ns = hail.wall_ns - self._wall_clock()
        self.hails[key] = hail, ahead_ns
        if (text := self._clocks.heard(self.me, hail.node, ahead_ns)) is not None:
            log.warning(text)
        self.deaths.watch(
            key, boot=hail.boot_id, space=hail.pid_space, pid=hail.pid, started_ticks=hail.started
        )
        self._lanes.linked(key, link)
        self.beats.heard(key)

    def sent(self, key: NodeKey) -> None:
        """See `LinksDesk`."""
        self.beats.sent(key)

    def received(self, sender: Node, contract: Contract) -> None:
        """See `LinksDesk`."""
        self.beats.heard(sender.key)
        if isinstance(contract, BeatsSaid):
            self.ways.said(sender.key, contract)
            return
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
        self._lanes.unlinked(key)
        self.ways.forget(key)
        log.debug("link ended", node=str(self.me.key), peer=str(key), reason=reason)

    def superseded(self, key: NodeKey) -> None:
        """See `LinksDesk`."""
        self.hails.pop(key, None)
        self._lanes.unlinked(key)
        self.ways.forget(key)
        self._died(key)

    def visited(self, link: TcpLink) -> None:
        """See `LinksDesk`."""
        self._desk.visited(link)

    def _died(self, key: NodeKey) -> None:
        self._feed(m.Proven(key=key))
