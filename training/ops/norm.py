"""Normalisation of rows: by their root mean square, or by mean and deviation."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from zbmd.training.autograd.array_module import Array, has_kernels
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.native import _kernels

EPSILON = 1e-5


def rms_norm(tape: Tape, x: Tensor, gain: Parameter) -> Tensor:
    """Return `x / sqrt(mean(x**2) + EPSILON) * gain`, with the mean over each row.

    x and result: (rows, features); gain: (features,); one float dtype. B. Zhang, R. Sennrich, 2019,
    arXiv:1910.07467.
    """
    if has_kernels(tape.xp, x.data, gain.data):
        return _by_kernel(tape, x, gain, None)
    xp, factors = tape.xp, gain.data
    inverse = _inverse_root(xp, x.data)
    unit = x.data * inverse[:, None]

    def backward(dy: Array) -> None:
        gain.receive(lambda out: xp.copyto(out, xp.einsum("rf,rf->f", dy, unit)))
        dy *= factors
        x.accumulate(_through_unit(xp, dy, unit, inverse))

    return tape.record(unit * factors, backward, gain)


def layer_norm(tape: Tape, x: Tensor, gain: Parameter, bias: Parameter) -> Tensor:
    """Return `(x - mean(x)) / sqrt(variance(x) + EPSILON) * gain + bias`, with both over each row.

    x and result: (rows, features); gain, bias: (features,); one float dtype. J. Ba, J. Kiros, G. Hinton,
    2016, arXiv:1607.06450.
    """
    if has_kernels(tape.xp, x.data, gain.data, bias.data):
        return _by_kernel(tape, x, gain, bias)
    xp, factors, features = tape.xp, gain.data, x.data.shape[1]
    ones = xp.ones(features, dtype=x.data.dtype)
    centred = x.data - (xp.matmul(x.data, ones) / features)[:, None]
    inverse = _inverse_root(xp, centred)
    unit = centred * inverse[:, None]

    def backward(dy: Array) -> None:
        gain.receive(lambda out: xp.copyto(out, xp.einsum("rf,rf->f", dy, unit)))
        bias.receive(lambda out: xp.copyto(out, xp.einsum("rf->f", dy)))
        dy *= factors
        dy -= (xp.matmul(dy, ones) / features)[:, None]
        x.accumulate(_through_unit(xp, dy, unit, inverse))

    return tape.record(unit * factors + bias.data, backward, gain, bias)


def _inverse_root(xp: ModuleType, x: Array) -> Array:
    """Return 1 / sqrt(mean(x**2) + EPSILON) of each row."""
    inverse: Array = xp.einsum("rf,rf->r", x, x)
    inverse *= 1.0 / x.shape[1]
    inverse += EPSILON
    xp.sqrt(inverse, out=inverse)
    xp.reciprocal(inverse, out=inverse)
    return inverse


def _through_unit(xp: ModuleType, dy: Array, unit: Array, inverse: Array) -> Array:
    """Turn the gradient of `unit = x * inverse` into that of x; overwrites `dy` and `unit`."""
    along = xp.einsum("rf,rf->r", dy, unit)
    along *= 1.0 / unit.shape[1]
    # d(unit)/dx is (identity - unit unit^T / features) * inverse; unit is not needed after this.
    xp.multiply(unit, along[:, None], out=unit)
    dy -= unit
    dy *= inverse[:, None]
    return dy


def _by_kernel(tape: Tape, x: Tensor, gain: Parameter, bias: Parameter | None) -> Tensor:
    y = np.empty_like(x.data)
    rows = np.empty((len(y), 2), dtype=y.dtype)
    _kernels.norm(y, rows, x.data, gain.data, None if bias is None else bias.data, EPSILON)

    def backward(dy: Array) -> None:
        dgain = np.empty_like(gain.data)
        dbias = None if bias is None else np.empty_like(bias.data)
        _kernels.norm_grad(dy, dgain, dbias, rows, x.data, gain.data)
        gain.receive(lambda out: np.copyto(out, dgain))
        if bias is not None and dbias is not None:
            bias.receive(lambda out: np.copyto(out, dbias))
        x.accumulate(dy)

    return tape.record(y, backward, *([gain] if bias is None else [gain, bias]))
