"""Matrix products run from their PTX: values beside numpy, epilogues, edges, bank conflicts and sectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.devices.kernel_runs import empty, fixed, run, tiled, wide

from zbmd.tools.lab.ptx import Launch, Tiles
from zbmd.tools.lab.ptx.arithmetic import to_tf32
from zbmd.tools.lab.ptx.tensor_cores import multiply_add
from zbmd.training import ops
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.ops.cuda.operators import ACTIVATIONS

Array = npt.NDArray[Any]
TILES = {"matmul": (128, 128), "tma": (128, 256), "tf32": (128, 128)}
BOXES = ({"n": (128, 64), "t": (64, 64)}, {"n": (64, 64), "t": (256, 64)})
"""Rows and columns of what `tma` brings of each operand at once, by whether it is transposed."""
BY = pytest.mark.parametrize("by", TILES)


def _kind(by: str) -> str:
    """Return the kind of operands, and of what an epilogue reads and keeps."""
    return "f32" if by == "tf32" else "bf16"


def _operands(by: str, m: int, n: int, k: int) -> tuple[Array, Array]:
    random = np.random.default_rng(m * n + k)
    a, b = (fixed(random.standard_normal(shape), _kind(by)) for shape in ((m, k), (k, n)))
    return a, b


def _stored(a: Array, b: Array, form: str) -> tuple[Array, Array]:
    """Return the operands as the form stores them."""
    left, right = (
        fixed(one.T if is_transposed == "t" else one, "f32" if one.itemsize == 4 else "bf16")
        for one, is_transposed in zip((a, b), form, strict=True)
    )
    return left, right


def _multiply(
    by: str,
    form: str,
    kind: str,
    a: Array,
    b: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    before: Array | None = None,
    scale: float = 1.0,
    activation: int = 0,
) -> tuple[Array, Launch]:
    (m, k), n = a.shape, b.shape[1]
    c, (rows, columns) = empty((m, n), kind), TILES[by]
    grid = (-(-n // columns), -(-m // rows))
    rest = (m, n, k, bias, residual, before, scale, activation)
    left, right = _stored(a, b, form)
    operands: tuple[Array | Tiles, Array | Tiles] = left, right
    if by == "tma":
        operands = tiled(left, *BOXES[0][form[0]]), tiled(right, *BOXES[1][form[1]])
    return c, run(f"{by}_{form}_{kind}", grid, [c], *operands, *rest)


def _in_steps(a: Array, b: Array) -> npt.NDArray[np.float32]:
    """Return the product as tensor cores compute it: 16 elements of k at a time, 8 of float32, in order."""
    kind, each = ("bf16", 16) if a.itemsize == 2 else ("tf32", 8)
    sums = np.zeros((len(a), b.shape[1]), np.float32)
    for at in range(0, a.shape[1], each):
        left, right = (_rounded(one).astype(np.float64) for one in (a[:, at : at + each], b[at : at + each]))
        sums = multiply_add(left, right, sums, (kind, kind))
    return sums


def _rounded(values: Array) -> Array:
    """Return what of operands enters a product."""
    return values if values.itemsize == 2 else to_tf32(values)


@BY
@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_a_product_with_ragged_edges(by: str, form: str) -> None:
    """Two tiles and an edge in every direction; the bits of the sequence of instructions."""
    a, b = _operands(by, 136, 24, 136)
    found, _ = _multiply(by, form, "f32", a, b)
    np.testing.assert_array_equal(found, _in_steps(a, b))
    exact = _rounded(a).astype(np.float64) @ _rounded(b).astype(np.float64)
    assert np.abs(found - exact).max() < 1e-6 * np.abs(exact).max()


@BY
@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_a_product_of_whole_tiles_wastes_nothing(by: str, form: str) -> None:
    a, b = _operands(by, *TILES[by], 64)
    found, taken = _multiply(by, form, _kind(by), a, b)
    np.testing.assert_array_equal(wide(found), wide(_in_steps(a, b).astype(found.dtype)))
    assert taken.counters.ratio(taken.counters.shared) == 1.0
    assert taken.counters.ratio(taken.counters.sectors) <= 1.1


@BY
@pytest.mark.parametrize("activation", [0, 1, 2])
def test_epilogues(by: str, activation: int) -> None:
    a, b = _operands(by, 40, 136, 32)
    random = np.random.default_rng(3)
    bias = fixed(random.standard_normal(136))
    residual = fixed(random.standard_normal((40, 136)), _kind(by))
    before = empty((40, 136), _kind(by))
    found, _ = _multiply(
        by, "nn", "f32", a, b, bias=bias, residual=residual, before=before, scale=0.25, activation=activation
    )
    x = _in_steps(a, b) * np.float32(0.25) + bias
    gelu = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
    y = [x, gelu, np.maximum(x, 0) ** 2][activation]
    np.testing.assert_allclose(found, y + wide(residual), rtol=0, atol=3e-6)
    np.testing.assert_allclose(wide(before), x, rtol=2**-8)


@BY
@pytest.mark.parametrize("name", ["gelu", "squared_relu"])
def test_a_product_times_the_slope_of_an_activation(by: str, name: str) -> None:
    """As in a backward pass: the slope is that at the activation's input."""
    a, b = _operands(by, 40, 136, 32)
    given = fixed(np.random.default_rng(3).standard_normal((40, 136)), _kind(by))
    kind = ACTIVATIONS.index(f"{name}_grad")
    found, _ = _multiply(by, "nt", "f32", a, b, residual=given, activation=kind)
    tape, source = Tape(np), Tensor(wide(given))
    tape.play(getattr(ops, name)(tape, source), _in_steps(a, b))
    assert source.grad is not None
    np.testing.assert_allclose(found, source.grad, rtol=0, atol=1e-5)


@BY
def test_what_is_not_finite_reaches_its_row_and_column_only(by: str) -> None:
    a, b = (np.array(one) for one in _operands(by, 24, 16, 32))
    a[3, 5], b[7, 2] = np.nan, np.inf
    found, _ = _multiply(by, "nn", "f32", a, b)
    bad = ~np.isfinite(found)
    assert bad[3].all() and bad[:, 2].all() and bad.sum() == 16 + 24 - 1


def test_float32_is_rounded_to_nearest_before_it_is_multiplied() -> None:
    """Tensor cores would cut it, and be off by twice as much, always toward zero."""
    bits = np.array([0x3F800FFF, 0x3F801000, 0xBF803000, 0x7F800000, 0x7FC12345, 0x00001000], np.uint32)
    found = to_tf32(bits.view(np.float32)).view(np.uint32)
    expected = [0x3F800000, 0x3F802000, 0xBF804000, 0x7F800000, 0x7FC12345, 0x00002000]
    assert found.tolist() == expected
    a, b = _operands("tf32", 40, 24, 64)
    product, _ = _multiply("tf32", "nn", "f32", a, b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(product - exact) < 4e-4 * np.linalg.norm(exact)
