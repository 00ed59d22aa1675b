"""Matrix products: fragments, descriptors and swizzles beside numpy, rounding beside exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.ptx_programs import compiled

from zbmd.tools.lab import ptx
from zbmd.tools.lab.ptx.arithmetic import to_bfloat
from zbmd.tools.lab.ptx.tensor_cores import FORMATS, descriptor_places, multiply_add

FRAGMENTS = {"bf16": (16, "m16n8k16"), "f16": (16, "m16n8k16"), "tf32": (8, "m16n8k8")}
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}


def _small(shape: tuple[int, ...], kind: str) -> npt.NDArray[Any]:
    """Small integers: their products and sums are exact in every format."""
    return np.random.default_rng(7).integers(-4, 5, shape).astype(DTYPES[kind])


@pytest.mark.parametrize("kind", FRAGMENTS)
@pytest.mark.parametrize("swapped", [False, True])
def test_mma_multiplies_fragments(kind: str, swapped: bool) -> None:
    """With two registers of B swapped the result is wrong: the registers' places matter."""
    k, shape = FRAGMENTS[kind]
    b = "%6, %5" if swapped else "%5, %6"
    source = f"""#include "device.cuh"
    KERNEL k(float *d, const u32 *a, const u32 *b) {{
        int row = threadIdx.x / 4, word = threadIdx.x % 4;
        float z[4] = {{1, 1, 1, 1}};
        asm volatile("mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{%0,%1,%2,%3}}, "
                     "{{%4,%7,%8,%9}}, {{{b}}}, {{%0,%1,%2,%3}};"
                     : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3])
                     : "r"(a[row * 8 + word]), "r"(b[row * 8 + word]), "r"(b[row * 8 + word + 4]),
                       "r"(a[(row + 8) * 8 + word]), "r"(a[row * 8 + word + 4]),
                       "r"(a[(row + 8) * 8 + word + 4]));
        d[row * 8 + word * 2] = z[0], d[row * 8 + word * 2 + 1] = z[1];
        d[(row + 8) * 8 + word * 2] = z[2], d[(row + 8) * 8 + word * 2 + 1] = z[3];
    }}"""
    a, b_columns, d = _small((16, k), kind), _small((8, k), kind)[::-1].copy(), np.zeros((16, 8), np.float32)
    arguments = [
        ptx.Buffer(d, initialised=False),
        *(ptx.Buffer(one.view(np.uint32)) for one in (a, b_columns)),
    ]
    ptx.launch(compiled(source, "k"), grid=1, block=32, arguments=arguments)
    expected = a.astype(np.float32) @ b_columns.astype(np.float32).T + 1
    assert np.array_equal(d, expected) is not swapped


BF16 = st.one_of(st.floats(-(2.0**40), 2.0**40, width=32), st.floats(-4, 4, width=16)).map(
    lambda x: float(ml_dtypes.bfloat16(x))
)


@settings(max_examples=40, deadline=None)
@given(a=st.lists(BF16, min_size=16, max_size=16), b=st.lists(BF16, min_size=16, max_size=16), c=BF16)
def test_a_product_is_cut_as_the_chip_cuts_it(a: list[float], b: list[float], c: float) -> None:
    """The model of docs/H100.md, in exact arithmetic."""
    found = multiply_add(np.array([a]), np.array([b]).T, np.array([[c]], np.float32), ("bf16", "bf16"))[0, 0]
    exponent = lambda x: max(int(np.frexp(x)[1]) - 1, -126)  # noqa: E731
    terms = [
        (Fraction(x) * Fraction(y), exponent(x) + exponent(y)) for x, y in zip(a, b, strict=True) if x and y
    ]
    terms += [(Fraction(c), exponent(c))] if c else []
    unit = Fraction(2) ** (max((e for _, e in terms), default=0) - 25)
    total = sum((int(value / unit) * unit for value, _ in terms), Fraction(0))
    assert abs(Fraction(float(found))) <= abs(total)
    beyond = np.nextafter(found, np.float32(np.inf if total > 0 else -np.inf))
    assert total == 0 or abs(Fraction(float(beyond))) > abs(total)


