"""Differentiable operations: each computes its output and records its backward rule on a `Tape`.

Activations are 2-D, (rows, features), with rows = batch × positions; row b * positions + t is position t of
sequence b. Ops never change their inputs' data. Imports only `autograd` and `native`.
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array, as_indices, has_kernels
from zbmd.training.autograd.rng import Noise, random_run
from zbmd.training.autograd.tape import Backward, Parameter, Tape, Tensor
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


NEAR_HEADS_MAX = 4
NEAR_SLOPE = 2.0
FAR_SLOPES = (0.5, 1.0 / 128.0)


def causal_distance_bias(xp: ModuleType, heads: int, length: int, dtype: npt.DTypeLike) -> Array:
    """Return the bias of attention scores by the distance between query and key, (heads, length).

    A constant, not learned. Up to half of the heads, at most `NEAR_HEADS_MAX`, are near heads: head i prefers
    the key i positions back, and a key n positions off that gets `NEAR_SLOPE * n` less. The others are ALiBi
    heads (O. Press and others, 2022, arXiv:2108.12409) with slopes in geometric series from the first to the
    second of `FAR_SLOPES`. With the near heads a model reads n-grams from its first step: they reduce the
    loss by 0.15 nats a byte after 600,000 bytes, compared with ALiBi alone.
    """
    near = min(NEAR_HEADS_MAX, heads // 2)
    slopes = np.concatenate([np.full(near, NEAR_SLOPE), np.geomspace(*FAR_SLOPES, heads - near)])
    offsets = np.concatenate([np.arange(near), np.zeros(heads - near)])
    bias = -slopes[:, None] * np.abs(np.arange(length) - offsets[:, None])
    on_device: Array = xp.asarray(bias, dtype=dtype)
    return on_device


def causal_attention(tape: Tape, qkv: Tensor, bias: Array, *, batch: int, heads: int) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v for each sequence and head, d = features / heads.

    qkv: (batch * T, 3 * features), each row holding q, k and v of all heads in this order; bias: (heads, at
    least T), by the key's distance from the query; result: (batch * T, features). A query sees no later key.

    On numpy, the kernel computes in blocks and stores nothing of size (T, T) (training/native/attention.h);
    elsewhere the whole matrix is kept for the backward pass.
    """
    if has_kernels(tape.xp, qkv.data, bias):
        return _attention_by_kernel(tape, qkv, bias, batch, heads)
    return tape.record(*_whole(tape, qkv, bias, batch, heads))


def _attention_by_kernel(tape: Tape, qkv: Tensor, bias: Array, batch: int, heads: int) -> Tensor:
    rows, width = qkv.data.shape
    y = np.empty((rows, width // 3), dtype=qkv.data.dtype)
    logs = np.empty((batch, heads, rows // batch), dtype=y.dtype)
    _kernels.attention(y, logs, qkv.data, bias, batch, heads)

    def backward(dy: Array) -> None:
        dqkv = np.empty_like(qkv.data)
        _kernels.attention_grad(dqkv, dy, y, logs, qkv.data, bias, batch, heads)
        qkv.accumulate(dqkv)

    return tape.record(y, backward)


def _whole(tape: Tape, qkv: Tensor, bias: Array, batch: int, heads: int) -> tuple[Array, Backward]:
    """The softmax is kept unnormalised, and the (T, d) results are divided instead of the weights.

    The heads are strided views of `qkv`: BLAS takes their strides as leading dimensions, so nothing is
    transposed in memory.
    """
    xp = tape.xp
    rows, width = qkv.data.shape
    length, depth = rows // batch, width // (3 * heads)
    scale = 1.0 / math.sqrt(depth)

    def split(packed: Array, parts: int) -> Array:
        return packed.reshape(batch, length, parts, heads, depth).transpose(2, 0, 3, 1, 4)

    q, k, v = split(qkv.data, 3)
    q = q * scale
    odds = xp.matmul(q, k.swapaxes(-1, -2))
    odds += bias_by_places(xp, bias, length)
    odds -= odds.max(axis=-1, keepdims=True)
    xp.exp(odds, out=odds)
    inverse = xp.reciprocal(xp.matmul(odds, xp.ones((length, 1), dtype=odds.dtype)))
    y = xp.empty((rows, width // 3), dtype=odds.dtype)
    heads_out = split(y, 1)[0]
    xp.matmul(odds, v, out=heads_out)
    heads_out *= inverse

    def backward(dy: Array) -> None:
        dqkv = xp.empty_like(qkv.data)
        dq, dk, dv = split(dqkv, 3)
        dout = split(dy, 1)[0]
        dout *= inverse
        along = xp.einsum("bhtd,bhtd->bht", dout, heads_out)
        xp.matmul(odds.swapaxes(-1, -2), dout, out=dv)
        dscores = xp.matmul(dout, v.swapaxes(-1, -2))
        dscores -= along[..., None]
        dscores *= odds
        xp.matmul(dscores, k, out=dq)
        dq *= scale
        xp.matmul(dscores.swapaxes(-1, -2), q, out=dk)
        qkv.accumulate(dqkv)

    return y, backward


def bias_by_places(xp: ModuleType, bias: Array, length: int) -> Array:
    """Return the bias of each head, query and key, (heads, length, length), minus infinity for later keys."""
    place = np.arange(length)
    distance = place[:, None] - place[None, :]
    future = np.where(distance < 0, -math.inf, 0.0)
    whole: Array = bias[:, xp.asarray(np.abs(distance))] + xp.asarray(future, dtype=bias.dtype)
    return whole


def cross_entropy(tape: Tape, logits: Tensor, targets: Array, *, weight: float) -> Tensor:
    """Return `weight * sum over rows of -log softmax(logits)[target]`, a 0-D array, in nats.

    logits: (rows, classes), one float dtype; targets: (rows,), an integer dtype, values below classes.
    """
    if has_kernels(tape.xp, logits.data):
        return _cross_entropy_by_kernel(tape, logits, targets, weight)
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


def _cross_entropy_by_kernel(tape: Tape, logits: Tensor, targets: Array, weight: float) -> Tensor:
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


EPSILON = 1e-5


def rms_norm(tape: Tape, x: Tensor, gain: Parameter) -> Tensor:
    """Return `x / sqrt(mean(x**2) + EPSILON) * gain`, with the mean over each row.

    x and result: (rows, features); gain: (features,); one float dtype. B. Zhang, R. Sennrich, 2019,
    arXiv:1910.07467.
    """
    if has_kernels(tape.xp, x.data, gain.data):
        return _norm_by_kernel(tape, x, gain, None)
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
        return _norm_by_kernel(tape, x, gain, bias)
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


def _norm_by_kernel(tape: Tape, x: Tensor, gain: Parameter, bias: Parameter | None) -> Tensor:
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
