"""Softmax cross-entropy of integer targets."""

from __future__ import annotations

from zbmd.training.tape import Tape, Tensor
from zbmd.training.xp import Array


def cross_entropy(tape: Tape, logits: Tensor, targets: Array, *, weight: float) -> Tensor:
    """Return `weight * sum over rows of -log softmax(logits)[target]`, a 0-D array, in nats.

    logits: (rows, classes), one float dtype; targets: (rows,), an integer dtype, values below classes.
    """
    xp = tape.xp
    rows = xp.arange(len(targets))
    odds = logits.data - logits.data.max(axis=1, keepdims=True)
    picked = odds[rows, targets]
    xp.exp(odds, out=odds)
    total = odds.sum(axis=1)
    loss = xp.asarray((xp.log(total) - picked).sum() * weight, dtype=odds.dtype)

    def backward(dy: Array) -> None:
        scale = dy * weight
        xp.multiply(odds, (scale / total)[:, None], out=odds)
        odds[rows, targets] -= scale
        logits.accumulate(odds)

    return tape.record(loss, backward)
