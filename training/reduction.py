"""The reductions of a step's gradients: bucket after bucket, each on its way as soon as it is final."""

from __future__ import annotations

from concurrent.futures import Future, wait

from zbmd.collectives.algorithms.shard_tree import Assignment
from zbmd.collectives.communicator import Communicator
from zbmd.collectives.group import Group
from zbmd.training import spans
from zbmd.training.accumulate import AccumulationPlan
from zbmd.training.xp import Array


class ShardReduction:
    """The reductions of one step under way, of this rank's `buffers` into `total`, along the shard tree.

    `assignment[i]` are the shards of the i-th member of `group`, `plan` what this one does with its own.
    """

    def __init__(
        self,
        group: Group,
        plan: AccumulationPlan,
        assignment: Assignment,
        buffers: list[Array],
        total: Array,
    ) -> None:
        self.plan = plan
        self.buffers = buffers
        self._group = group
        self._assignment = assignment
        self._shards = max(stop for _, stop in assignment)
        self._total = total
        self._futures: list[Future[object]] = []

    def submit(self, span: slice) -> None:
        """Queue the all-reduce of the flat elements `span`."""
        partials = {node: self.buffers[buffer][span] for node, buffer in self.plan.partials.items()}
        out, end_ns = self._total[span], self._group.deadline_ns()

        def reduce(communicator: Communicator) -> object:
            return communicator.all_reduce_shards(
                partials, out, shards=self._shards, assignment=self._assignment, deadline_ns=end_ns
            )

        self._futures.append(self._group.submit(reduce))

    @property
    def done(self) -> bool:
        """Whether all that was submitted has ended."""
        return all(future.done() for future in self._futures)

    def finish(self) -> None:
        """Wait until all of `total` holds the sum. Raises `PeerLost` or `OperationAborted`."""
        with spans.COMM:
            for future in self._futures:
                future.result()

    def drain(self) -> None:
        """Return once nothing touches the buffers any more."""
        wait(self._futures)
