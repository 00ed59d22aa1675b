"""Elementwise non-linearities, and dropout whose choices depend on the sample alone."""

from __future__ import annotations

import math

from zbmd.training.autograd.array_module import Array, has_kernels
from zbmd.training.autograd.rng import Noise, random_run
from zbmd.training.autograd.tape import Backward, Tape, Tensor
from zbmd.training.native import _kernels


def dropout(
    tape: Tape,
    x: Tensor,
    *,
    rate: float,
    noise: Noise,
    site: int,
    first_row: int = 0,
    rows: int | None = None,
) -> Tensor:
    """Return `x` with each element zeroed with probability `rate`, the others divided by `1 - rate`.

    x: (samples * T, features), the samples in the order of `noise`; or, if `rows` is given for samples * T,
    the run of these rows that begins with `first_row`. The choice depends on seed, step, sample, `site` and
    the element's position in its sample, so the backward pass draws the same numbers again and nothing is
    stored. N. Srivastava and others, "Dropout", JMLR 15, 2014.
    """
    xp = tape.xp
    least, factor = min(int(rate * 2**32), 2**32 - 1), 1.0 / (1.0 - rate)

    def thinned(values: Array) -> Array:
        features, all_rows = values.shape[1], len(values) if rows is None else rows
        start, each = first_row * features, all_rows // len(noise.samples) * features
        words = random_run(noise, site, each, start, start + values.size, xp=xp)
        kept: Array = values * (words >= least).reshape(values.shape)
        kept *= factor
        return kept

    return tape.record(thinned(x.data), lambda dy: x.accumulate(thinned(dy)))


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
