"""Gradients summed along the tree of logical shards, part by part, each by the rank that keeps it.

The reduce-scatter of ZeRO, in an order that does not depend on the number of ranks: a rank adds up the
subtrees that it holds whole (`AccumulationPlan`), sends each other rank its part of these partial sums, and
folds the parts that come along the rest of the tree (`zbmd.collectives.algorithms.shard_tree`). The bytes
that travel are those of any reduce-scatter where each rank's shards are one subtree, as with 2, 4 or 8 ranks
whose number divides that of the shards; else a rank sends as many parts as it holds subtrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbmd.collectives.algorithms.shard_tree import Node, assign_shards, shard_tree_nodes, split
from zbmd.training.autograd.array_module import Array
from zbmd.training.step.accumulate import AccumulationPlan, add_onto


@dataclass(frozen=True, slots=True)
class ShardSum:
    """`shards` logical shards over `ranks` ranks; `nodes[r]`: the subtrees that rank r holds whole."""

    shards: int
    ranks: int
    nodes: tuple[tuple[Node, ...], ...]

    @classmethod
    def of(cls, shards: int, ranks: int) -> ShardSum:
        """Contiguous ranges of shards (`assign_shards`). Raises `ProgramError` for a number out of range."""
        ranges = assign_shards(shards, ranks)
        return cls(shards, ranks, tuple(tuple(shard_tree_nodes(shards, *own)) for own in ranges))

    @property
    def width(self) -> int:
        """Partial sums that every rank sends: as many as the one with most subtrees has."""
        return max(map(len, self.nodes))

    def plan(self, rank: int) -> AccumulationPlan:
        """How `rank` computes its partial sums."""
        return AccumulationPlan.of(self.shards, *assign_shards(self.shards, self.ranks)[rank])

    def fold(self, received: Sequence[Array]) -> Array:
        """The sum of all shards, (part,). `received[k]`, (ranks, part): each rank's k-th partial.

        Of 16-bit floats every node is rounded. Partials that a rank does not have are not read; others are
        overwritten.
        """
        partials = {
            node: received[k][rank] for rank, nodes in enumerate(self.nodes) for k, node in enumerate(nodes)
        }

        def value(node: Node) -> Array:
            found: Array | None = partials.get(node)
            if found is not None:
                return found
            left, right = (value(child) for child in split(node))
            add_onto(left, right)
            return left

        return value((0, self.shards))
