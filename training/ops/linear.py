"""Linear maps, optionally added to a residual stream."""

from __future__ import annotations

from zbmd.training.tape import Parameter, Tape, Tensor
from zbmd.training.xp import Array


def add(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Return `x + y`; one shape, one float dtype."""

    def backward(dy: Array) -> None:
        x.accumulate(dy.copy())
        y.accumulate(dy)

    return tape.record(x.data + y.data, backward)


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
        weight.receive(lambda out: xp.matmul(x.data.T, dy, out=out))
        if residual is not None:
            residual.accumulate(dy)

    return tape.record(y, backward, weight)
