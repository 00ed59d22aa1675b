"""Every op's gradients against finite differences in double precision, and what else it promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.array_modules import Witness

from zbmd.training import ops
from zbmd.training.autograd.tape import Parameter, Tape, Tensor

Floats = npt.NDArray[np.float64]
Op = Callable[[Tape, Tensor, list[Parameter]], Tensor]
STEP = 1e-6


def _weighted_sum(tape: Tape, y: Tensor, weights: Floats) -> Tensor:
    return tape.record(np.asarray((y.data * weights).sum()), lambda dy: y.accumulate(dy * weights))


def check_gradients(op: Op, x: Floats, parameters: list[Floats], seed: int = 0) -> None:
    """Compare the gradients of a random weighting of the op's output with central differences.

    By the kernels of the numpy device, and the general way, which agree.
    """
    kernels = [_checked_gradients(op, xp, x, parameters, seed) for xp in (np, Witness())]
    for one, other in zip(*kernels, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def _checked_gradients(
    op: Op, xp: ModuleType, x: Floats, parameters: list[Floats], seed: int
) -> list[Floats]:
    random = np.random.default_rng(seed)
    inputs = [x, *parameters]
    before = [array.copy() for array in inputs]
    probe = op(
        Tape(xp), Tensor(x), [Parameter(p, np.empty_like(p), i, None) for i, p in enumerate(parameters)]
    )
    weights = random.standard_normal(probe.data.shape)

    def value() -> float:
        tape = Tape(xp, recording=False)
        leaves = [Parameter(p, None, i, None) for i, p in enumerate(parameters)]
        return float((op(tape, Tensor(x), leaves).data * weights).sum())

    tape, leaf = Tape(xp), Tensor(x)
    leaves = [Parameter(p, np.full_like(p, np.nan), i, None) for i, p in enumerate(parameters)]
    tape.backward(_weighted_sum(tape, op(tape, leaf, leaves), weights))
    for array, kept, grad in zip(inputs, before, [leaf.grad, *(p.grad for p in leaves)], strict=True):
        np.testing.assert_array_equal(array, kept, err_msg="an op changed its input")
        if grad is None:
            continue
        for place in random.choice(array.size, size=min(array.size, 40), replace=False):
            original = array.flat[place]
            array.flat[place] = original + STEP
            above = value()
            array.flat[place] = original - STEP
            below = value()
            array.flat[place] = original
            slope = (above - below) / (2 * STEP)
            assert math.isclose(grad.flat[place], slope, rel_tol=1e-5, abs_tol=1e-7)
    return [probe.data, *(grad for grad in (leaf.grad, *(p.grad for p in leaves)) if grad is not None)]


def normal(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape)


def test_linear() -> None:
    check_gradients(lambda t, x, p: ops.linear(t, x, p[0]), normal(5, 3), [normal(3, 4)])


def test_linear_onto_a_residual() -> None:
    check_gradients(lambda t, x, p: ops.linear(t, x, p[0], residual=x), normal(5, 3), [normal(3, 3)])


def test_rms_norm() -> None:
    check_gradients(lambda t, x, p: ops.rms_norm(t, x, p[0]), normal(5, 7), [normal(7, seed=2)])


def test_rms_norm_of_small_rows() -> None:
    check_gradients(lambda t, x, p: ops.rms_norm(t, x, p[0]), normal(5, 7) * 1e-3, [normal(7, seed=2)])


@pytest.mark.parametrize("features", [1, 7, 8, 21])
def test_layer_norm(features: int) -> None:
    gain, bias = normal(features, seed=2), normal(features, seed=3)
    check_gradients(lambda t, x, p: ops.layer_norm(t, x, p[0], p[1]), normal(5, features), [gain, bias])


@pytest.mark.parametrize("activation", [ops.squared_relu, ops.gelu])
def test_activations(activation: Callable[[Tape, Tensor], Tensor]) -> None:
    check_gradients(lambda t, x, _: activation(t, x), normal(6, 9), [])


def test_squared_relu_of_known_values() -> None:
    x = np.array([[-2.0, -0.0, 0.0, 0.5, 3.0]])
    np.testing.assert_array_equal(ops.squared_relu(Tape(np), Tensor(x)).data, [[0.0, 0.0, 0.0, 0.25, 9.0]])


@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 6), heads=st.integers(1, 3), depth=st.integers(1, 4))
def test_causal_attention(batch: int, length: int, heads: int, depth: int) -> None:
    bias = ops.causal_distance_bias(np, heads, length, np.float64)
    check_gradients(
        lambda t, x, _: ops.causal_attention(t, x, bias, batch=batch, heads=heads),
        normal(batch * length, 3 * heads * depth),
        [],
    )


def test_attention_is_the_textbook_formula() -> None:
    batch, length, heads, depth = 2, 5, 3, 4
    qkv = normal(batch * length, 3 * heads * depth)
    bias = ops.causal_distance_bias(np, heads, length, np.float64)
    y = ops.causal_attention(Tape(np), Tensor(qkv), bias, batch=batch, heads=heads).data
    split = qkv.reshape(batch, length, 3, heads, depth)
    for b in range(batch):
        for h in range(heads):
            q, k, v = (split[b, :, part, h] for part in range(3))
            back = np.arange(length)[:, None] - np.arange(length)
            scores = q @ k.T / math.sqrt(depth) + bias[h][np.abs(back)]
            odds = np.where(back >= 0, np.exp(scores), 0.0)
            expected = odds / odds.sum(1, keepdims=True) @ v
            got = y.reshape(batch, length, heads, depth)[b, :, h]
            np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_attention_never_looks_ahead_nor_at_another_sequence() -> None:
    bias = ops.causal_distance_bias(np, 2, 6, np.float64)
    qkv = normal(12, 12)
    y = ops.causal_attention(Tape(np), Tensor(qkv.copy()), bias, batch=2, heads=2).data
    qkv[3:] = 1e3
    changed = ops.causal_attention(Tape(np), Tensor(qkv), bias, batch=2, heads=2).data
    np.testing.assert_array_equal(changed[:3], y[:3])


def test_attention_keeps_finite_with_large_scores() -> None:
    bias = ops.causal_distance_bias(np, 1, 4, np.float32)
    qkv = (normal(4, 12) * 1e3).astype(np.float32)
    assert np.isfinite(ops.causal_attention(Tape(np), Tensor(qkv), bias, batch=1, heads=1).data).all()


@given(heads=st.integers(1, 16), length=st.integers(1, 20))
def test_distance_bias_prefers_its_offset(heads: int, length: int) -> None:
    bias = ops.causal_distance_bias(np, heads, length, np.float32)
    assert bias.shape == (heads, length)
    assert np.isfinite(bias).all()
    near = min(4, heads // 2)
    for head in range(heads):
        assert bias[head].argmax() == min(head if head < near else 0, length - 1)


def test_embedding() -> None:
    tokens = np.array([3, 0, 3, 1, 3, 1], dtype=np.uint8)
    check_gradients(lambda t, _, p: ops.embedding(t, tokens, p[0]), normal(1, 1), [normal(5, 4)])


def test_cross_entropy() -> None:
    targets = np.array([0, 3, 3, 1], dtype=np.uint8)
    check_gradients(lambda t, x, _: ops.cross_entropy(t, x, targets, weight=0.3), normal(4, 5), [])


def test_cross_entropy_of_even_odds_is_the_logarithm() -> None:
    loss = ops.cross_entropy(Tape(np), Tensor(np.zeros((6, 8), np.float32)), np.arange(6), weight=1 / 6)
    assert loss.data.dtype == np.float32
    assert math.isclose(float(loss.data), math.log(8), rel_tol=1e-6)


def test_cross_entropy_keeps_finite_with_large_logits() -> None:
    logits = np.array([[1e4, -1e4, 0.0]], dtype=np.float32)
    assert ops.cross_entropy(Tape(np), Tensor(logits), np.array([0]), weight=1.0).data == 0.0
    assert ops.cross_entropy(Tape(np), Tensor(logits), np.array([1]), weight=1.0).data == 2e4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ops_stay_in_the_dtype_of_their_inputs(dtype: type[np.floating]) -> None:
    tape = Tape(np)
    random = np.random.default_rng(0)

    def leaf(index: int, *shape: int) -> Parameter:
        data = random.standard_normal(shape).astype(dtype)
        return Parameter(data, np.empty_like(data), index, None)

    tokens = np.array([1, 2, 0])
    bias = ops.causal_distance_bias(np, 2, 3, dtype)
    made = [ops.embedding(tape, tokens, leaf(0, 4, 8))]
    made.append(ops.rms_norm(tape, made[-1], leaf(1, 8)))
    made.append(ops.linear(tape, made[-1], leaf(2, 8, 24)))
    made.append(ops.causal_attention(tape, made[-1], bias, batch=1, heads=2))
    made.append(ops.gelu(tape, made[-1]))
    made.append(ops.squared_relu(tape, made[-1]))
    made.append(ops.cross_entropy(tape, made[-1], np.array([1, 2, 3]), weight=0.5))
    assert [tensor.data.dtype for tensor in made] == [np.dtype(dtype)] * len(made)
    seen: list[np.dtype[np.generic]] = []
    nodes = list(tape._nodes)
    for index, (tensor, backward) in enumerate(nodes):

        def spy(dy: np.ndarray, backward: Callable[[np.ndarray], None] = backward) -> None:
            seen.append(dy.dtype)
            backward(dy)

        tape._nodes[index] = (tensor, spy)
    tape.backward(made[-1])
    assert seen == [np.dtype(dtype)] * len(nodes)
