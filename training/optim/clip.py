"""Clip gradients by the global norm, in one fixed order of summation, also of gradients in slices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from zbmd.training.autograd.array_module import Array, to_host, widened
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.ops.cuda.device_array import SQUARES_BLOCK
from zbmd.transport.errors import RemoteProtocolError, ZbmdError

Pieces = NDArray[np.float64]
NORM_BLOCK = SQUARES_BLOCK  # elements
_THREADS, _LANES = 256, 32
"""Of a block of the kernel `block_squares`, and of a warp."""


def _runs(span: slice, size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the start and stop of each run of `span` in one block, and whether the run is all of the block.

    The blocks are those of an array of `size` elements, of which the last one may be shorter.
    """
    for start in range(span.start // NORM_BLOCK * NORM_BLOCK, span.stop, NORM_BLOCK):
        stop = min(start + NORM_BLOCK, size)
        yield max(start, span.start), min(stop, span.stop), start >= span.start and stop <= span.stop


def pieces_of(grads: Array, span: slice, *, size: int = sys.maxsize) -> Pieces:
    """Return what other ranks need of a slice of the gradient for the global norm: float64, exact.

    `global_norm` sums squares in blocks of the whole flat array, and slices do not end at block boundaries.
    So the pieces of `grads`, which are the elements `span` of the whole, are in their order: the sum of
    squares of each whole block, and the elements of each other one. size: of the whole, if it is known; its
    last block is then whole, too.
    """
    found, whole = [np.zeros(0)], list[slice]()

    def close_whole() -> None:
        if whole:  # they follow each other: only the first and the last run may be less than a block
            found.append(_block_squares(grads[whole[0].start : whole[-1].stop]))
            whole.clear()

    for start, stop, is_whole in _runs(span, size):
        own = slice(start - span.start, stop - span.start)
        if is_whole:
            whole.append(own)
            continue
        close_whole()
        found.append(to_host(grads[own]).astype(np.float64))
    close_whole()
    return np.concatenate(found)


def _block_squares(grads: Array, xp: ModuleType = np) -> Pieces:
    """Return the sums of squares of the blocks of `grads`, which begins with one."""
    of_device: Callable[[], NDArray[np.float32]] | None = getattr(grads, "block_squares", None)
    if of_device is not None:
        return of_device().astype(np.float64)
    starts = range(0, len(grads), NORM_BLOCK)
    return np.array([_squared(grads[start : start + NORM_BLOCK], xp) for start in starts])


def pieces_length(span: slice, *, size: int = sys.maxsize) -> int:
    """Return the length of the pieces for `span`."""
    return sum(1 if is_whole else stop - start for start, stop, is_whole in _runs(span, size))


def square_like(grads: Array) -> Squared:
    """Return what adds up a block as is done where `grads` lies."""
    return squared_as_kernel if hasattr(grads, "block_squares") else squared


def squared(block: Array) -> float:
    """Return the sum of squares of a block as the host adds it up."""
    return float(np.dot(block, block))


def squared_as_kernel(block: Array) -> float:
    """Return the sum of squares of a float32 block in the order of the kernel `block_squares`.

    With its bits, if the values are bfloat16's: their products are exact.
    """
    rows = -(-len(block) // _THREADS)
    padded = np.zeros((rows, _THREADS), np.float32)
    padded.reshape(-1)[: len(block)] = block
    sums = np.zeros(_THREADS, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is seen in the norm
        for row in np.square(padded):
            sums += row
        warps = _warp_sums(sums.reshape(-1, _LANES))
        return float(_warp_sums(np.pad(warps, (0, _LANES - len(warps)))[np.newaxis])[0])


def _warp_sums(lanes: Array) -> Array:
    """Return the sums of the rows of `lanes`, (warps, 32), as lanes exchange them: by halves."""
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums: Array = lanes[:, 0]
    return sums


Squared = Callable[[Array], float]
"""Adds up the squares of a block that lies in pieces on several ranks."""


def squares_from(
    pieces: Sequence[tuple[slice, Pieces]],
    dtype: np.dtype[np.floating],
    *,
    size: int = sys.maxsize,
    square: Squared = squared,
) -> float:
    """Return the sum of squares of the whole gradient, given the pieces of all slices in order.

    `dtype`: of the computation. Raises `RemoteProtocolError` if pieces have a wrong length.
    """
    total, open_block = 0.0, list[Pieces]()

    def close_block() -> float:
        block = np.concatenate(open_block).astype(dtype) if open_block else np.zeros(0, dtype)
        open_block.clear()
        return square(block)

    for span, values in pieces:
        if len(values) != pieces_length(span, size=size):
            raise RemoteProtocolError(f"{len(values)} pieces of a gradient came for elements {span}")
        at = 0
        for start, stop, is_whole in _runs(span, size):
            if is_whole:
                total += float(values[at])
                at += 1
                continue
            open_block.append(values[at : at + stop - start])
            at += stop - start
            if stop == size or stop % NORM_BLOCK == 0:
                total += close_block()
    return total + close_block()


def norm_of(
    pieces: Sequence[tuple[slice, Pieces]], dtype: np.dtype[np.floating], *, square: Squared = squared
) -> float:
    """Return the norm of the whole gradient, given the pieces of all slices in order; same bits as
    `global_norm`.

    `dtype`: of the computation. Raises `TrainingDiverged` if the norm is not finite, `RemoteProtocolError` if
    pieces have a wrong length.
    """
    return norm_from(squares_from(pieces, dtype, square=square))


class TrainingDiverged(ZbmdError):
    """The gradient is not finite; the state before this step is the last usable one."""


def global_norm(grads: Array, *, xp: ModuleType) -> float:
    """Return the Euclidean norm of `grads`, 1-D of any float dtype.

    The squares are summed in blocks of `NORM_BLOCK` elements in `grads`' dtype (float32 for 16-bit floats),
    and the sums of blocks in order in double precision: the same bits wherever the array lies. Raises
    `TrainingDiverged` if the norm is not finite.
    """
    return norm_from(squares_of(grads, xp=xp))


def squares_of(grads: Array, *, xp: ModuleType) -> float:
    """Return the sum of squares of `grads`, as `global_norm` computes it."""
    total = 0.0
    for value in _block_squares(grads, xp).tolist():
        total += value
    return total


def _squared(block: Array, xp: ModuleType = np) -> float:
    values = widened(block)
    return float(xp.dot(values, values))


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
