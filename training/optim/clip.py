"""Clip gradients by the global norm, in one fixed order of summation, also of gradients in slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from zbmd.training.autograd.array_module import Array, widened
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.transport.errors import RemoteProtocolError, ZbmdError

Pieces = NDArray[np.float64]


def _whole_blocks(span: slice) -> range:
    """Return the blocks that lie entirely in the elements `span` of the whole array."""
    return range(-(-span.start // NORM_BLOCK), span.stop // NORM_BLOCK)


def pieces_of(grads: Array, span: slice) -> Pieces:
    """Return what other ranks need of a slice of the gradient for the global norm: float64, exact.

    `global_norm` sums squares in blocks of the whole flat array, and slices do not end at block boundaries.
    So the pieces are: the elements of `grads`, which are the elements `span` of the whole, before its first
    whole block; the sum of squares of each whole block; the elements after the last.
    """
    blocks = _whole_blocks(span)
    if not blocks:
        return grads.astype(np.float64)
    first, last = blocks.start * NORM_BLOCK - span.start, blocks.stop * NORM_BLOCK - span.start
    sums = [
        float(np.dot(block, block))
        for block in (widened(grads[at : at + NORM_BLOCK]) for at in range(first, last, NORM_BLOCK))
    ]
    return np.concatenate([grads[:first].astype(np.float64), sums, grads[last:].astype(np.float64)])


def pieces_length(span: slice) -> int:
    """Return the length of the pieces for `span`."""
    blocks = _whole_blocks(span)
    size: int = span.stop - span.start
    return size - len(blocks) * (NORM_BLOCK - 1)


def norm_of(pieces: Sequence[tuple[slice, Pieces]], dtype: np.dtype[np.floating]) -> float:
    """Return the norm of the whole gradient, given the pieces of all slices in order; same bits as
    `global_norm`.

    `dtype`: of the computation. Raises `TrainingDiverged` if the norm is not finite, `RemoteProtocolError` if
    pieces have a wrong length.
    """
    total, open_block = 0.0, list[Pieces]()

    def close_block() -> float:
        block = np.concatenate(open_block).astype(dtype) if open_block else np.zeros(0, dtype)
        open_block.clear()
        return float(np.dot(block, block))

    for span, values in pieces:
        blocks = _whole_blocks(span)
        head = blocks.start * NORM_BLOCK - span.start if blocks else span.stop - span.start
        if len(values) != pieces_length(span):
            raise RemoteProtocolError(f"{len(values)} pieces of a gradient came for elements {span}")
        if not blocks and span.start // NORM_BLOCK != span.stop // NORM_BLOCK:
            cut = span.stop // NORM_BLOCK * NORM_BLOCK - span.start
            open_block.append(values[:cut])
            total += close_block()
            open_block.append(values[cut:])
            continue
        open_block.append(values[:head])
        if blocks:
            if span.start % NORM_BLOCK or open_block:
                total += close_block()
            for value in values[head : head + len(blocks)]:
                total += float(value)
            open_block.append(values[head + len(blocks) :])
    total += close_block()
    return norm_from(total)


NORM_BLOCK = 16_384  # elements


class TrainingDiverged(ZbmdError):
    """The gradient is not finite; the state before this step is the last usable one."""


def global_norm(grads: Array, *, xp: ModuleType) -> float:
    """Return the Euclidean norm of `grads`, 1-D of any float dtype.

    The squares are summed in blocks of `NORM_BLOCK` elements in `grads`' dtype (float32 for 16-bit floats),
    and the sums of blocks in order in double precision: the same bits wherever the array lies. Raises
    `TrainingDiverged` if the norm is not finite.
    """
    total = 0.0
    for start in range(0, len(grads), NORM_BLOCK):
        block = widened(grads[start : start + NORM_BLOCK])
        total += float(xp.dot(block, block))
    return norm_from(total)


def norm_from(squares: float) -> float:
    """Return the root of a sum of squares. Raises `TrainingDiverged` if it is not finite."""
    norm = math.sqrt(squares) if squares >= 0.0 else math.nan
    if not math.isfinite(norm):
        raise TrainingDiverged(
            f"the gradient's norm is {norm}: the training diverged. Lower the learning rate, or clip harder."
        )
    return norm


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A parameter whose gradient has `bad` of `size` elements that are not finite."""

    name: str
    is_nan: bool
    bad: int
    size: int

    def __str__(self) -> str:
        kind = "NaN" if self.is_nan else "infinite"
        return f"that of {self.name} is {kind} ({self.bad:,} of {self.size:,} elements are not finite)"


def non_finite(layout: ParameterLayout, grads: Array, *, xp: ModuleType) -> NonFinite | None:
    """Return the first parameter, in the order of the backward pass, whose gradient is not finite; None if
    all are.

    The backward pass goes from the last parameter to the first, and propagates what is not finite.
    """
    views = layout.views(grads)
    for slot, view in zip(reversed(layout.slots), reversed(views), strict=True):
        bad = int(slot.size - xp.isfinite(view).sum())
        if bad:
            return NonFinite(slot.name, bool(xp.isnan(view).any()), bad, slot.size)
    return None


def clip_scale(norm: float, *, limit: float) -> float:
    """Return the factor, at most 1, that reduces a gradient of norm `norm` to the norm `limit`."""
    return 1.0 if norm <= limit else limit / norm
