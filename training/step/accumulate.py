"""Accumulate gradients over a rank's logical shards, in the order of the shard tree.

A rank visits its shards from left to right and adds two buffers as soon as a subtree is complete, so it needs
one buffer per level of the tree, not one per shard. The additions after the last shard are done bucket by
bucket, because buckets become final one after the other while the last backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Node, assign_shards, shard_tree_nodes, split
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout

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