def test_a_product_of_what_is_not_finite_is_not() -> None:
    a, b = np.ones((1, 16)), np.ones((16, 1))
    for value, expected in ((np.inf, np.inf), (-np.inf, -np.inf), (np.nan, np.nan)):
        a[0, 3] = value
        np.testing.assert_equal(
            multiply_add(a, b, np.zeros((1, 1), np.float32), ("bf16", "bf16"))[0, 0], expected
        )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("rows", [64, 128])
def test_a_descriptor_names_each_byte_once(mode: int, rows: int, transposed: bool) -> None:
    """Every element has a place of its own, and pieces of 16 bytes of 8 lines are in different banks."""
    width = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
    if mode == 0:
        leading, stride = (16 * rows, 128) if not transposed else (128 * (rows // 8), 128)
    elif transposed:
        leading, stride = 8 * width, 8 * width * (rows * 2 // width)
    else:
        leading, stride = 16, 8 * width
    descriptor = 1024 >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62
    places = descriptor_places(descriptor, rows, 16, 2, transposed=transposed)
    assert len(np.unique(places)) == rows * 16 and (places % 2 == 0).all() and places.min() >= 1024
    lines = places[:8, 0] if not transposed else places[0, :8]
    if mode in (0, 1):
        assert len(np.unique(lines // 16 % 8)) == 8


def _wgmma(kind: str, n: int, majors: str, fault: str) -> str:
    results = n // 2
    registers = ",".join(f"%{i}" for i in range(results))
    outputs = ", ".join(f'"+f"(z[{i}])' for i in range(results))
    shape = f"m64n{n}k{32 // FORMATS[kind].nbytes}"
    early = fault == "early"
    return f"""#include "device.cuh"
    KERNEL k(float *d, const Words4 *a, const Words4 *b, u64 a_form, u64 b_form) {{
        extern __shared__ __align__(1024) u8 memory[];  // the two tiles, as their descriptors say
        int tid = threadIdx.x;
        for (int i = tid; i < {64 * 2}; i += 128) ((Words4 *)memory)[i] = a[i];
        for (int i = tid; i < {n * 2}; i += 128) ((Words4 *)(memory + 2048))[i] = b[i];
        {"" if fault == "fence" else 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'}
        __syncthreads();
        u64 at = shared_address(memory) >> 4;
        float z[{results}] = {{}};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.{shape}.f32.{kind}.{kind} {{{registers}}}, "
                     "%{results}, %{results + 1}, 1, 1, 1{majors};" : {outputs}
                     : "l"(a_form + at), "l"(b_form + at + 128));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned {int(early)};" ::: "memory");
        int row = tid / 32 * 16 + tid % 32 / 4;
        for (int i = 0; i < {results}; i++)
            d[(row + 8 * (i / 2 % 2)) * {n} + tid % 4 * 2 + i / 4 * 8 + i % 2] = z[i];
    }}"""


def _multiply(kind: str, n: int, mode: int, *, transposed: bool, fault: str = "") -> tuple[Any, Any]:
    nbytes = FORMATS[kind].nbytes
    k = 32 // nbytes
    a, b, d = _small((64, k), kind), _small((n, k), kind)[::-1].copy(), np.zeros((64, n), np.float32)
    forms, tiles = list[int](), list[npt.NDArray[np.uint8]]()
    for tile in (a, b):
        rows, width = len(tile), {0: 16, 1: 128, 2: 64, 3: 32}[mode]
        if mode == 0:
            leading, stride = (128 * (rows // 8), 128)
        elif transposed:
            leading, stride = 8 * width, 8 * width * (rows * nbytes // width)
        else:
            leading, stride = 16, 8 * 32
        form = leading >> 4 << 16 | stride >> 4 << 32 | mode << 62
        places = descriptor_places(form, rows, k, nbytes, transposed=transposed)
        laid = np.zeros(rows * 32, np.uint8)
        for byte in range(nbytes):
            laid[places + byte] = tile.view(np.uint8).reshape(rows, k, nbytes)[:, :, byte]
        forms.append(form)
        tiles.append(laid)
    majors = f", {int(transposed)}, {int(transposed)}" if nbytes == 2 else ""
    arguments: list[Any] = [ptx.Buffer(d, initialised=False), *map(ptx.Buffer, tiles), *forms]
    kernel = compiled(_wgmma(kind, n, majors, fault), "k", "sm_90a")
    ptx.launch(kernel, grid=1, block=128, arguments=arguments, shared=2048 + n * 32)
    return d, a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.parametrize(
    ("kind", "n", "mode", "transposed"),
    [
        ("bf16", 64, 0, False),
        ("bf16", 64, 1, True),
        ("f16", 32, 3, False),
        ("bf16", 32, 2, True),
        ("e4m3", 64, 3, False),
    ],
)
def test_wgmma_multiplies_tiles(kind: str, n: int, mode: int, transposed: bool) -> None:
    found, expected = _multiply(kind, n, mode, transposed=transposed)
    np.testing.assert_array_equal(found, expected)


def test_wgmma_is_waited_for_and_sees_stores_after_a_fence_only() -> None:
    with pytest.raises(ptx.RaceFound, match=r"has not executed fence\.proxy\.async"):
        _multiply("bf16", 64, 0, transposed=False, fault="fence")
    with pytest.raises(ptx.UninitialisedRead, match="is read while wgmma has still to write it"):
        _multiply("bf16", 64, 0, transposed=False, fault="early")


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_loads_matrices(transposed: bool) -> None:
    """Into the places in which a lane holds two neighbours of a row, or of a column."""
    source = f"""#include "device.cuh"
    KERNEL k(u32 *y, const u32 *x) {{
        __shared__ alignas(16) u32 tile[128];
        for (int i = threadIdx.x; i < 128; i += 32) tile[i] = x[i];
        __syncwarp();
        u32 r[4];
        load_matrices{"_transposed" if transposed else ""}(r, shared_address(tile + threadIdx.x * 4));
        for (int i = 0; i < 4; i++) y[i * 32 + threadIdx.x] = r[i];
    }}"""
    x, y = np.arange(256, dtype=np.uint16).reshape(4, 8, 8), np.zeros((4, 8, 8), np.uint16)
    arguments = [ptx.Buffer(y.view(np.uint32), initialised=False), ptx.Buffer(x.view(np.uint32))]
    taken = ptx.launch(compiled(source, "k"), grid=1, block=32, arguments=arguments)
    np.testing.assert_array_equal(y, x.swapaxes(1, 2) if transposed else x)
    assert taken.counters.ratio(taken.counters.shared) == 1


@pytest.mark.parametrize(("stride", "passes"), [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_bank_conflicts_and_sectors_are_counted(stride: int, passes: int) -> None:
    source = f"""#include "device.cuh"
    KERNEL k(float *y, const float *x) {{
        __shared__ float tile[32 * 33];
        int at = threadIdx.x * {stride};
        tile[at] = x[at];
        y[at] = tile[at];
    }}"""
    x, y = np.ones(32 * 33, np.float32), np.zeros(32 * 33, np.float32)
    taken = ptx.launch(compiled(source, "k"), grid=1, block=32, arguments=[ptx.Buffer(y), ptx.Buffer(x)])
    assert taken.counters.ratio(taken.counters.shared) == passes
    assert taken.counters.ratio(taken.counters.sectors) == min(stride, 8)


def test_rounding_to_bfloat_is_that_of_ml_dtypes() -> None:
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    np.testing.assert_array_equal(to_bfloat(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))
