"""The numpy device's kernels: accurate in single precision, the same bits anywhere, strict arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.array_modules import Witness

from zbmd.training import ops
from zbmd.training.autograd.array_module import has_kernels
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.native import _kernels

Array = npt.NDArray[Any]
Op = Callable[[Tape, Tensor, list[Parameter]], Tensor]


def normal(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def played(op: Op, xp: Any, dtype: type[np.floating], x: Array, *parameters: Array) -> list[Array]:
    """The op's output and all gradients, for an output gradient of ones."""
    tape, leaf = Tape(xp), Tensor(x.astype(dtype))
    leaves = [
        Parameter(p.astype(dtype), np.empty_like(p, dtype=dtype), i, None) for i, p in enumerate(parameters)
    ]
    y = op(tape, leaf, leaves)
    data = y.data.copy()
    tape.backward(y)
    grads = [leaf.grad, *(p.grad for p in leaves)]
    return [data, *(grad for grad in grads if grad is not None)]


def attention(length: int, heads: int) -> Op:
    def op(tape: Tape, x: Tensor, _: list[Parameter]) -> Tensor:
        bias = ops.causal_distance_bias(np, heads, length + 3, x.data.dtype)
        return ops.causal_attention(tape, x, bias, batch=len(x.data) // length, heads=heads)

    return op


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    features=st.integers(1, 70),
    scale=st.sampled_from([1e-3, 1.0, 8.0]),
    seed=st.integers(0, 99),
)
def test_single_precision_is_near_the_formula_in_double(
    rows: int, features: int, scale: float, seed: int
) -> None:
    x, gain, bias = (
        normal(rows, features, seed=seed) * scale,
        normal(features, seed=2),
        normal(features, seed=3),
    )
    targets = np.random.default_rng(seed).integers(0, features, rows)
    cases: list[tuple[Op, tuple[Array, ...]]] = [
        (lambda t, x, _: ops.gelu(t, x), ()),
        (lambda t, x, _: ops.squared_relu(t, x), ()),
        (lambda t, x, p: ops.rms_norm(t, x, p[0]), (gain,)),
        (lambda t, x, p: ops.layer_norm(t, x, p[0], p[1]), (gain, bias)),
        (lambda t, x, _: ops.cross_entropy(t, x, targets, weight=1.0), ()),
    ]
    for op, parameters in cases:
        exact = played(op, Witness(), np.float64, x, *parameters)
        for one, other in zip(played(op, np, np.float32, x, *parameters), exact, strict=True):
            spread = float(np.abs(other).max()) + 1.0
            np.testing.assert_allclose(
                one, other, rtol=1e-3, atol=2e-3 * spread if features < 3 else 2e-5 * spread
            )


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 2), length=st.integers(1, 150), heads=st.integers(1, 3), depth=st.integers(1, 33))
def test_attention_in_blocks_is_attention(batch: int, length: int, heads: int, depth: int) -> None:
    x = normal(batch * length, 3 * heads * depth)
    exact = played(attention(length, heads), Witness(), np.float64, x)
    for dtype, most in ((np.float64, 1e-11), (np.float32, 2e-5)):
        for one, other in zip(played(attention(length, heads), np, dtype, x), exact, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=most * (1.0 + float(np.abs(other).max())))


def test_attention_does_not_keep_a_matrix_of_positions() -> None:
    tape, length, depth = Tape(np), 2048, 4
    bias = ops.causal_distance_bias(np, 1, length, np.float32)
    y = ops.causal_attention(
        tape, Tensor(normal(length, 3 * depth).astype(np.float32)), bias, batch=1, heads=1
    )
    kept = [cell.cell_contents for cell in tape._nodes[-1][1].__closure__ or ()]
    arrays = [one.data if isinstance(one, Tensor) else one for one in kept]
    nbytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert y.data.shape == (length, depth)
    assert nbytes < 20 * length * depth * 4 < length * length


