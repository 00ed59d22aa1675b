"""Accumulate the gradients of a step over a rank's logical shards, and reduce them over ranks, by buckets.

A rank visits its shards from left to right and adds two buffers as soon as a subtree of the shard tree is
complete, so it needs one buffer per level of the tree, not one per shard. The additions after the last shard
are done bucket by bucket, because buckets become final one after the other while the last backward pass still
runs. Each bucket is sent as soon as it is final.

16-bit floats are rounded at every node of the shard tree, whichever rank computes it, so their bits are as
independent of the assignment of shards to ranks as those of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Assignment, Node, assign_shards, shard_tree_nodes, split
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, is_narrow, maker_of
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.model.tensor_parallel import TensorGroup
from zbmd.transport import kill_points as faults

PLANS_MAX = 256
"""Cached plans; each step asks for the plan of the step before."""
BUCKET_ELEMENTS = 1 << 18
"""A bucket is closed by the parameter that makes it at least this large: 1 MiB of float32."""


@dataclass(frozen=True, slots=True)
class Add:
    """Add buffer `source` onto buffer `target`."""

    target: int
    source: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """Compute shard `shard` into buffer `buffer`, then perform `additions`."""

    shard: int
    buffer: int
    additions: tuple[Add, ...]


@dataclass(frozen=True, slots=True)
class AccumulationPlan:
    """The plan of a rank that holds the shards [lo, hi); `partials` maps its tree nodes to their buffers."""

    leaves: tuple[Leaf, ...]
    partials: Mapping[Node, int]
    buffers: int

    @classmethod
    @lru_cache(maxsize=PLANS_MAX)
    def of(cls, shards: int, lo: int, hi: int) -> AccumulationPlan:
        """Return the plan for the shards [lo, hi) of the tree over [0, shards). Raises `ProgramError` if
        invalid.
        """
        visits: list[tuple[int, int, list[Add]]] = []
        free: list[int] = []
        buffers = 0

        def visit(node: Node) -> int:
            nonlocal buffers
            if node[1] - node[0] == 1:
                if not free:
                    free.append(buffers)
                    buffers += 1
                buffer = free.pop()
                visits.append((node[0], buffer, []))
                return buffer
            left, right = (visit(child) for child in split(node))
            visits[-1][2].append(Add(left, right))
            free.append(right)
            return left

        partials = {node: visit(node) for node in shard_tree_nodes(shards, lo, hi)}
        leaves = tuple(Leaf(shard, buffer, tuple(adds)) for shard, buffer, adds in visits)
        return cls(leaves, MappingProxyType(partials), buffers)

    @staticmethod
    def perform(additions: Sequence[Add], buffers: Sequence[Array], span: slice) -> None:
        """Perform `additions` on the elements `span` of the flat `buffers`, in place."""
        with spans.BACKWARD:
            for addition in additions:
                add_onto(buffers[addition.target][span], buffers[addition.source][span])


def assignment_of(shares: Sequence[int]) -> Assignment:
    """Return contiguous ranges of so many shards each, one behind the other."""
    stops = np.cumsum(shares).tolist()
    return tuple((stop - share, stop) for share, stop in zip(shares, stops, strict=True))


def buffers_of(assignment: Assignment) -> int:
    """Return the partial sums that any of these ranks holds at once."""
    shards = max(stop for _, stop in assignment)
    return max(AccumulationPlan.of(shards, *share).buffers for share in assignment)


def buffers_most(shards: int, sizes: Iterable[int]) -> int:
    """Return the partial sums that any rank of groups of these sizes holds at once, each with its share."""
    shares = (share for size in sizes for share in assign_shards(shards, size))
    return max(AccumulationPlan.of(shards, *share).buffers for share in shares)


def add_onto(target: Array, source: Array) -> None:
    """Add `source` onto `target`, in place: one node of the tree. 16-bit floats are rounded at each node."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is seen in the norm
        target += source


