"""The numpy device's own kernels, for float32 and float64; the GIL is released while they compute.

All arrays are C-contiguous and of one type; anything else, or a wrong size, raises `TypeError` or
`ValueError` before a byte is written, an index that is out of range `IndexError`. Same inputs, same bits,
wherever the arrays lie and whatever vectors the machine has (apart from the C library's log).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

def fits(*arrays: object) -> bool:
    """Tell whether all are contiguous numpy arrays of one type that there are kernels for."""

def random_words(out: NDArray[np.uint32], key: int, first: int, second: int, third: int, fourth: int) -> None:
    """Fill `out` with words of a stream of Philox4x32-10, from the first one of block `first` on.

    See `zbmd.training.autograd.rng.random_words`.
    """

def gelu(out: Array, x: Array) -> None:
    """Write the tanh form of GELU of `x` to `out`; any shape."""

def gelu_grad(dy: Array, x: Array) -> None:
    """Multiply `dy` by GELU's slope at `x`, in place."""

def squared_relu(out: Array, x: Array) -> None:
    """Write `max(x, 0) ** 2` to `out`; NaN stays NaN."""

def squared_relu_grad(dy: Array, x: Array) -> None:
    """Multiply `dy` by `2 * max(x, 0)`, in place."""

def norm(out: Array, rows: Array, x: Array, gain: Array, bias: Array | None, epsilon: float) -> None:
    """Normalise each row of `x`, (rows, features): a layer norm with `bias`, a root-mean-square norm without.

    `rows`, (rows, 2), gets what `norm_grad` wants: the mean and the inverse deviation.
    """

def norm_grad(dy: Array, dgain: Array, dbias: Array | None, rows: Array, x: Array, gain: Array) -> None:
    """Turn `dy` into the gradient of `x`, in place, and write those of gain and bias."""

def cross_entropy(logs: Array, logits: Array, targets: NDArray[np.int64]) -> float:
    """Return the sum over rows of -log softmax(logits)[target]; `logs`, (rows,), gets the log normalisers."""

def cross_entropy_grad(
    out: Array, logs: Array, logits: Array, targets: NDArray[np.int64], scale: float
) -> None:
    """Write `scale * (softmax(logits) - one_hot(targets))` to `out`, (rows, classes)."""

def embedding_grad(out: Array, dy: Array, tokens: NDArray[np.int64]) -> None:
    """Write to `out`, (vocabulary, features), the rows of `dy` added up by token, in their order."""

def adamw(
    new: tuple[Array, Array, Array],
    old: tuple[Array, Array, Array],
    grads: Array,
    factors: NDArray[np.float64],
) -> None:
    """Write weights, mean and square after one update of AdamW.

    factors: beta1, beta2, the gradient's factor, step size, epsilon, what decay leaves of a weight.
    """

def attention(out: Array, logs: Array, qkv: Array, bias: Array, batch: int, heads: int) -> None:
    """Write causal attention to `out`, (rows, features); `logs`, (batch, heads, T), gets the log normalisers.

    qkv: (rows, 3 * features); bias: (heads, at least T), by distance.
    """

def attention_grad(
    out: Array, dy: Array, y: Array, logs: Array, qkv: Array, bias: Array, batch: int, heads: int
) -> None:
    """Write the gradient of `qkv` to `out`, given `dy`, what `attention` was given, and what it wrote."""

def code(outs: list[NDArray[np.uint8]], sources: list[NDArray[np.uint8]], matrix: bytes) -> None:
    """Write to each of `outs` a sum of products in GF(2^8) of `sources`, all of one size, none overlapping.

    matrix: the factors, (outs, sources). At most 255 of each.
    """

def state_sum(words: NDArray[np.uint32], first: int) -> int:
    """Return the sum, modulo 2**64, of words, each times an odd number of its place, counted from `first`."""
