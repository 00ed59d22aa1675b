"""All-reduce over logical shards, with bits that do not depend on which rank holds which shard.

A contribution is a logical shard, 0..S-1, and S is fixed for a job. Shards are reduced along one binary
tree over [0, S) in which a node [lo, hi) has the children [lo, mid) and [mid, hi) with
mid = lo + (hi - lo) // 2, so the tree depends on S alone, and a subtree's shape on its length alone.
A rank combines the maximal subtrees that it wholly holds by itself (`shard_tree_nodes`,
`reduce_shards`); the program combines these partial sums, slice by slice, in exactly the tree's order.
Thus every assignment of shards to ranks, a single rank included, ends with the same bits.

(Fixed-order reduction trees for reproducible sums: Demmel and Nguyen, "Parallel Reproducible
Summation", IEEE Transactions on Computers 64(7), 2015, section 2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.compose import Leaf, TreeReduction, exchange_slices, finish_program
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.programs.program import (
    IN,
    OUT,
    Instruction,
    Operand,
    Program,
    chunk_range,
    input_buffer,
)
from zbmd.collectives.programs.spec import Output, Spec, Tree

Node: TypeAlias = tuple[int, int]
Assignment: TypeAlias = tuple[Node, ...]

MAX_SHARDS = 4096

ScalarT = TypeVar("ScalarT", bound="np.generic[Any]")


def whole_of(ranks: int, replica: int) -> int:
    """Return how many of `ranks` make whole replicas, each of `replica` ranks; 0: any number does."""
    return ranks // replica * replica if replica else ranks


def split(node: Node) -> tuple[Node, Node]:
    """The children of a node of at least two shards."""
    lo, hi = node
    mid = lo + (hi - lo) // 2
    return (lo, mid), (mid, hi)


def shard_tree_nodes(shards: int, lo: int, hi: int) -> list[Node]:
    """The maximal subtrees of the tree over [0, shards) that lie wholly in [lo, hi), in order.

    Raises `ProgramError` unless 0 <= lo <= hi <= shards <= `MAX_SHARDS`.
    """
    if not 0 <= lo <= hi <= shards or not 1 <= shards <= MAX_SHARDS:
        raise ProgramError(f"shards [{lo}, {hi}) are no range of 0..{shards} (at most {MAX_SHARDS} shards)")

    def visit(node: Node) -> list[Node]:
        if node[1] <= lo or hi <= node[0]:
            return []
        if lo <= node[0] and node[1] <= hi:
            return [node]
        left, right = split(node)
        return visit(left) + visit(right)

    return visit((0, shards))


def reduce_shards(arrays: Sequence[NDArray[ScalarT]]) -> NDArray[ScalarT]:
    """The sum of one subtree's shards in tree order, a new array: the reference for the bits.

    `arrays` are the shards of any node, in order, all of one shape and dtype.
    """
    if len(arrays) == 1:
        return arrays[0].copy()

    def visit(lo: int, hi: int) -> NDArray[ScalarT]:
        if hi - lo == 1:
            return arrays[lo]
        left, right = split((lo, hi))
        total: NDArray[ScalarT] = np.add(visit(*left), visit(*right))
        return total

    return visit(0, len(arrays))


def assign_shards(shards: int, n: int) -> Assignment:
    """Balanced contiguous ranges, rank r holding [r * shards // n, (r + 1) * shards // n)."""
    return tuple((rank * shards // n, (rank + 1) * shards // n) for rank in range(n))


def check_assignment(shards: int, assignment: Assignment) -> None:
    """Raise `ProgramError` unless the ranges cover every shard once (in any order, some perhaps empty)."""
    if not 1 <= shards <= MAX_SHARDS:
        raise ProgramError(f"the number of shards is {shards}; it must be 1..{MAX_SHARDS}")
    end = 0
    for lo, hi in sorted(part for part in assignment if part[0] != part[1]):
        if lo != end or hi < lo:
            raise ProgramError(f"assignment {assignment} does not hold every shard of {shards} exactly once")
        end = hi
    if end != shards or any(lo > hi or lo < 0 for lo, hi in assignment):
        raise ProgramError(f"assignment {assignment} does not hold every shard of {shards} exactly once")


def partials_of(shards: int, assignment: Assignment) -> list[tuple[Node, Operand]]:
    """Every partial sum that the program combines and where it lies (chunk 0), in shard order.

    The k-th node of a rank's `shard_tree_nodes` is its k-th input.
    """
    places = [
        (node, Operand(rank, input_buffer(k), 0))
        for rank, (lo, hi) in enumerate(assignment)
        for k, node in enumerate(shard_tree_nodes(shards, lo, hi))
    ]
    return sorted(places)


def _partial_at(partials: Sequence[tuple[Node, Operand]], chunk: int) -> Leaf:
    """The place of each partial sum of a chunk."""
    return lambda label: partials[label][1]._replace(number=chunk)


def combination_tree(shards: int, nodes: Sequence[Node]) -> Tree:
    """The part of the shard tree above `nodes` (a partition of [0, shards)); label i is nodes[i]."""
    label = {node: i for i, node in enumerate(nodes)}

    def visit(node: Node) -> Tree:
        if node in label:
            return label[node]
        left, right = split(node)
        return (visit(left), visit(right))

    return visit((0, shards))


def shard_tree_all_reduce(n: int, rank: int, chunks: int, shards: int, assignment: Assignment) -> Program:
    """Combine the ranks' partial sums in tree order; every rank ends with the total.

    Each rank makes one slice of the chunks, whatever it holds itself, then slices are exchanged.
    """
    check_assignment(shards, assignment)
    if len(assignment) != n:
        raise ProgramError(f"the assignment names {len(assignment)} ranks, the group has {n}")
    partials = partials_of(shards, assignment)
    tree = combination_tree(shards, [node for node, _ in partials])
    reduction = TreeReduction(rank)
    instructions: list[Instruction] = []
    for chunk in chunk_range(rank, n, chunks):
        place_of, out = _partial_at(partials, chunk), Operand(rank, OUT, chunk)
        instructions += reduction.emit(tree, chunk, place_of, out)
    instructions += exchange_slices(n, rank, chunks)
    return finish_program(
        "shard_tree_all_reduce", n, rank, 1, chunks, instructions, scratch_slots=reduction.slots
    )


def shard_tree_spec(n: int, chunks: int, shards: int, assignment: Assignment, *, in_place: bool) -> Spec:
    """Every rank's `out` is the canonical tree. In place: `out` lies on the first input of a rank."""
    partials = partials_of(shards, assignment)
    nodes = [node for node, _ in partials]
    tree = combination_tree(shards, nodes)
    holders = {place.rank for _, place in partials}
    aliases = {
        Operand(rank, OUT, chunk): Operand(rank, IN, chunk) for rank in holders for chunk in range(chunks)
    }
    return Spec(
        n=n,
        blocks=1,
        chunks=chunks,
        labels=tuple(f"shards [{lo}, {hi})" for lo, hi in nodes),
        inputs={
            place._replace(number=chunk): label
            for label, (_, place) in enumerate(partials)
            for chunk in range(chunks)
        },
        outputs=tuple(
            Output(place=Operand(rank, OUT, chunk), tree=tree) for rank in range(n) for chunk in range(chunks)
        ),
        aliases=aliases if in_place else {},
    )
