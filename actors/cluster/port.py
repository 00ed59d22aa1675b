"""The interface between a node's membership and what runs on the node, jobs and actors.

`LocalPort` is that of a cluster of this host alone, for a job that needs no other: no thread, socket,
heartbeat or agreement.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final, Protocol

from zbmd.actors.cluster.state.job_rules import after_change
from zbmd.actors.cluster.state.job_table import Command, CommandRefused, Job, JobPhase, Order, problem_of
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract


class ClusterListener(Protocol):
    """Receives events of the cluster, in order. Called on the loop; must not block."""

    def began(self, me: Node) -> None:
        """An incarnation of this node begins; later calls are about this one."""
        ...

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """This node acts on a view that every member knows."""
        ...

    def received(self, sender: NodeKey, message: Contract) -> None:
        """A message of another node that is not about membership."""
        ...

    def stopped(self, reason: str) -> None:
        """This incarnation is over: nothing that it ran may continue. Another may begin."""
        ...


class ClusterPort(Protocol):
    """A node of a cluster as its jobs and actors see it. Use on the loop's thread."""

    @property
    def me(self) -> Node:
        """This node's incarnation."""
        ...

    @property
    def view(self) -> ClusterView:
        """The view that the node acts on; of epoch 0 while there is none."""
        ...

    def command(self, order: Order) -> int:
        """Have the members agree on an order; it is repeated until they have.

        Returns its number: once `view.jobs.applied(me.key)` reaches it, the order was applied or refused
        (`view.jobs.refusal`). Raises `CommandRefused` if it is invalid.
        """
        ...

    def send(self, to: NodeKey, message: Contract) -> None:
        """Send to another member, in order; dropped if that incarnation is gone."""
        ...

    def leave(self) -> None:
        """Leave the cluster in order."""
        ...

    def listen(self, listener: ClusterListener) -> None:
        """Call `listener` from now on, starting with the current incarnation and view."""
        ...


THIS_HOST: Final = Node(NodeKey(id=0, incarnation=1))
ALONE: Final = ClusterView(epoch=0, nodes=(THIS_HOST,))
"""The first view of a cluster of one node."""


def after_order(view: ClusterView, order: Order, *, elapsed_ns: int) -> ClusterView:
    """Return the view of a cluster of one node after one order of that node.

    elapsed_ns: how long `view` has lasted. Its epoch counts the views of its jobs: nobody else waits for one.
    """
    (me,) = view.nodes
    command = Command(origin=me.key, number=view.jobs.applied(me.key) + 1, order=order)
    epoch = view.epoch + 1
    jobs = after_change(view.jobs, epoch=epoch, members=[me.key], commands=[command], elapsed_ns=elapsed_ns)
    installed = any(job.epoch == epoch for job in jobs.jobs)
    return ClusterView(epoch=epoch if installed else view.epoch, nodes=view.nodes, jobs=jobs)


class LocalPort:
    """The `ClusterPort` of a cluster of one node: an order is agreed on as soon as it is given."""

    def __init__(self) -> None:
        self._view = ALONE
        self._since_ns = time.monotonic_ns()
        self._listeners: list[ClusterListener] = []
        self._views: deque[ClusterView] = deque()
        self._telling = False
        self._ends: dict[int, asyncio.Future[Job]] = {}

    @property
    def me(self) -> Node:
        """See `ClusterPort`."""
        return THIS_HOST

    @property
    def view(self) -> ClusterView:
        """See `ClusterPort`."""
        return self._view

    def command(self, order: Order) -> int:
        """See `ClusterPort`. Raises `CommandRefused` if the order is invalid."""
        if problem := problem_of(order):
            raise CommandRefused(problem)
        now_ns = time.monotonic_ns()
        self._view = after_order(self._view, order, elapsed_ns=now_ns - self._since_ns)
        self._since_ns = now_ns
        self._views.append(self._view)
        self._tell()
        return self._view.jobs.applied(THIS_HOST.key)

    def send(self, to: NodeKey, message: Contract) -> None:
        """See `ClusterPort`: there is no other member."""

    def leave(self) -> None:
        """See `ClusterPort`: a run on one host is stopped instead."""

    def listen(self, listener: ClusterListener) -> None:
        """See `ClusterPort`."""
        self._listeners.append(listener)
        listener.began(THIS_HOST)
        listener.acts_on(self._view, "it is the first that it hears of")

    def end_of(self, job: int) -> asyncio.Future[Job]:
        """Return a future of the job's last entry in the table, done once the job has ended."""
        end = self._ends[job] = asyncio.get_running_loop().create_future()
        self._look(self._view)
        return end

    def _tell(self) -> None:
        """Tell all listeners of each view in turn: what they hear makes them give orders."""
        if self._telling:
            return
        self._telling = True
        try:
            while self._views:
                view = self._views.popleft()
                for listener in self._listeners:
                    listener.acts_on(view, "an order of this node")
                self._look(view)
        finally:
            self._telling = False

    def _look(self, view: ClusterView) -> None:
        for job in view.jobs.jobs:
            end = self._ends.get(job.id)
            if job.phase is JobPhase.ENDED and end is not None and not end.done():
                end.set_result(job)
