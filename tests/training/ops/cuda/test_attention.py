"""Attention run from its PTX, forward and backward, beside the engine's op in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.devices.kernel_runs import empty, fixed, run, wide

from zbmd.tools.lab.ptx import Launch
from zbmd.training import ops
from zbmd.training.autograd.tape import Tape, Tensor

Array = npt.NDArray[Any]
TILES = {"attention": 64, "attention_wgmma": 128}
"""Queries, or keys of a gradient, of a block."""
BY = pytest.mark.parametrize("by", TILES)


def _expected(qkv: Array, dy: Array, bias: Array, shape: tuple[int, int, int, int]) -> tuple[Array, Array]:
    """Return attention and the gradient of qkv, of the op that knows no groups: keys and values repeated."""
    batch, heads, kv_heads, depth = shape
    rows, group = len(qkv), heads // kv_heads
    q, k, v = np.split(wide(qkv).reshape(rows, -1, depth), [heads, heads + kv_heads], axis=1)
    repeated = [q, *(np.repeat(one, group, axis=1) for one in (k, v))]
    tape, leaf = Tape(np), Tensor(np.concatenate(repeated, axis=1).reshape(rows, -1))
    y = ops.causal_attention(tape, leaf, bias, batch=batch, heads=heads)
    tape.backward(tape.record(np.asarray(0.0, np.float32), lambda _: y.accumulate(wide(dy))))
    assert leaf.grad is not None
    dq, *dkv = np.split(leaf.grad.reshape(rows, 3 * heads, depth), 3, axis=1)
    summed = [one.reshape(rows, kv_heads, group, depth).sum(axis=2) for one in dkv]
    return y.data, np.concatenate([dq, *summed], axis=1).reshape(rows, -1)


def _operands(length: int, shape: tuple[int, int, int, int]) -> tuple[Array, Array, Array]:
    batch, heads, kv_heads, depth = shape
    random = np.random.default_rng(length)
    rows, width = batch * length, (heads + 2 * kv_heads) * depth
    return (
        fixed(random.standard_normal((rows, width)), "bf16"),
        fixed(random.standard_normal((rows, heads * depth)), "bf16"),
        fixed(ops.causal_distance_bias(np, heads, length + 3, np.float32)),
    )


def _run(
    qkv: Array, dy: Array, bias: Array, length: int, shape: tuple[int, int, int, int], by: str = "attention"
) -> tuple[Array, Array, list[Launch]]:
    batch, heads, kv_heads, depth = shape
    tile = TILES[by]
    rows, tiles, numbers = batch * length, -(-length // tile), (length, heads, kv_heads, bias.shape[1])
    y, logs = empty(dy.shape, "bf16"), empty((batch, heads, length))
    delta, dqkv = empty((batch, heads, length)), empty(qkv.shape, "bf16")
    launches = [run(f"{by}_{depth}", (tiles, batch * heads), [y, logs], qkv, bias, *numbers)]
    run(f"attention_delta_{depth}", -(-rows * heads // 4), [delta], dy, fixed(y, "bf16"), length, heads, rows)
    given = (dy, fixed(logs), fixed(delta), qkv, bias, *numbers)
    for name, blocks in (("keys", kv_heads), ("queries", heads)):
        launches.append(run(f"{by}_{name}_grad_{depth}", (tiles, batch * blocks), [], dqkv, *given))
    return y, dqkv, launches


def _error(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(wide(found) - expected) / np.linalg.norm(expected))


SHAPES = pytest.mark.parametrize(
    ("length", "shape"),
    [(70, (2, 2, 2, 64)), (66, (1, 4, 2, 64)), (7, (1, 2, 1, 64)), (68, (1, 2, 1, 128))],
    ids=["two sequences", "groups", "shorter than a tile", "depth 128"],
)


@BY
@SHAPES
def test_attention_and_its_gradient(by: str, length: int, shape: tuple[int, int, int, int]) -> None:
    qkv, dy, bias = _operands(length, shape)
    y, dqkv, _ = _run(qkv, dy, bias, length, shape, by)
    expected, dqkv_expected = _expected(qkv, dy, bias, shape)
    assert _error(y, expected) < 4e-3
    assert _error(dqkv, dqkv_expected) < 8e-3
    np.testing.assert_allclose(wide(y), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(("length", "depth"), [(7, 64), (200, 64), (68, 128)])
def test_both_kernels_have_the_same_bits(length: int, depth: int) -> None:
    """The same sums in the same order: which of them runs changes no bit. 200: a second tile with an edge."""
    shape = (1, 2, 1, depth)
    found = [_run(*_operands(length, shape), length, shape, by)[:2] for by in TILES]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))


@BY
def test_whole_tiles_waste_nothing(by: str) -> None:
    """No bank conflict; rows of 128 bytes are whole sectors. The bias's elements overlap, and cost little."""
    shape = (1, 1, 1, 64)
    *_, launches = _run(*_operands(128, shape), 128, shape, by)
    for launch in launches:
        counters = launch.counters
        assert counters.ratio(counters.shared) == 1.0
        copies = {
            where: cost for where, cost in counters.sectors.items() if "cp.async" in where or "v4" in where
        }
        assert copies and counters.ratio(copies) <= 1.1


@BY
def test_a_query_sees_no_later_key(by: str) -> None:
    """Earlier results do not depend on later keys and values."""
    shape = (1, 1, 1, 64)
    qkv, dy, bias = _operands(70, shape)
    changed = np.array(qkv)
    changed[66:, 64:] *= -100
    y, *_ = _run(fixed(changed, "bf16"), dy, bias, 70, shape, by)
    whole, *_ = _run(qkv, dy, bias, 70, shape, by)
    np.testing.assert_array_equal(wide(y)[:66], wide(whole)[:66])
    assert (wide(y)[66:] != wide(whole)[66:]).mean() > 0.9