class Buckets:
    """The flat gradient divided into spans that become final together, from the last parameters to the
    first."""

    def __init__(self, layout: ParameterLayout, *, bucket_elements: int = BUCKET_ELEMENTS) -> None:
        self.spans: list[slice] = []
        self._bucket_of = [0] * len(layout.slots)
        self._sizes: list[int] = []
        stop = layout.size
        members = 0
        for index in range(len(layout.slots) - 1, -1, -1):
            start = layout.slots[index].offset
            self._bucket_of[index] = len(self.spans)
            members += 1
            if stop - start >= bucket_elements or index == 0:
                self.spans.append(slice(start, stop))
                self._sizes.append(members)
                stop, members = start, 0
        self._left = list(self._sizes)

    def begin(self) -> None:
        """Start a backward pass: no parameter is final yet."""
        self._left = list(self._sizes)

    def ready(self, parameter: int) -> slice | None:
        """Note that `parameter` is final; return the span of its bucket if that was its last missing
        parameter.
        """
        bucket = self._bucket_of[parameter]
        self._left[bucket] -= 1
        return self.spans[bucket] if self._left[bucket] == 0 else None


@dataclass(frozen=True, slots=True)
class ShardSum:
    """Reduce-scatter of logical shards over `ranks` ranks, in an order independent of their number.

    These hold the shards [start, stop) of `shards`: all of them, or what one of several such groups holds.

    A rank adds up the subtrees that it holds completely (`AccumulationPlan`), sends each other rank its slice
    of these partial sums, and folds the slices it receives along the rest of the tree
    (`zbmd.collectives.algorithms.shard_tree`). The traffic is that of any reduce-scatter if each rank's
    shards are one subtree, as with 2, 4 or 8 ranks whose number divides that of the shards; otherwise a rank
    sends as many slices as it holds subtrees. `ranges[r]`: the shards of rank r; `nodes[r]`: the subtrees
    that it holds completely.
    """

    shards: int
    ranges: Assignment
    nodes: tuple[tuple[Node, ...], ...]

    @classmethod
    def of(cls, shards: int, ranks: int, *, groups: int = 1, group: int = 0) -> ShardSum:
        """Divide the shards into contiguous ranges (`assign_shards`), over so many `groups` of `ranks` each.

        group: which of them this is. Raises `ProgramError` for a number out of range.
        """
        return cls.over(shards, assign_shards(shards, groups * ranks)[group * ranks :][:ranks])

    @classmethod
    def over(cls, shards: int, ranges: Assignment) -> ShardSum:
        """Return that of ranks which hold these ranges of the shards, one behind the other."""
        return cls(shards, ranges, tuple(tuple(shard_tree_nodes(shards, *own)) for own in ranges))

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.ranges)

    @property
    def roots(self) -> list[Node]:
        """The subtrees that all ranks together hold completely: one, if they hold all shards."""
        return shard_tree_nodes(self.shards, self.ranges[0][0], self.ranges[-1][1])

    @property
    def width(self) -> int:
        """Return the number of partial sums that every rank sends: that of the rank with the most
        subtrees."""
        return max(map(len, self.nodes))

    def plan(self, rank: int) -> AccumulationPlan:
        """Return how `rank` computes its partial sums."""
        return AccumulationPlan.of(self.shards, *self.ranges[rank])

    def fold(self, received: Sequence[Array]) -> dict[Node, Array]:
        """Return the sums of `roots`, (slice,) each. `received[k]`, (ranks, slice): each rank's k-th partial
        sum.

        16-bit floats are rounded at every node. Partial sums that a rank does not have are not read; the
        others are overwritten.
        """
        partials = {
            node: received[k][rank] for rank, nodes in enumerate(self.nodes) for k, node in enumerate(nodes)
        }
        return {root: _folded(partials, root) for root in self.roots}


def state_sums(shards: int, assignment: Assignment, states: int) -> list[ShardSum]:
    """Return the sum within each of `states` groups of ranks, neighbours in `assignment`, that share one."""
    ranks = len(assignment) // states
    return [ShardSum.over(shards, assignment[at * ranks :][:ranks]) for at in range(states)]


def partials_of(every: Sequence[ShardSum]) -> tuple[int, int]:
    """Return how many partial sums any rank of these groups holds at once, and how many it sends."""
    buffers = (sums.plan(rank).buffers for sums in every for rank in range(sums.ranks))
    return max(1, *buffers), max(sums.width for sums in every)


def _folded(partials: Mapping[Node, Array], node: Node) -> Array:
    """Return the sum of the shards of `node`. (A closure that calls itself would keep the arrays alive.)"""
    found: Array | None = partials.get(node)
    if found is not None:
        return found
    left, right = (_folded(partials, child) for child in split(node))
    add_onto(left, right)
    return left


