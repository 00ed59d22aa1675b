"""Nodes of a cluster in one process: real machines of membership, and messages that the loop carries.

No detector: a node dies when the test says so, and then its death is proven to the others, as that of a
process on the same host is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.port import ClusterListener
from zbmd.actors.cluster.state.job_table import Order
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.machine import SetTimer, TimerFired

NO_VIEW = ClusterView(epoch=0, nodes=())


class MemoryNode:
    """A `ClusterPort`."""

    def __init__(self, cluster: MemoryCluster, node_id: int) -> None:
        self._cluster = cluster
        self._id = node_id
        self._loop = asyncio.get_running_loop()
        self._listener: ClusterListener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._incarnation = 0
        self.alive = False
        self.view = NO_VIEW
        self._new_life()

    @property
    def me(self) -> Node:
        return self.machine.me

    def _new_life(self) -> None:
        self._incarnation += 1
        self.view = NO_VIEW
        key = NodeKey(self._id, self._incarnation)
        self.machine = ClusterMachine(Node(key, f"127.0.0.1:{self._id}"), derive())

    def start(self, door: MemoryNode | None = None) -> None:
        """Found a cluster, or enter it by a door."""
        self.alive = True
        self.feed(m.FoundCluster() if door is None else m.JoinCluster(doors=(door.me,)))

    def again(self, door: MemoryNode) -> None:
        """Begin another life."""
        self._new_life()
        if self._listener is not None:
            self._listener.began(self.me)
        self.start(door)

    def leave(self) -> None:
        """See `ClusterPort`."""
        self.feed(m.LeaveRequested())

    def cut_off(self) -> None:
        """Nothing comes or goes any more; the others learn that this life is over, and so does the node."""
        self.die()
        if self._listener is not None:
            self._listener.stopped("it is cut off")

    def die(self) -> None:
        """As a host that is gone."""
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        for node in self._cluster.nodes.values():
            if node.alive:
                node.feed(m.Proven(key=self.me.key))

    def command(self, order: Order) -> int:
        if self.alive:
            self.feed(m.Ordered(order=order))
        return self.machine.ordered

    def send(self, to: NodeKey, message: Contract) -> None:
        node = self._cluster.nodes.get(to.id)
        if self.alive and node is not None:
            self._loop.call_soon(node.take, self.me.key, to, message)

    def take(self, sender: NodeKey, to: NodeKey, message: Contract) -> None:
        """A message for the jobs arrives."""
        if self.alive and to == self.me.key and self._listener is not None:
            self._listener.received(sender, message)

    def listen(self, listener: ClusterListener) -> None:
        self._listener = listener
        listener.began(self.me)
        if self.view.epoch:
            listener.acts_on(self.view, "it has done so before")

    def feed(self, event: m.Event) -> None:
        """Put an event to the machine, and do as it says."""
        if not self.alive:
            return
        actions = self.machine.handle(event, now_ns=time.monotonic_ns())
        self.machine.check_invariants()
        for action in actions:
            self._perform(action)

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=message):
                node = self._cluster.nodes.get(to.id)
                if node is not None:
                    received = m.Received(sender=self.me, message=message)
                    self._loop.call_soon(node.arrived, to.key, received)
            case SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
                self._timer = self._loop.call_later(delay_s, self.feed, TimerFired())
            case m.WatchMembers() | m.AskWitness():
                pass
            case m.Installed(view=view, reason=reason):
                self.view = view
                if self._listener is not None:
                    self._listener.acts_on(view, reason)
                self._cluster.changed()
            case m.Stopped(reason=reason):
                self.alive = False
                if self._listener is not None:
                    self._listener.stopped(reason)
            case _:
                assert_never(action)

    def arrived(self, to: NodeKey, received: m.Received) -> None:
        """A message for the machine arrives."""
        if to == self.me.key:
            self.feed(received)


class MemoryCluster:
    """Its nodes, by id. changed: called whenever a node acts on a view; first: the lowest id."""

    def __init__(self, size: int, changed: Callable[[], None], *, first: int = 0) -> None:
        self.changed = changed
        self._first = first
        self.nodes: dict[int, MemoryNode] = {}
        for _ in range(size):
            self.add()
        self.nodes[first].start()
        for node_id in range(first + 1, first + size):
            self.nodes[node_id].start(self.nodes[first])

    def add(self) -> MemoryNode:
        """A further node, not started."""
        node_id = self._first + len(self.nodes)
        node = self.nodes[node_id] = MemoryNode(self, node_id)
        return node

    def close(self) -> None:
        """End all of it."""
        for node in self.nodes.values():
            node.die()
