"""The reductions of a step's gradients: bucket after bucket, each on its way as soon as it is final.

16-bit floats are rounded at every node of the shard tree, whoever computes it: so their bits depend no more
on who holds which shards than those of float32 do.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Assignment, Node, shard_tree_nodes
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, is_narrow
from zbmd.training.step.accumulate import AccumulationPlan
from zbmd.training.step.shard_sum import ShardSum


class ShardReduction:
    """The reductions of one step under way, of this rank's `buffers` into `total`, along the shard tree.

    `assignment[i]` are the shards of the i-th member of `group`, `plan` what this one does with its own. Who
    is alone has the sum as soon as its shards are done: then nothing is sent on its way, nor copied, and it
    needs neither `group` nor `total`.
    """

    def __init__(
        self,
        group: Group | None,
        plan: AccumulationPlan,
        assignment: Assignment,
        buffers: list[Array],
        total: Array | None,
    ) -> None:
        self.plan = plan
        self.buffers = buffers
        self._group = None if is_alone(assignment) else group
        self._assignment = assignment
        self._shards = max(stop for _, stop in assignment)
        nodes = tuple(tuple(shard_tree_nodes(self._shards, *own)) for own in assignment)
        self._sums = ShardSum(self._shards, len(assignment), nodes)
        self.total: Array
        """Where the sum is, once `finish` has returned."""
        if self._group is None:
            (whole,) = plan.partials.values()
            self.total = buffers[whole]
        else:
            assert total is not None, "the sum of several has room of its own"
            self.total = total
        self._futures: list[Future[object]] = []

    def submit(self, span: slice) -> None:
        """Queue the all-reduce of the flat elements `span`."""
        group = self._group
        if group is None:
            return
        partials = {node: self.buffers[buffer][span] for node, buffer in self.plan.partials.items()}
        out, end_ns = self.total[span], group.deadline_ns()

        def reduce(communicator: Communicator) -> object:
            if is_narrow(out):
                return reduce_rounded(communicator, partials, out, self._sums, deadline_ns=end_ns)
            return communicator.all_reduce_shards(
                partials, out, shards=self._shards, assignment=self._assignment, deadline_ns=end_ns
            )

        self._futures.append(group.submit(reduce))

    @property
    def is_alone(self) -> bool:
        """Whether nothing is sent on its way."""
        return self._group is None

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


def is_alone(assignment: Assignment) -> bool:
    """Whether one rank has all shards: then it needs no room for a sum beside its buffers."""
    return len(assignment) == 1


def reduce_rounded(
    communicator: Communicator,
    partials: Mapping[Node, Array],
    out: Array,
    sums: ShardSum,
    *,
    deadline_ns: int,
) -> Array:
    """Sum the `partials` of all ranks along the shard tree into `out`, rounding at each node.

    As `Communicator.all_reduce_shards`, which rounds once: each rank folds a slice of what all have sent it,
    and slices are gathered.
    """
    ranks, each = sums.ranks, -(-out.size // sums.ranks)
    sent = np.zeros((sums.width, ranks * each), out.dtype)
    for row, partial in zip(sent, partials.values(), strict=False):
        row[: out.size] = partial
    received = np.empty((sums.width, ranks, each), out.dtype)
    for row, into in zip(sent, received, strict=True):
        communicator.all_to_all(row.reshape(ranks, each), into, deadline_ns=deadline_ns)
    every = communicator.all_gather(sums.fold(list(received)), deadline_ns=deadline_ns)
    out[:] = every.reshape(-1)[: out.size]
    return out
