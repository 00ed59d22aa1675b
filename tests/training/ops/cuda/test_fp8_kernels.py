"""Kernels of FP8 run from their PTX: rounding, scales and products, with the bits of numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.devices.kernel_runs import empty, fixed, run, same, wide

from zbmd.tools.lab.ptx.tensor_cores import multiply_add
from zbmd.training.ops.fp8 import (
    DelayedScaling,
    Format,
    ScalingConfig,
    product_of_blocks,
    quantised,
    quantised_blocks,
)

Array = npt.NDArray[Any]
NAMES = {Format.E4M3: "e4m3", Format.E5M2: "e5m2"}
DEPTH = 128


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("form", Format)
def test_a_tensor_is_rounded_in_both_orientations(form: Format, kind: str) -> None:
    """Two blocks and an edge in both directions; what is not finite; the largest magnitude of each block."""
    rows, columns, scale = 80, 144, 32.0
    values = np.random.default_rng(0).standard_normal((rows, columns)) * 2
    values[3, 5], values[70, 130], values[2, 100], values[1, 1] = np.nan, np.inf, 1e30, -1e-30
    x, blocks = fixed(values, kind), (-(-columns // 64), -(-rows // 64))
    q, turned, most = empty((rows, columns), "u1"), empty((columns, rows), "u1"), empty(blocks[::-1])
    name = f"fp8_quantise_{NAMES[form]}_{kind}"
    taken = run(name, blocks, [q, turned, most], x, fixed([scale]), rows, columns)
    expected = quantised(x, scale, form)
    same(q.view(form.dtype), expected)
    same(turned.view(form.dtype), expected.T)
    pieces = [
        [np.abs(wide(x[j : j + 64, i : i + 64])).max() for i in range(0, columns, 64)]
        for j in range(0, rows, 64)
    ]
    np.testing.assert_array_equal(most, pieces)
    assert taken.counters.ratio(taken.counters.shared) == 1.0


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_whole_tiles_are_rounded_without_waste(kind: str) -> None:
    x = fixed(np.random.default_rng(0).standard_normal((64, 64)), kind)
    q, turned, most = empty((64, 64), "u1"), empty((64, 64), "u1"), empty(1)
    taken = run(f"fp8_quantise_e4m3_{kind}", (1, 1), [q, turned, most], x, fixed([1.0]), 64, 64)
    assert taken.counters.ratio(taken.counters.shared) == 1.0
    assert taken.counters.ratio(taken.counters.sectors) <= 1.1


def test_one_orientation_alone() -> None:
    x = fixed(np.random.default_rng(0).standard_normal((16, 32)))
    for place in range(2):
        q, most = empty((16, 32) if place == 0 else (32, 16), "u1"), empty(1)
        given = (q, None) if place == 0 else (None, q)
        run("fp8_quantise_e4m3_f32", (1, 1), [], *given, most, x, fixed([1.0]), 16, 32)
        expected = quantised(x, 1.0, Format.E4M3)
        same(q.view(Format.E4M3.dtype), expected if place == 0 else expected.T)


@pytest.mark.parametrize("form", Format)
def test_scales_on_a_device_are_those_of_the_machine(form: Format) -> None:
    """The same bits of state after each step, over more steps than the history has places."""
    machine = DelayedScaling([form], ScalingConfig(history=3, margin=1))
    state = machine.state[0].copy()
    random = np.random.default_rng(0)
    magnitudes = [*(2.0 ** random.uniform(-30, 30, 5)), 448.0, 449.0, 0.0, np.inf, 1e-42, 0.0, 0.0, np.nan]
    for step, top in enumerate(magnitudes):
        most = fixed(np.append(np.abs(random.standard_normal(40)) * min(top, 1.0) / 8, top))
        run(f"fp8_scale_{NAMES[form]}", 1, [], state, most, len(most), fixed([step], "i4"), 3, 1)
        machine.observe([most.max()])
        np.testing.assert_array_equal(state, machine.state[0])


def _in_steps(a: Array, b: Array, kinds: tuple[str, str]) -> npt.NDArray[np.float32]:
    """Return a (m, k) times b (n, k) transposed: k in fours of 32 in the accumulators, these in float32."""
    sums = np.zeros((len(a), len(b)), np.float32)
    for start in range(0, a.shape[1], DEPTH):
        part = np.zeros_like(sums)
        for at in range(start, min(start + DEPTH, a.shape[1]), 32):
            left, right = (one[:, at : at + 32].astype(np.float64) for one in (a, b))
            part = multiply_add(left, right.T, part, kinds)
        sums += part
    return sums


PRODUCTS = {
    "fp8_e4m3_e4m3_bf16": (Format.E4M3, Format.E4M3),
    "fp8_e5m2_e4m3_bf16": (Format.E5M2, Format.E4M3),
    "fp8_e4m3_e5m2_f32": (Format.E4M3, Format.E5M2),
}


def _operands(name: str, m: int, n: int, k: int) -> tuple[Array, Array, Array, Array]:
    """Return a, b and the scales that both were multiplied by."""
    random, found = np.random.default_rng(m + n + k), list[Array]()
    for rows, form, scale in zip((m, n), PRODUCTS[name], (2.0**6, 2.0**-3), strict=True):
        found.append(quantised(random.standard_normal((rows, k)) / scale * 4, scale, form))
    return found[0], found[1], fixed([2.0**6]), fixed([2.0**-3])


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_bits_of_its_instructions(name: str) -> None:
    """Two tiles and an edge in each direction, and more steps than stages."""
    m, n, k = 136, 24, 5 * DEPTH + 48
    a, b, scale_a, scale_b = _operands(name, m, n, k)
    c = empty((m, n), name.rpartition("_")[2])
    given = (fixed(a.view("u1"), "u1"), fixed(b.view("u1"), "u1"))
    run(name, (1, 2), [c], *given, m, n, k, scale_a, scale_b, None, None, None, 0)
    first, second = PRODUCTS[name]
    expected = _in_steps(a, b, (NAMES[first], NAMES[second])) / np.float32(8)
    np.testing.assert_array_equal(wide(c), wide(expected.astype(c.dtype)))
    exact = a.astype(np.float64) @ b.astype(np.float64).T / 8
    assert np.abs(wide(c) - exact).max() < 3e-3 * np.abs(exact).max()


def test_a_product_of_whole_tiles_wastes_nothing_and_has_an_epilogue() -> None:
    name, (m, n, k) = "fp8_e4m3_e4m3_bf16", (128, 128, 128)
    a, b, scale_a, scale_b = _operands(name, m, n, k)
    c, before = empty((m, n), "bf16"), empty((m, n), "bf16")
    random = np.random.default_rng(1)
    bias, residual = fixed(random.standard_normal(n)), fixed(random.standard_normal((m, n)), "bf16")
    given = (fixed(a.view("u1"), "u1"), fixed(b.view("u1"), "u1"))
    taken = run(name, (1, 1), [c], *given, m, n, k, scale_a, scale_b, bias, residual, before, 2)
    x = _in_steps(a, b, ("e4m3", "e4m3")) / np.float32(8) + bias
    np.testing.assert_allclose(wide(before), x, rtol=2**-8)
    np.testing.assert_allclose(wide(c), np.maximum(x, 0) ** 2 + wide(residual), rtol=2**-8, atol=1e-5)
    assert taken.counters.ratio(taken.counters.shared) == 1.0
    assert taken.counters.ratio(taken.counters.sectors) <= 1.1


def test_what_is_not_finite_reaches_its_row_and_column_only() -> None:
    name, (m, n, k) = "fp8_e4m3_e5m2_f32", (16, 16, 32)
    a, b, scale_a, scale_b = _operands(name, m, n, k)
    a[3, 5], b[7, 2] = np.nan, np.inf
    c, given = empty((m, n)), (fixed(a.view("u1"), "u1"), fixed(b.view("u1"), "u1"))
    run(name, (1, 1), [c], *given, m, n, k, scale_a, scale_b, None, None, None, 0)
    bad = ~np.isfinite(c)
    assert bad[3].all() and bad[:, 7].all() and bad.sum() == m + n - 1


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("name", "rows"), [("rows", 1), ("rows_turned", 1), ("tiles", 128), ("tiles_turned", 128)]
)
def test_blocks_are_rounded_with_scales_of_their_own(name: str, rows: int, kind: str) -> None:
    """Edges in both directions, magnitudes far apart, and a block with what is not finite."""
    shape = (144, 136)
    random = np.random.default_rng(0)
    values = random.standard_normal(shape) * 2.0 ** random.integers(-20, 20, (shape[0], 1))
    values[3, 5], values[140, 132], values[7] = np.nan, np.inf, 0.0
    x, is_turned = fixed(values, kind), name.endswith("turned")
    expected, scales = quantised_blocks(x.T if is_turned else x, rows)
    q, found = empty(expected.shape, "u1"), empty(scales.shape)
    grid = (-(-expected.shape[1] // DEPTH), -(-expected.shape[0] // DEPTH))
    taken = run(f"fp8_{name}_{kind}", grid, [q, found], x, *shape)
    np.testing.assert_array_equal(found, scales)
    same(q.view(expected.dtype), expected)
    assert taken.counters.ratio(taken.counters.shared) == 1.0


def test_a_product_of_blocks_has_the_bits_of_its_instructions() -> None:
    """Two tiles of weights, an edge in each direction, and more steps than stages."""
    m, n, k = 40, 144, 4 * DEPTH + 48
    random = np.random.default_rng(2)
    wide_a = random.standard_normal((m, k)) * 2.0 ** random.integers(-9, 9, (m, 1))
    wide_b = (
        random.standard_normal((n, k)) * np.repeat(2.0 ** random.integers(-9, 9, -(-k // DEPTH)), DEPTH)[:k]
    )
    (a, by_row), (b, by_tile) = quantised_blocks(wide_a, 1), quantised_blocks(wide_b, DEPTH)
    c, bias = empty((m, n), "bf16"), fixed(random.standard_normal(n))
    given = (fixed(a.view("u1"), "u1"), fixed(b.view("u1"), "u1"), m, n, k, fixed(by_row), fixed(by_tile))
    run("fp8_blocks_bf16", (2, 1), [c], *given, bias, None, None, 0)
    sums = np.zeros((m, n), np.float32)
    for step in range(by_row.shape[1]):
        part = slice(step * DEPTH, (step + 1) * DEPTH)
        factors = by_row[:, step, None] * np.repeat(by_tile[:, step], DEPTH)[None, :n]
        sums += _in_steps(a[:, part], b[:, part], ("e4m3", "e4m3")) / factors
    np.testing.assert_array_equal(wide(c), wide((sums + bias).astype(c.dtype)))
    exact = wide_a @ wide_b.T + bias
    errors = np.linalg.norm(wide(c) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < 0.06


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_gradient_of_weights_has_the_bits_of_its_instructions(kind: str) -> None:
    """Sums over tokens: scales of rows of both operands, edges, and more steps than stages.

    Magnitudes of tokens are far apart from block to block, and those of features within a block.
    """
    m, n, k = 40, 136, 4 * DEPTH + 48
    random = np.random.default_rng(3)
    of_tokens = np.repeat(2.0 ** random.integers(-9, 9, -(-k // DEPTH)), DEPTH)[:k]
    wide_a, wide_b = (
        random.standard_normal((rows, k)) * of_tokens * 2.0 ** random.integers(-9, 9, (rows, 1))
        for rows in (m, n)
    )
    (a, by_row), (b, by_column) = quantised_blocks(wide_a, 1), quantised_blocks(wide_b, 1)
    c = empty((m, n), kind)
    given = (fixed(a.view("u1"), "u1"), fixed(b.view("u1"), "u1"), m, n, k, fixed(by_row), fixed(by_column))
    run(f"fp8_of_rows_{kind}", (2, 1), [c], *given, None, None, None, 0)
    sums = np.zeros((m, n), np.float32)
    for step in range(by_row.shape[1]):
        part = slice(step * DEPTH, (step + 1) * DEPTH)
        factors = by_row[:, step, None] * by_column[:, step]
        sums += _in_steps(a[:, part], b[:, part], ("e4m3", "e4m3")) / factors
    np.testing.assert_array_equal(wide(c), wide(sums.astype(c.dtype)))
    close = product_of_blocks("tn", np.ascontiguousarray(wide_a.T), np.ascontiguousarray(wide_b.T))
    assert np.linalg.norm(wide(c) - close) < 4e-3 * np.linalg.norm(close)
    # Each operand is off by at most 1/16 of it.
    off = np.abs(wide(c) - wide_a @ wide_b.T)
    assert (off <= 0.14 * (np.abs(wide_a) @ np.abs(wide_b).T)).all()


def test_a_gradient_of_whole_tiles_wastes_nothing() -> None:
    random, c = np.random.default_rng(4), empty((128, 128), "bf16")
    (a, by_row), (b, by_column) = (quantised_blocks(random.standard_normal((128, 256)), 1) for _ in "ab")
    given = (fixed(a.view("u1"), "u1"), fixed(b.view("u1"), "u1"), 128, 128, 256)
    taken = run("fp8_of_rows_bf16", (1, 1), [c], *given, fixed(by_row), fixed(by_column), None, None, None, 0)
    assert taken.counters.ratio(taken.counters.shared) == 1.0
    assert taken.counters.ratio(taken.counters.sectors) <= 1.2  # scales lie a step apart


@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_what_is_not_finite_reaches_what_it_would_without_scales(form: str) -> None:
    random = np.random.default_rng(5)
    a, b = random.standard_normal((32, 32)), random.standard_normal((32, 32))
    a[3, 5], b[7, 2] = np.nan, np.inf
    found = product_of_blocks(form, a, b)
    with np.errstate(invalid="ignore"):
        wanted = (a.T if form[0] == "t" else a) @ (b.T if form[1] == "t" else b)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