GATHER_POINT: Final = faults.declare(
    "optimizer.gather", "in an update: this rank has its piece of a matrix, and not the others' yet"
)


def gather_pieces(group: TensorGroup, piece: Array) -> Sequence[Array]:
    """Return the `piece` of each member, in member order; called by all members together. Pieces have one
    length.

    Used by optimizers that need whole matrices (`zbmd.training.optim.muon`). Blocks the calling thread.
    """
    faults.hit(GATHER_POINT)
    end_ns = group.deadline_ns()
    with spans.COMM:
        every: Array = group.submit(lambda c: c.all_gather(piece, deadline_ns=end_ns)).result()
        return list(every)


def gather_rows(group: Group, rows: Array) -> Array:
    """Return the `rows` of all members, concatenated in member order; their numbers may differ. Blocks."""
    end_ns = group.deadline_ns()
    with spans.COMM:
        every: Array = group.submit(lambda c: c.all_gather_v(rows, deadline_ns=end_ns)).result()
        return every


class ShardReduction:
    """The reductions of one step, of this rank's `buffers` into `total`, along the shard tree.

    `assignment[i]` are the shards of the i-th member of `group`; `plan` is what this rank does with its own.
    A rank that is alone has the sum as soon as its shards are done: nothing is sent or copied, and it needs
    neither `group` nor `total`.
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
        self._sums = ShardSum.over(max(stop for _, stop in assignment), assignment)
        self.total: Array
        """The sum, after `finish` has returned."""
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
        out, end_ns, sums = self.total[span], group.deadline_ns(), self._sums
        self._futures.append(
            group.submit(lambda c: all_reduce_partials(c, partials, out, sums, deadline_ns=end_ns))
        )

    @property
    def is_alone(self) -> bool:
        """Return whether one rank holds all shards, so that nothing is sent."""
        return self._group is None

    @property
    def done(self) -> bool:
        """Return whether everything that was submitted has ended."""
        return all(future.done() for future in self._futures)

    def finish(self) -> None:
        """Wait until all of `total` holds the sum. Raises `PeerLost` or `OperationAborted`."""
        with spans.COMM:
            for future in self._futures:
                future.result()

    def drain(self) -> None:
        """Wait until nothing accesses the buffers any more."""
        wait(self._futures)


def is_alone(assignment: Assignment) -> bool:
    """Return whether one rank holds all shards; it then needs no separate memory for the sum."""
    return len(assignment) == 1


def all_reduce_partials(
    communicator: Communicator,
    partials: Mapping[Node, Array],
    out: Array,
    sums: ShardSum,
    *,
    deadline_ns: int,
) -> Array:
    """Sum the `partials` of all ranks along the shard tree into `out`, on all. Raises as operations."""
    if is_narrow(out):
        return _reduce_rounded(communicator, partials, out, sums, deadline_ns=deadline_ns)
    made: Array = communicator.all_reduce_shards(
        partials, out, shards=sums.shards, assignment=sums.ranges, deadline_ns=deadline_ns
    )
    return made


def _reduce_rounded(
    communicator: Communicator,
    partials: Mapping[Node, Array],
    out: Array,
    sums: ShardSum,
    *,
    deadline_ns: int,
) -> Array:
    """Sum the `partials` of all ranks along the shard tree into `out`, rounding at each node.

    Unlike `Communicator.all_reduce_shards`, which rounds once: here each rank folds one slice of the partial
    sums of all ranks, and the slices are gathered.
    """
    ranks, each = sums.ranks, -(-out.size // sums.ranks)
    empty, held = maker_of(out), list(partials.values())
    sent = [empty(ranks * each, out.dtype) for _ in range(sums.width)]
    received = [empty(ranks * each, out.dtype).reshape(ranks, each) for _ in range(sums.width)]
    every = empty(ranks * each, out.dtype)
    for row, partial in zip(sent, held, strict=False):
        row[: out.size] = partial
        row[out.size :] = 0
    for row in sent[len(held) :]:
        row[:] = 0
    for row, into in zip(sent, received, strict=True):
        communicator.all_to_all(row.reshape(ranks, each), into, deadline_ns=deadline_ns)
    (total,) = sums.fold(received).values()
    communicator.all_gather(total, every.reshape(ranks, each), deadline_ns=deadline_ns)
    out[:] = every[: out.size]
    return out
