"""A run on one host without its processes: the job table of a cluster of one node, and the node's machine.

The production code of `zbmd.actors.cluster.jobs.host`, but for its driver: what forks, kills and sends is the
simulation's or the test's.
"""

from __future__ import annotations

from collections import deque

from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.node_machine import NO_VIEW, LocalJob, LocalJobs
from zbmd.actors.cluster.port import ALONE, THIS_HOST, after_order
from zbmd.actors.cluster.state.job_table import Job, JobSpec, Order, Submit
from zbmd.actors.view import View


class OneNode:
    """One job on one node."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.table = ALONE
        self.machine = LocalJobs()
        self._since_ns = 0

    def begin(self, *, now_ns: int) -> list[e.Action]:
        """Give the node its job; return what it does."""
        self._since_ns = now_ns
        self.machine.handle(e.IncarnationBegan(me=THIS_HOST.key), now_ns=now_ns)
        return self.order(Submit(spec=self.spec), now_ns=now_ns)

    def order(self, order: Order, *, now_ns: int) -> list[e.Action]:
        """Give an order; return what the node does."""
        return self.handle(self._ordered(order, now_ns), now_ns=now_ns)

    def handle(self, event: e.Event, *, now_ns: int) -> list[e.Action]:
        """Put an event to the machine, and what its own orders change; return all else that it does."""
        done: list[e.Action] = []
        waiting: deque[e.Event] = deque([event])
        while waiting:
            for action in self.machine.handle(waiting.popleft(), now_ns=now_ns):
                if isinstance(action, e.ProposeOrder):
                    waiting.append(self._ordered(action.order, now_ns))
                else:
                    done.append(action)
        return done

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the machine's are broken."""
        self.machine.check_invariants()

    @property
    def job(self) -> Job:
        """The job in the table."""
        job = self.table.jobs.job(self.spec.job)
        assert job is not None, "the job was not submitted"
        return job

    @property
    def local(self) -> LocalJob | None:
        """The job in the machine; None once nothing of it runs."""
        return self.machine.jobs.get(self.spec.job)

    @property
    def view(self) -> View:
        """The view that was sent to the ranks last."""
        return NO_VIEW if self.local is None else self.local.view

    @property
    def unlinked(self) -> frozenset[int]:
        """Members of that view that live and are not linked."""
        local = self.local
        if local is None:
            return frozenset()
        living = {m.rank: local.living(m.rank, m.incarnation) for m in self.view.members}
        return frozenset(rank for rank, p in living.items() if p is not None and p.linked < self.view.epoch)

    def _ordered(self, order: Order, now_ns: int) -> e.ViewActedOn:
        self.table = after_order(self.table, order, elapsed_ns=now_ns - self._since_ns)
        self._since_ns = now_ns
        return e.ViewActedOn(view=self.table)
