"""Elementwise non-linearities."""

from __future__ import annotations

import math

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Backward, Tape, Tensor
from zbmd.training.native import _kernels
from zbmd.training.ops.native import has_kernels

GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def squared_relu(tape: Tape, x: Tensor) -> Tensor:
    """Return `max(x, 0) ** 2` (D. So and others, 2021, arXiv:2109.08668). Any shape, any float dtype."""
    if not has_kernels(tape.xp, x.data):
        return tape.record(*_squared_relu(tape, x))
    y = tape.xp.empty_like(x.data)
    _kernels.squared_relu(y, x.data)

    def backward(dy: Array) -> None:
        _kernels.squared_relu_grad(dy, x.data)
        x.accumulate(dy)

    return tape.record(y, backward)


def gelu(tape: Tape, x: Tensor) -> Tensor:
    """Return the tanh form of GELU (D. Hendrycks, K. Gimpel, 2016, arXiv:1606.08415). Any shape."""
    if not has_kernels(tape.xp, x.data):
        return tape.record(*_gelu(tape, x))
    y = tape.xp.empty_like(x.data)
    _kernels.gelu(y, x.data)

    def backward(dy: Array) -> None:
        _kernels.gelu_grad(dy, x.data)
        x.accumulate(dy)

    return tape.record(y, backward)


def _squared_relu(tape: Tape, x: Tensor) -> tuple[Array, Backward]:
    xp = tape.xp
    doubled = xp.absolute(x.data)
    doubled += x.data
    y: Array = xp.square(doubled)
    y *= 0.25

    def backward(dy: Array) -> None:
        dy *= doubled
        x.accumulate(dy)

    return y, backward


def _gelu(tape: Tape, x: Tensor) -> tuple[Array, Backward]:
    xp = tape.xp
    square = xp.square(x.data)
    tanh = square * (GELU_SCALE * GELU_CUBIC)
    tanh += GELU_SCALE
    tanh *= x.data
    xp.tanh(tanh, out=tanh)
    y: Array = tanh + 1.0
    y *= x.data
    y *= 0.5

    def backward(dy: Array) -> None:
        # y = x (1 + t) / 2, so dy/dx = (1 + t) / 2 + x (1 - t^2) (s + 3 s c x^2) / 2.
        slope = square * (3.0 * GELU_SCALE * GELU_CUBIC)
        slope += GELU_SCALE
        slope *= x.data
        slope *= 1.0 - xp.square(tanh)
        slope += tanh
        slope += 1.0
        slope *= 0.5
        dy *= slope
        x.accumulate(dy)

    return y, backward
