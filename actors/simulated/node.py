"""A node of the simulation: membership over datagrams, and the address where actors reach other nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, assert_never

import msgspec

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.contracts import decode
from zbmd.actors.cluster.heartbeats import detector as d
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.port import ClusterListener
from zbmd.actors.cluster.state.job_table import Order
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.scopes import external_name
from zbmd.actors.routing.contracts import Route
from zbmd.actors.simulated.membership_scenario import Cluster, name_of
from zbmd.transport.link.interface import Link
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.sim import SimProcess

DIAL_TIMEOUT_S: Final = 0.2
NO_VIEW: Final = ClusterView(epoch=0, nodes=())


class Packet(Contract, id="sim.cluster.packet"):
    """A message of one node's life to another's. `to` of incarnation 0: whichever lives."""

    sender: Node
    to: NodeKey
    body: bytes


async def dial_guest(process: SimProcess, way: Route, name: str) -> Link:
    """A link to a process, as its guest. name: what all call us. Raises as `SimProcess.dial`."""
    return await process.dial(
        way.far, contracts=fingerprints(), timeout_s=DIAL_TIMEOUT_S, hello=external_name(name, "")
    )


def accept_guests(process: SimProcess, accept: Callable[[Link], None]) -> None:
    """Take links of all, as a guest does."""
    process.listen(accept, contracts=fingerprints(), hello=external_name(process.name, ""))


class SimActorEndpoint:
    """An `ActorEndpoint` by the world's links."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process

    async def listen(self, accept: Callable[[Link], None]) -> str:
        """See `ActorEndpoint`."""
        self._process.listen(accept, contracts=fingerprints())
        return self._process.name

    async def dial(self, address: str) -> Link:
        """See `ActorEndpoint`."""
        return await self._process.dial(address, contracts=fingerprints(), timeout_s=DIAL_TIMEOUT_S)

    async def dial_way(self, way: Route) -> Link:
        """See `ActorEndpoint`."""
        return await dial_guest(self._process, way, self._process.name)

    async def close(self) -> None:
        """See `ActorEndpoint`: the process ends."""


class SimNode:
    """One life of a node, that of its process: a `ClusterPort` that drives the machine and the detector.

    `over` is done with the reason once this life is.
    """

    def __init__(self, process: SimProcess, cluster: Cluster, node_id: int) -> None:
        self.me = Node(NodeKey(node_id, process.incarnation), process.name)
        self.view = NO_VIEW
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.machine = ClusterMachine(self.me, cluster.deadlines)
        self._process = process
        self._cluster = cluster
        self._detector = d.Detector(cluster.deadlines)
        self._beat_ns = cluster.deadlines.heartbeat_ns
        self._observers: tuple[Node, ...] = ()
        self._listener: ClusterListener | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, doors: Sequence[Node]) -> None:
        """Found the cluster, or enter it by one of these doors; then hear what comes, until it is over."""
        beating = asyncio.create_task(self._beat())
        try:
            self.feed(m.Enter(doors=tuple(doors)) if doors else m.Found())
            while not self.over.done():
                self._arrived((await self._process.receive_datagram()).data)
        finally:
            beating.cancel()

    # -- `ClusterPort` -----------------------------------------------------------------------------------

    def command(self, order: Order) -> int:
        """See `ClusterPort`."""
        self.feed(m.Ordered(order=order))
        return self.machine.ordered

    def send(self, to: NodeKey, message: Contract) -> None:
        """See `ClusterPort`."""
        packet = Packet(self.me, to, msgspec.msgpack.encode(message))
        self._process.send_datagram(name_of(to.id), msgspec.msgpack.encode(packet))

    def listen(self, listener: ClusterListener) -> None:
        """See `ClusterPort`."""
        self._listener = listener
        listener.began(self.me)

    # -- the machine and the detector --------------------------------------------------------------------

    def feed(self, event: m.Event) -> None:
        """Put an event to the machine, and do as it says."""
        machine, known = self.machine, self.machine.view.epoch
        actions = machine.handle(event, now_ns=time.monotonic_ns())
        machine.check_invariants()
        if machine.view.epoch != known:
            self._cluster.learnt(self.me.key, machine.view)
        for action in actions:
            self._perform(action)

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=message):
                self.send(to.key, message)
            case SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0, at_ns - time.monotonic_ns()) / 1e9
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(delay_s, self.feed, TimerFired())
            case m.Watch(subjects=subjects, observers=observers):
                self._beat_ns = d.beat_ns(self._cluster.deadlines, busy=self.machine.view.jobs.busy)
                keys = tuple(node.key for node in subjects)
                self._detect(d.Observe(subjects=keys, beat_ns=self._beat_ns))
                self._observers = observers
            case m.Installed(view=view, reason=reason):
                self._cluster.acts(self.me.key, view)
                self.view = view
                self._process.note(f"acts on {view}: {reason}")
                if self._listener is not None:
                    self._listener.acts_on(view, reason)
            case m.AskWitness():
                raise AssertionError("there is no witness")
            case m.Stopped(reason=reason):
                self._stopped(reason)
            case _:
                assert_never(action)

    def _stopped(self, reason: str) -> None:
        assert self._process.name not in self._cluster.protected, f"{self.me.key} stops: {reason}"
        self._process.note(f"stops: {reason}")
        self.view = NO_VIEW
        if not self.over.done():
            self.over.set_result(reason)
        if self._listener is not None:
            self._listener.stopped(reason)

    def _arrived(self, data: bytes) -> None:
        packet = decode(data)
        assert isinstance(packet, Packet)
        if packet.to not in (self.me.key, NodeKey(self.me.id, 0)):
            return
        self._detect(d.Beats(key=packet.sender.key, arrivals_ns=(time.monotonic_ns(),)))
        message = decode(packet.body)
        if isinstance(message, m.Message):
            self.feed(m.Received(sender=packet.sender, message=message))
        elif self._listener is not None:
            self._listener.received(packet.sender.key, message)

    async def _beat(self) -> None:
        while not self.over.done():
            beat = m.Beat(known=self.machine.view.epoch, entered=self.machine.entered)
            for observer in self._observers:
                self.send(observer.key, beat)
            self._detect(d.Looked())
            await asyncio.sleep(self._beat_ns / 1e9)

    def _detect(self, event: d.Event) -> None:
        """A beat looks at all, so nobody has to look earlier for a limit."""
        for action in self._detector.handle(event, now_ns=time.monotonic_ns()):
            match action:
                case d.Silent(key=key, reason=reason):
                    self.feed(m.Suspected(key=key, reason=reason))
                case d.Audible(key=key):
                    self.feed(m.Trusted(key=key))
                case d.Limit():
                    pass
                case _:
                    assert_never(action)
        self._detector.check_invariants()
