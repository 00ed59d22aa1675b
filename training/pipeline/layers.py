"""Which layers of a model each part of a pipeline holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from zbmd.training.pipeline.program import Shape
from zbmd.transport.errors import UserError


def layers_of_parts(layers: int, shape: Shape) -> tuple[int, ...]:
    """Equally many layers for each part. Raises `UserError` if they do not divide."""
    if layers < 1 or layers % shape.parts:
        below = layers // shape.parts * shape.parts
        near = f"{below} or {below + shape.parts}" if below > 0 else f"{shape.parts}"
        chunks = f" of {shape.chunks} chunks" if shape.chunks > 1 else ""
        raise UserError(
            f"{layers} layers do not divide over {shape.stages} stages{chunks}: that makes {shape.parts} "
            f"parts, which want a multiple of {shape.parts} layers, such as {near}."
        )
    return (layers // shape.parts,) * shape.parts


def even_cuts(blocks: int, shape: Shape) -> tuple[range, ...]:
    """The layers of each part: equally many of a model's blocks, with the embedding first and the head last.

    Raises `UserError` if the blocks do not divide over the parts.
    """
    if shape.parts == 1:
        return (range(blocks + 2),)
    each = layers_of_parts(blocks, shape)[0]
    starts = [0, *range(1 + each, 1 + blocks, each), blocks + 2]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def balanced_cuts(costs: Sequence[float], parts: int) -> tuple[range, ...]:
    """Cut layers of these costs, in their order, into `parts` runs whose dearest is as cheap as can be.

    The linear partition problem, by dynamic programming over prefixes; every run has a layer. Raises
    `UserError` if there are fewer layers than parts.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise UserError(f"a model of {count} layers cannot be cut into {parts} parts: take fewer stages.")
    prefix = [0.0, *accumulate(costs)]
    best, cuts = prefix[:], list[list[int]]()
    for part in range(1, parts):
        row, cut = [0.0] * (count + 1), [0] * (count + 1)
        for end in range(part + 1, count + 1):
            cut[end], row[end] = _last_cut(best, prefix, part, end)
        best = row
        cuts.append(cut)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    bounds = [0, *reversed(ends)]
    return tuple(range(start, end) for start, end in pairwise(bounds))


def _last_cut(best: Sequence[float], prefix: Sequence[float], first: int, end: int) -> tuple[int, float]:
    """Where the last run of layers [0, end) begins, at `first` or later, and what its dearest run costs.

    What stands before a cut gets dearer the later it is, what stands behind it cheaper: the best is where
    they cross.
    """
    cross = (
        bisect_left(range(first, end), True, key=lambda cut: best[cut] >= prefix[end] - prefix[cut]) + first
    )
    choices = [cut for cut in (cross - 1, cross) if first <= cut < end]
    return min(
        ((cut, max(best[cut], prefix[end] - prefix[cut])) for cut in choices), key=lambda choice: choice[1]
    )
