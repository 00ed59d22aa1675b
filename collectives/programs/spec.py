"""Specifications of programs: inputs, outputs and the order of the reduction.

A *label* is one contribution: an input of one rank, or one subtree of logical shards. A `Tree` says in
which order labels are combined: a label, or a pair of trees; `(a, b)` is `a op b`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, Union

from zbmd.collectives.programs.program import IN, OUT, PUB, Operand

Tree: TypeAlias = Union[int, "tuple[Tree, Tree]"]
Order: TypeAlias = Callable[[int], Tree]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The place that must end up holding `tree`."""

    place: Operand
    tree: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The contract of one collective over `n` ranks.

    `inputs` maps a place to the label it holds at entry. `sent(rank, reader)` gives the chunks of a rank's
    `pub` that another has; None: it has all, in shared memory. `aliases` maps a place to the one that lies in
    the same memory (operations in place). With `synchronises` no rank may complete before every rank has
    begun, by the notifications of the programs alone.
    """

    n: int
    blocks: int
    chunks: int
    labels: tuple[str, ...]
    inputs: Mapping[Operand, int]
    outputs: tuple[Output, ...]
    aliases: Mapping[Operand, Operand] = field(default_factory=dict[Operand, Operand])
    synchronises: bool = False
    sent: Callable[[int, int], range] | None = None


def left_fold(labels: Iterable[int]) -> Tree:
    """The tree ((l0, l1), l2), … of at least one label."""
    first, *rest = labels
    tree: Tree = first
    for label in rest:
        tree = (tree, label)
    return tree


def rank_labels(n: int) -> tuple[str, ...]:
    """Labels 0..n-1 for one input a rank."""
    return tuple(f"input of rank {rank}" for rank in range(n))


def all_reduce_spec(n: int, chunks: int, *, order: Order, in_place: bool, eager: bool = False) -> Spec:
    """Every rank ends with the reduction of all inputs, chunk c as the tree `order(c)` over ranks."""
    places = [(rank, chunk) for rank in range(n) for chunk in range(chunks)]
    source = PUB if eager else IN
    trees = [order(chunk) for chunk in range(chunks)]
    return Spec(
        n=n,
        blocks=1,
        chunks=chunks,
        labels=rank_labels(n),
        inputs={Operand(rank, source, chunk): rank for rank, chunk in places},
        outputs=tuple(Output(place=Operand(rank, OUT, chunk), tree=trees[chunk]) for rank, chunk in places),
        aliases={Operand(r, OUT, c): Operand(r, IN, c) for r, c in places} if in_place else {},
    )


def reduce_scatter_spec(n: int, chunks: int, *, order: Order, in_place: bool, eager: bool = False) -> Spec:
    """Rank r ends with block r of the reduction, chunk c as the tree `order(c)` over ranks."""
    own = [(c // (chunks // n), c) for c in range(chunks)]
    return Spec(
        n=n,
        blocks=n,
        chunks=chunks,
        labels=rank_labels(n),
        inputs={Operand(rank, PUB if eager else IN, c): rank for rank in range(n) for c in range(chunks)},
        outputs=tuple(Output(place=Operand(rank, OUT, chunk), tree=order(chunk)) for rank, chunk in own),
        aliases={Operand(r, OUT, c): Operand(r, IN, c) for r, c in own} if in_place else {},
    )


def all_gather_spec(n: int, chunks: int, *, in_place: bool, eager: bool = False) -> Spec:
    """Every rank ends with all inputs, block r being that of rank r."""
    own = [(c // (chunks // n), c) for c in range(chunks)]
    return Spec(
        n=n,
        blocks=n,
        chunks=chunks,
        labels=rank_labels(n),
        inputs={Operand(rank, PUB if eager else IN, chunk): rank for rank, chunk in own},
        outputs=tuple(
            Output(place=Operand(rank, OUT, chunk), tree=owner) for rank in range(n) for owner, chunk in own
        ),
        aliases={Operand(r, OUT, c): Operand(r, IN, c) for r, c in own} if in_place else {},
    )


def broadcast_spec(n: int, chunks: int, *, root: int, eager: bool = False) -> Spec:
    """Every rank's `out` ends with what the root's `out` (or `pub`) held at entry."""
    sources = {Operand(root, OUT, chunk): root for chunk in range(chunks)}
    if eager:
        sources |= {Operand(root, PUB, chunk): root for chunk in range(chunks)}
    return Spec(
        n=n,
        blocks=1,
        chunks=chunks,
        labels=rank_labels(n),
        inputs=sources,
        outputs=tuple(
            Output(place=Operand(rank, OUT, chunk), tree=root) for rank in range(n) for chunk in range(chunks)
        ),
    )


def at_root(spec: Spec, root: int) -> Spec:
    """The same for an operation that leaves its result at the root alone."""
    return replace(
        spec,
        outputs=tuple(output for output in spec.outputs if output.place.rank == root),
        aliases={place: same for place, same in spec.aliases.items() if place.rank == root},
    )


def scatter_spec(n: int, chunks: int, *, root: int, in_place: bool, eager: bool = False) -> Spec:
    """Rank r ends with block r of the root's input."""
    own = [(c // (chunks // n), c) for c in range(chunks)]
    return Spec(
        n=n,
        blocks=n,
        chunks=chunks,
        labels=rank_labels(n),
        inputs={Operand(root, PUB if eager else IN, chunk): root for chunk in range(chunks)},
        outputs=tuple(Output(place=Operand(rank, OUT, chunk), tree=root) for rank, chunk in own),
        aliases={Operand(r, OUT, c): Operand(r, IN, c) for r, c in own if r == root} if in_place else {},
    )


def all_to_all_spec(n: int, chunks: int, *, eager: bool = False) -> Spec:
    """Block s*n + d goes from rank s to rank d."""
    per_block = chunks // (n * n)
    routes = [(c, *divmod(c // per_block, n)) for c in range(chunks)]
    return Spec(
        n=n,
        blocks=n * n,
        chunks=chunks,
        labels=rank_labels(n),
        inputs={Operand(source, PUB if eager else IN, chunk): source for chunk, source, _ in routes},
        outputs=tuple(
            Output(place=Operand(target, OUT, chunk), tree=source) for chunk, source, target in routes
        ),
    )


def barrier_spec(n: int) -> Spec:
    """No data; no rank completes before every rank has begun."""
    return Spec(n=n, blocks=1, chunks=1, labels=(), inputs={}, outputs=(), synchronises=True)
