"""One incarnation of a node: drives the membership machine and the failure detector over real links.

It decides nothing. It runs on the loop of the cluster's own thread (`node`), so that views are agreed on
and heartbeats judged even while the process's main loop is busy.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, assert_never

import structlog
from msgspec.structs import replace

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.contracts import PROTOCOL_VERSION, BeatsSaid, Hail, check
from zbmd.actors.cluster.heartbeats.connections import (
    NO_DEVICE,
    HeartbeatConnections,
    NoDevice,
    OwnDevice,
    RdmaHeartbeats,
)
from zbmd.actors.cluster.heartbeats.driver import Heartbeats
from zbmd.actors.cluster.jobs.host_links import host_identity
from zbmd.actors.cluster.local_deaths import LocalDeaths, boot_id, pid_space, started
from zbmd.actors.cluster.membership.capture_kind import CLUSTER, cluster_config
from zbmd.actors.cluster.membership.machine import ClusterMachine, MemberState
from zbmd.actors.cluster.membership.witness import TieBreakerNamed
from zbmd.actors.cluster.peer_links import PeerLinks
from zbmd.actors.cluster.state.job_table import Order
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.actors.replay.process_capture import CaptureSettings, ProcessCapture
from zbmd.transport.capture.errors import CaptureError, CaptureExists
from zbmd.transport.capture.log import LogRecorder
from zbmd.transport.capture.recorder import Clocks, Recorder, origin_of
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp.address import TcpSettings
from zbmd.transport.tcp.link import TcpLink

# --- wall clocks of hosts that are far apart ------------------------------------------------------------
#
# Nothing waits by a wall clock, so it is people who must know: they read logs of several hosts side by
# side.


CLOCKS_APART_NS_MAX: Final = 120_000_000_000
"""A larger difference between two clocks is logged. Hosts that keep time are within a second of each other; a
message's delay, and a host that was just resumed, are far within the bound."""
CLOCK_WARNINGS_MAX: Final = 64
"""Nodes that one incarnation warns of: when so many clocks differ, it is ours."""
_SECOND_NS: Final = 1_000_000_000


def wall_ns() -> int:
    """This host's wall clock, ns since 1970."""
    return time.time_ns()


