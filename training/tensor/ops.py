"""Operators whose rows, or tokens, are divided over the ranks of a group.

Between the layers each rank holds a run of rows (sequence parallelism: V. Korthikanti and others, "Reducing
activation recomputation in large transformer models", 2022, arXiv:2205.05198). All ranks record the same ops
in the same order, so their collectives match, forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.training import ops
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import probe_received, probe_sent
from zbmd.training.autograd.tape import Parameter, Tape, Tensor


class SharedParameter(Parameter):
    """A parameter that all ranks hold, each of which computes its gradient from some of the rows."""

    __slots__ = ("_group",)

    def __init__(self, parameter: Parameter, group: Group) -> None:
        super().__init__(parameter.stored, parameter.grad, parameter.index, parameter.on_ready)
        self._group = group

    def receive(self, write: Callable[[Array], object], *, lasting: bool = False) -> None:
        """See `Parameter`; the gradient is summed over the group, with the same bits on all ranks."""

        def reduced(out: Array) -> None:
            write(out)
            probe_sent(out)
            with spans.COMM:
                self._group.blocking.all_reduce(out)
            probe_received(out)

        super().receive(reduced, lasting=lasting)


def gather_rows(tape: Tape, x: Tensor, group: Group) -> Tensor:
    """Return all ranks' rows, in rank order. x: (rows / ranks, features); result: (rows, features)."""

    def backward(dy: Array) -> None:
        x.accumulate(_reduced(dy, group))

    return tape.record(_gathered(x.data, group), backward)


def scatter_rows(tape: Tape, x: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of the sum over all ranks. x: (rows, features); result: (rows / ranks,
    features).
    """

    def backward(dy: Array) -> None:
        x.accumulate(_gathered(dy, group))

    return tape.record(_reduced(x.data, group), backward)


def _gathered(rows: Array, group: Group) -> Array:
    probe_sent(rows)
    with spans.COMM:
        every: Array = group.blocking.all_gather(np.ascontiguousarray(rows))
    probe_received(every)
    return every.reshape(-1, rows.shape[1])


def _reduced(rows: Array, group: Group) -> Array:
    probe_sent(rows)
    with spans.COMM:
        mine: Array = group.blocking.reduce_scatter(
            np.ascontiguousarray(rows).reshape(group.size, -1, rows.shape[1])
        )
    probe_received(mine)
    return mine.reshape(-1, rows.shape[1])


def vocabulary_embedding(
    tape: Tape, tokens: Array, table: Parameter, own: tuple[int, int], group: Group
) -> Tensor:
    """Return this rank's rows of the result of `ops.embedding`, with a table divided by the vocabulary.

    tokens: (rows,), all of them, on all ranks; table: (own tokens, features), those in [own[0], own[1]). A
    row has one owner, so the sum over ranks adds zeros to it and has its bits.
    """
    first, stop = own
    mine = (tokens >= first) & (tokens < stop)
    places = np.where(mine, tokens.astype(np.int64) - first, 0)
    partial = ops.embedding(tape, places, table)
    return scatter_rows(tape, _kept(tape, partial, mine[:, None]), group)


def _kept(tape: Tape, x: Tensor, mask: Array) -> Tensor:
    """Return `x` where the mask is set, zero elsewhere."""
    return tape.record(x.data * mask, lambda dy: x.accumulate(dy * mask))


def vocabulary_cross_entropy(
    tape: Tape, logits: Tensor, targets: Array, own: tuple[int, int], group: Group, *, weight: float
) -> Tensor:
    """Return `ops.cross_entropy` of logits that are divided by the vocabulary; the same bits on all ranks.

    logits: (rows, own tokens), those in [own[0], own[1]); targets: (rows,) of the whole vocabulary. Ranks
    exchange three numbers a row, not the logits.
    """
    first, stop = own
    rows = np.flatnonzero((targets >= first) & (targets < stop))
    places = targets[rows].astype(np.int64) - first
    own_most = logits.data.max(axis=1)
    probe_sent(logits.data)
    with spans.COMM:
        most: Array = group.blocking.all_reduce(own_most, op="max")
    probe_received(most)
    odds = logits.data - most[:, None]
    sums: Array = np.zeros((2, len(targets)), dtype=odds.dtype)
    sums[1, rows] = odds[rows, places]
    np.exp(odds, out=odds)
    odds.sum(axis=1, out=sums[0])
    probe_sent(sums)
    with spans.COMM:
        group.blocking.all_reduce(sums)
    probe_received(sums)
    total, picked = sums
    loss = np.asarray((np.log(total) - picked).sum() * weight, dtype=odds.dtype)

    def backward(dy: Array) -> None:
        scale = dy * weight
        np.multiply(odds, (scale / total)[:, None], out=odds)
        odds[rows, places] -= scale
        logits.accumulate(odds)

    return tape.record(loss, backward)
