"""Linear maps and sums."""

from __future__ import annotations

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor


def add(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Return `x + y`; one shape, one float dtype."""

    def backward(dy: Array) -> None:
        x.accumulate(dy.copy())
        y.accumulate(dy)

    return tape.record(x.data + y.data, backward)


def add_bias(tape: Tape, x: Tensor, bias: Parameter) -> Tensor:
    """Return `x + bias`, the bias being added to each row.

    x and result: (rows, features); bias: (features,); one float dtype.
    """
    xp = tape.xp

    def backward(dy: Array) -> None:
        bias.receive(lambda out: xp.copyto(out, xp.einsum("rf->f", dy)))
        x.accumulate(dy)

    return tape.record(x.data + bias.data, backward, bias)


def tied_linear(tape: Tape, x: Tensor, table: Parameter) -> Tensor:
    """Return `x @ table.T`: log odds by the table that embeds the tokens.

    x: (rows, features); table: (vocabulary, features); result: (rows, vocabulary). O. Press, L. Wolf,
    "Using the output embedding to improve language models", 2017, arXiv:1608.05859.
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