def clocks_apart(theirs: str, ours: str, ahead_ns: int) -> str | None:
    """Return the warning for a host's clock that is `ahead_ns` ahead of ours; None within the bound.

    theirs, ours: what people call the two hosts.
    """
    if abs(ahead_ns) <= CLOCKS_APART_NS_MAX:
        return None
    apart = format_duration(abs(ahead_ns) // _SECOND_NS * _SECOND_NS)
    where = "ahead of" if ahead_ns > 0 else "behind"
    return (
        f"the clock of {theirs} is {apart} {where} that of {ours}. Set both: `timedatectl` says whether a "
        "host keeps time, `timedatectl set-ntp true` has it do so. Views, jobs and deadlines take no harm, "
        "for nothing waits by these clocks; times in logs of the two do not fit together, and with TLS a "
        "certificate may be taken for expired, or not valid yet"
    )


class ClockWatch:
    """The nodes of whose clocks one incarnation has warned already."""

    def __init__(self) -> None:
        self._warned: set[int] = set()

    def heard(self, me: Node, node: Node, ahead_ns: int) -> str | None:
        """Return a warning of a node's clock, the first time that it is far from ours."""
        if node.key.id in self._warned or len(self._warned) >= CLOCK_WARNINGS_MAX:
            return None
        text = clocks_apart(_called(node), _called(me), ahead_ns)
        if text is not None:
            self._warned.add(node.key.id)
        return text


def _called(node: Node) -> str:
    return f"{node.name or node.key} ({node.address})"


# --- recordings: one of the process, and one of each incarnation ----------------------------------------
#
# All nodes may record into one directory, which hosts may share: the log of a process is named after its
# node, and that of an incarnation after the incarnation.


STARTS_MAX: Final = 1024
"""Logs of one node in one directory, one for each time that it was started."""


def node_capture(name: str, clock: HybridClock, settings: CaptureSettings) -> ProcessCapture:
    """The recorder of the process of the node that people call `name`: `host-NAME`, by number of its start.

    Raises `CaptureError`.
    """
    identity = replace(host_identity(0), name=f"host-{name}")
    for start in range(1, STARTS_MAX):
        try:
            return ProcessCapture(replace(identity, incarnation=start), clock, settings)
        except CaptureExists:
            continue  # of an earlier start
    return ProcessCapture(replace(identity, incarnation=STARTS_MAX), clock, settings)


def incarnation_recorder(
    identity: Identity, clock: HybridClock, settings: CaptureSettings | None
) -> Recorder | None:
    """Return the recorder of one incarnation, for its thread; None if no log is wanted, or can be opened."""
    if settings is None or settings.directory is None:
        return None
    try:
        clocks = Clocks(hybrid=clock)
        return LogRecorder(settings.directory, origin_of(identity), clocks, bulk=settings.bulk)
    except CaptureError as error:
        log.warning("this incarnation is not recorded", reason=str(error))
        return None


log: Final = structlog.stdlib.get_logger("zbmd.cluster")


class IncarnationHandler(Protocol):
    """Receives the reports of one incarnation. Called on its loop; must not block."""

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """Every member knows this view: act on it."""
        ...

    def suspects(self, key: NodeKey, reason: str) -> None:
        """A member is silent; the next view decides whether it is removed."""
        ...

    def received(self, sender: NodeKey, contract: Contract) -> None:
        """A message that is not about membership arrived. Raises `RemoteProtocolError`."""
        ...

    def visited(self, link: TcpLink) -> None:
        """A process that is not a node connected; the handler owns the link."""
        ...


class Witness(Protocol):
    """External tie-breaker: picks which half of a split view survives. Used on the incarnation's loop."""

    def want(self, epoch: int) -> None:
        """Half of a view wants to agree on the view of `epoch`."""
        ...

    def over(self, epoch: int) -> None:
        """The view of `epoch` is decided."""
        ...

    async def close(self) -> None:
        """Stop asking."""
        ...


MakeWitness: TypeAlias = Callable[[NodeKey, int, Callable[[TieBreakerNamed], None]], Witness]
"""Takes who asks, the retry interval in ns, and the callback for answers."""


class Incarnation:
    """One incarnation, from its key to its end; `over` then holds the reason."""

    def __init__(
        self,
        me: Node,
        endpoint: Endpoint,
        settings: TcpSettings,
        handler: IncarnationHandler,
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
        self.rdma_routes = RdmaHeartbeats(self.beats, rdma, self._send_of_beats)
        self._stripes = HeartbeatConnections(self.beats, self.rdma_routes, endpoint)
        self.deaths = LocalDeaths(self._died)
        self.hails: dict[NodeKey, tuple[Hail, int]] = {}
        """By linked incarnation: its hail, and how far its wall clock was ahead of ours, ns."""
        self.acting: ClusterView | None = None
        self._handler = handler
        self._release = release
        self._wall_clock = wall_clock
        self._clocks = ClockWatch()
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    # -- its course --------------------------------------------------------------------------------------

    def found(self) -> None:
        """Begin as the only member of a new cluster."""
        self._feed(m.FoundCluster())

    def enter(self, join_addresses: tuple[Node, ...]) -> None:
        """Begin by asking members at these addresses to be admitted."""
        self._feed(m.JoinCluster(doors=join_addresses))

    def leave(self) -> None:
        """Ask the members to agree on a view without this node."""
        self._feed(m.LeaveRequested())

    def order(self, order: Order) -> None:
        """Have the members agree on an order. Raises `CommandRefused`."""
        self._feed(m.Ordered(order=order))

    def tell(self, to: NodeKey, contract: Contract) -> None:
        """Send another member a message that is not about membership; dropped if it is gone."""
        node = self.machine.view.by_id.get(to.id)
        if node is not None and node.key == to:
            self.links.send(node, contract)

    async def close(self) -> None:
        """Flush what is queued and release everything. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self.deaths.close()
        await self._stripes.close()
        if self._witness is not None:
            await self._witness.close()
        await self.links.flush()
        await self.links.close()
        self.beats.close()
        self.rdma_routes.close()
        self._tap.close("this incarnation is over")

    def _feed(self, event: m.Event) -> None:
        machine = self.machine
        actions = self._tap.handle(event, now_ns=now_ns())
        self._tap.check_invariants()
        for action in actions:
            self._perform(action)
        self.beats.say(machine.state is MemberState.MEMBER, machine.view.epoch, machine.entered)
        # It has something under way for as long as it wants to be woken: then it counts on every beat.
        self.beats.attend(self._timer is not None)

    def _timer_fired(self) -> None:
        self._timer = None
        self._feed(TimerFired())

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=message):
                self.links.send(to, message)
            case SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_later(max(0, at_ns - now_ns()) / 1e9, self._timer_fired)
            case m.WatchMembers(subjects=subjects, observers=observers):
                self._watch(subjects, observers)
            case m.Installed(view=view, reason=reason):
                self.acting = view
                if self._witness is not None:
                    self._witness.over(view.epoch)
                self.deaths.forget_all_but({*self.hails, *(node.key for node in view.nodes)})
                self._handler.acts_on(view, reason)
            case m.AskWitness(epoch=epoch):
                assert self._witness is not None, f"there is no witness to ask for epoch {epoch}"
                self._witness.want(epoch)
            case m.Stopped(reason=reason):
                if not self.over.done():
                    self.over.set_result(reason)
            case _:
                assert_never(action)

    def _witness_gave(self, given: TieBreakerNamed) -> None:
        self._feed(m.WitnessGave(epoch=given.epoch, holder=given.holder, reason=given.reason))

    def _watch(self, subjects: tuple[Node, ...], observers: tuple[Node, ...]) -> None:
        keys = [[node.key for node in nodes] for nodes in (subjects, observers)]
        self.beats.watch(*keys, busy=self.machine.view.jobs.busy)
        self.links.keep({node.key: node for node in (*subjects, *observers)}.values())
        self._stripes.open_missing()

    # -- `HeartbeatHandler` ----------------------------------------------------------------------------------

    def suspected(self, key: NodeKey, reason: str) -> None:
        """See `HeartbeatHandler`."""
        self._handler.suspects(key, reason)
        self._feed(m.Suspected(key=key, reason=reason))

    def trusted(self, key: NodeKey) -> None:
        """See `HeartbeatHandler`."""
        self._feed(m.Trusted(key=key))

    def beaten(self, key: NodeKey, known: int, entered: int) -> None:
        """See `HeartbeatHandler`."""
        if key not in self.hails:
            return  # its link has just ended
        beat = m.Beat(known=known, entered=entered)
        try:
            check(beat)
        except RemoteProtocolError as error:
            log.warning("impossible heartbeat; closing its connection", peer=str(key), reason=str(error))
            self.beats.drop_stripe(key)
            return
        self._feed(m.Received(sender=self.hails[key][0].node, message=beat))

    def beat_by_link(self, key: NodeKey) -> None:
        """See `HeartbeatHandler`."""
        node = self.machine.view.by_id.get(key.id)
        if node is not None and node.key == key:
            self.links.send(node, m.Beat(known=self.machine.view.epoch, entered=self.machine.entered))

    def stripe_ended(self, key: NodeKey) -> None:
        """See `HeartbeatHandler`."""
        self.rdma_routes.stripe_ended(key)

    def way_ended(self, key: NodeKey, reason: str) -> None:
        """See `HeartbeatHandler`."""
        self.rdma_routes.failed(key, reason)

    def _send_of_beats(self, key: NodeKey, message: BeatsSaid) -> None:
        if key in self.hails:
            self.links.send(self.hails[key][0].node, message)

    def paced(self) -> None:
        """See `HeartbeatHandler`."""
        self.links.sweep()
        self._stripes.open_missing()

    # -- `LinkHandler` ---------------------------------------------------------------------------------------

    def hail(self) -> Hail:
        """See `LinkHandler`."""
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
        """See `LinkHandler`."""
        ahead_ns = hail.wall_ns - self._wall_clock()
        self.hails[key] = hail, ahead_ns
        if (text := self._clocks.heard(self.me, hail.node, ahead_ns)) is not None:
            log.warning(text)
        self.deaths.watch(
            key, boot=hail.boot_id, space=hail.pid_space, pid=hail.pid, started_ticks=hail.started
        )
        self._stripes.linked(key, link)
        self.beats.heard(key)

    def sent(self, key: NodeKey) -> None:
        """See `LinkHandler`."""
        self.beats.sent(key)

    def received(self, sender: Node, contract: Contract) -> None:
        """See `LinkHandler`."""
        self.beats.heard(sender.key)
        if isinstance(contract, BeatsSaid):
            self.rdma_routes.received(sender.key, contract)
            return
        if not isinstance(contract, m.Message):
            self._handler.received(sender.key, contract)
            return
        try:
            self._feed(m.Received(sender=sender, message=contract))
        except LocalProtocolError as error:  # views that contradict each other
            raise RemoteProtocolError(f"{sender.key} says what cannot be: {error}") from error

    def ended(self, key: NodeKey, reason: str) -> None:
        """See `LinkHandler`."""
        self.hails.pop(key, None)
        self._stripes.unlinked(key)
        self.rdma_routes.forget(key)
        log.debug("link ended", node=str(self.me.key), peer=str(key), reason=reason)

    def superseded(self, key: NodeKey) -> None:
        """See `LinkHandler`."""
        self.hails.pop(key, None)
        self._stripes.unlinked(key)
        self.rdma_routes.forget(key)
        self._died(key)

    def visited(self, link: TcpLink) -> None:
        """See `LinkHandler`."""
        self._handler.visited(link)

    def _died(self, key: NodeKey) -> None:
        self._feed(m.Proven(key=key))
