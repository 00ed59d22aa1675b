"""Softmax cross-entropy of integer targets."""

from __future__ import annotations

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.native import _kernels
from zbmd.training.ops.native import as_indices, has_kernels


def cross_entropy(tape: Tape, logits: Tensor, targets: Array, *, weight: float) -> Tensor:
    """Return `weight * sum over rows of -log softmax(logits)[target]`, a 0-D array, in nats.

    logits: (rows, classes), one float dtype; targets: (rows,), an integer dtype, values below classes.
    """
    if has_kernels(tape.xp, logits.data):
        return _by_kernel(tape, logits, targets, weight)
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


def _by_kernel(tape: Tape, logits: Tensor, targets: Array, weight: float) -> Tensor:
    wanted = as_indices(targets)
    logs = np.empty(len(wanted), dtype=logits.data.dtype)
    total = _kernels.cross_entropy(logs, logits.data, wanted)

    def backward(dy: Array) -> None:
        grad = np.empty_like(logits.data)
        _kernels.cross_entropy_grad(grad, logs, logits.data, wanted, float(dy) * weight)
        logits.accumulate(grad)

    return tape.record(np.asarray(total * weight, dtype=logs.dtype), backward)