@pytest.mark.parametrize("offset", [1, 3, 5])
def test_bits_do_not_depend_on_where_arrays_lie(offset: int) -> None:
    def moved(array: Array) -> Array:
        memory = np.zeros(array.size + offset, dtype=array.dtype)
        memory[offset:] = array.reshape(-1)
        return memory[offset:].reshape(array.shape)

    x, gain, bias = (array.astype(np.float32) for array in (normal(33, 90), normal(90), normal(90, seed=2)))
    results: list[bytes] = []
    for place in (np.copy, moved):
        out, rows, dy = place(x), place(np.zeros((33, 2), np.float32)), place(x[::-1].copy())
        _kernels.norm(out, rows, place(x), place(gain), place(bias), 1e-5)
        dgain, dbias = place(gain), place(bias)
        _kernels.norm_grad(dy, dgain, dbias, rows, place(x), place(gain))
        y, logs, distance = place(x[:, :30].copy()), place(normal(2, 33).astype(np.float32)), place(gain[:66])
        _kernels.attention(y, logs, place(x), distance.reshape(2, 33), 1, 2)
        dqkv = place(x)
        _kernels.attention_grad(
            dqkv, place(x[:, 30:60].copy()), y, logs, place(x), distance.reshape(2, 33), 1, 2
        )
        results.append(b"".join(array.tobytes() for array in (out, dy, dgain, dbias, y, logs, dqkv)))
    assert results[0] == results[1]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(poison: float) -> None:
    x = normal(4, 24).astype(np.float32)
    x[2, 5] = poison
    gain = np.ones(24, np.float32)
    for op in (
        lambda t, x, p: ops.gelu(t, x),
        lambda t, x, p: ops.squared_relu(t, x),
        lambda t, x, p: ops.rms_norm(t, x, p[0]),
        lambda t, x, p: ops.cross_entropy(t, x, np.zeros(4, np.int64), weight=1.0),
        attention(4, 2),
    ):
        tape = Tape(np)
        y = op(tape, Tensor(x), [Parameter(gain, np.empty_like(gain), 0, None)])
        assert not np.isfinite(y.data).all()


def test_embedding_adds_rows_in_their_order() -> None:
    table, tokens = np.empty((3, 1), np.float32), np.array([1, 1, 1, 2])
    _kernels.embedding_grad(table, np.array([[1e8], [1.0], [-1e8], [5.0]], np.float32), tokens)
    assert table.reshape(-1).tolist() == [0.0, 0.0, 5.0]


def test_wrong_arguments_write_nothing() -> None:
    x, out = np.ones((2, 3), np.float32), np.full((2, 3), 7.0, np.float32)
    with pytest.raises(IndexError, match=r"index 3 of row 1 is out of \[0, 3\)"):
        _kernels.cross_entropy_grad(out, np.zeros(2, np.float32), x, np.array([0, 3]), 1.0)
    with pytest.raises(IndexError, match="index -1"):
        _kernels.embedding_grad(out, x, np.array([0, -1]))
    with pytest.raises(TypeError, match="float32"):
        _kernels.gelu(out, x.astype(np.float64))
    with pytest.raises(TypeError, match="strides"):
        _kernels.gelu(out.T, np.ones((3, 2), np.float32))
    with pytest.raises(TypeError, match="float16"):
        _kernels.gelu(out, x.astype(np.float16))
    with pytest.raises(ValueError, match="6 belong there"):
        _kernels.gelu(out[:1], x)
    with pytest.raises(ValueError, match="knows 1 distances"):
        _kernels.attention(out, np.zeros((1, 1, 2), np.float32), np.ones((2, 9), np.float32), x[:1, :1], 1, 1)
    assert (out == 7.0).all()


def test_arrays_that_have_no_kernels_are_known() -> None:
    x = np.ones((4, 4), np.float32)
    assert has_kernels(np, x, x)
    assert not has_kernels(Witness(), x)
    assert not has_kernels(np, x[:, ::2])
    assert not has_kernels(np, x, x.astype(np.float64))
    assert not has_kernels(np, x.astype(np.float16))
