"""The global norm of a gradient that lies in parts, with the bits of `zbmd.training.optim.clip.global_norm`.

That sums squares in blocks of the whole flat array, and parts do not end where blocks do. So a part hands
over the sums of the blocks that it holds whole, and the elements themselves of those that it holds in part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zbmd.training.autograd.array_module import Array, widened
from zbmd.training.optim.clip import NORM_BLOCK, norm_from
from zbmd.transport.errors import RemoteProtocolError

Pieces = NDArray[np.float64]


def _whole_blocks(span: slice) -> range:
    """The blocks that lie in the elements `span` of the whole array."""
    return range(-(-span.start // NORM_BLOCK), span.stop // NORM_BLOCK)


def pieces_of(grads: Array, span: slice) -> Pieces:
    """What others need of a part's `grads`, the elements `span` of the whole: float64, exact.

    Elements before its first whole block, the sum of squares of each whole block, elements behind the last.
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
    """How many numbers `pieces_of` gives for `span`."""
    blocks = _whole_blocks(span)
    size: int = span.stop - span.start
    return size - len(blocks) * (NORM_BLOCK - 1)


def norm_of(pieces: Sequence[tuple[slice, Pieces]], dtype: np.dtype[np.floating]) -> float:
    """The norm of the whole, from the pieces of all parts in their order; `dtype` is what it is computed in.

    Raises `TrainingDiverged` if it is not finite, `RemoteProtocolError` if pieces have not their length.
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
