"""Matrix products and sums, and both ends of a language model: embedding and cross-entropy."""

from __future__ import annotations

import numpy as np

from zbmd.training.autograd.array_module import Array, as_indices, has_kernels
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.native import _kernels


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


def embedding(tape: Tape, tokens: Array, table: Parameter) -> Tensor:
    """Return `table[tokens]`.

    tokens: (rows,), an integer dtype, values below vocabulary; table: (vocabulary, features); result: (rows,
    features).

    The order of summation in the table's gradient is fixed: row order in the kernel; otherwise that of a
    matrix product with the one-hot tokens, because scattered additions on a GPU have no fixed order.
    """
    xp = tape.xp

    def backward(dy: Array) -> None:
        if has_kernels(xp, dy):
            table.receive(lambda out: _kernels.embedding_grad(out, dy, as_indices(tokens)), lasting=True)
            return
        one_hot = xp.zeros((len(tokens), len(table.stored)), dtype=dy.dtype)
        one_hot[xp.arange(len(tokens)), tokens] = 1.0
        table.receive(lambda out: xp.matmul(one_hot.T, dy, out=out), lasting=True)

    return tape.record(table.rows(tokens), backward, table)


def add(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Return `x + y`; one shape, one float dtype."""

    def backward(dy: Array) -> None:
        x.accumulate(dy.copy())
        y.accumulate(dy)

    return tape.record(x.data + y.data, backward)


def add_bias(tape: Tape, x: Tensor, bias: Parameter) -> Tensor:
    """Return `x + bias`, adding the bias to each row.

    x and result: (rows, features); bias: (features,); one float dtype.
    """
    xp = tape.xp

    def backward(dy: Array) -> None:
        bias.receive(lambda out: xp.copyto(out, xp.einsum("rf->f", dy)))
        x.accumulate(dy)

    return tape.record(x.data + bias.data, backward, bias)


def tied_linear(tape: Tape, x: Tensor, table: Parameter) -> Tensor:
    """Return the logits `x @ table.T`, using the table that embeds the tokens.

    x: (rows, features); table: (vocabulary, features); result: (rows, vocabulary). O. Press, L. Wolf, "Using
    the output embedding to improve language models", 2017, arXiv:1608.05859.
    """
    xp = tape.xp

    def backward(dy: Array) -> None:
        x.accumulate(xp.matmul(dy, table.data))
        table.receive(lambda out: xp.matmul(dy.T, x.data, out=out))

    return tape.record(xp.matmul(x.data, table.data.T), backward, table)


def linear(tape: Tape, x: Tensor, weight: Parameter, residual: Tensor | None = None) -> Tensor:
    """Return `x @ weight`, plus `residual` if given.

    x: (rows, inputs); weight: (inputs, outputs); residual and result: (rows, outputs); one float dtype.
    """
    xp = tape.xp
    y = xp.matmul(x.data, weight.data)
    if residual is not None:
        y += residual.data

    def backward(dy: Array) -> None:
        x.accumulate(xp.matmul(dy, weight.data.T))
        weight.receive(lambda out: xp.matmul(x.data.T, dy, out=out), lasting=True)
        if residual is not None:  # which may change what it is given
            residual.accumulate(dy if weight.deferred is None else dy.copy())

    return tape.record(y, backward, weight)
