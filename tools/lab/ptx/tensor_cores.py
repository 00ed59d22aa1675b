"""Matrix products of tensor cores: `mma.sync` and `wgmma`, with the rounding that an H100 has.

The rounding follows the model of docs/H100.md, which gave the hardware's bits: the products of one
instruction and the addend are cut below the largest of their exponents, added exactly, and cut to float32.
Layouts of fragments and of descriptors follow the PTX ISA, sections "Matrix fragments for mma.m16n8k16" and
"Asynchronous warpgroup level matrix instructions".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from zbmd.tools.lab.ptx.arithmetic import from_bfloat
from zbmd.tools.lab.ptx.clocks import WARP, Ints
from zbmd.tools.lab.ptx.errors import DivergentThreads
from zbmd.tools.lab.ptx.memory import Values
from zbmd.tools.lab.ptx.program import Group, Immediate, Instruction, Operand, Register
from zbmd.tools.lab.ptx.state import BITS, Run, instruction, unsupported
from zbmd.tools.lab.ptx.transfers import items, values_of

WARPGROUP: Final = 128
CUT_BITS: Final = 25
CUT_BITS_FP8: Final = 13
_NOTHING: Final = -100_000
"""The exponent of zero, which takes no part."""


@dataclass(frozen=True, slots=True)
class _Format:
    """An operand's type: bytes of an element in a fragment, least exponent, and bits that the sum keeps."""

    nbytes: int
    least: int
    cut: int = CUT_BITS


FORMATS: Final = {
    "bf16": _Format(2, -126),
    "f16": _Format(2, -14),
    "tf32": _Format(4, -126),
    "e4m3": _Format(1, -6, CUT_BITS_FP8),
    "e5m2": _Format(1, -14, CUT_BITS_FP8),
}


def decode(bits: Values, kind: str) -> npt.NDArray[np.float64]:
    """Return the values of operands, given by their bits."""
    if kind == "bf16":
        return from_bfloat(bits).astype(np.float64)
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    dtype = {"f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    values: npt.NDArray[np.float64] = bits.view(dtype).astype(np.float64)
    return values


def _exponents(values: npt.NDArray[np.float64], least: int) -> Ints:
    found = np.maximum(np.frexp(values)[1] - 1, least)
    return np.where(values == 0, _NOTHING, found)


def toward_zero(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return values as float32, cut toward zero."""
    found = values.astype(np.float32)
    beyond = np.abs(found.astype(np.float64)) > np.abs(values)
    return np.where(beyond, np.nextafter(found, np.float32(0)), found)


def multiply_add(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], c: npt.NDArray[np.float32], kinds: tuple[str, str]
) -> npt.NDArray[np.float32]:
    """Return a @ b + c as one instruction computes it: a (…, m, k), b (…, k, n), c (…, m, n)."""
    cut = FORMATS[kinds[0]].cut
    columns = b.swapaxes(-1, -2)
    products = a[..., :, None, :] * columns[..., None, :, :]
    addend = c.astype(np.float64)
    exponents = (
        _exponents(a, FORMATS[kinds[0]].least)[..., :, None, :]
        + _exponents(columns, FORMATS[kinds[1]].least)[..., None, :, :]
    )
    top = np.maximum(exponents.max(axis=-1), _exponents(addend, -126))
    shift = np.where(top > _NOTHING // 2, cut - top, 0)
    total = np.trunc(np.ldexp(products, shift[..., None])).sum(axis=-1) + np.trunc(np.ldexp(addend, shift))
    found = toward_zero(np.ldexp(total, -shift))
    if cut == CUT_BITS_FP8:
        found = (found.view(np.uint32) & np.uint32(0xFFFFFFFF << (23 - CUT_BITS_FP8) & 0xFFFFFFFF)).view(
            np.float32
        )
    plain = products.sum(axis=-1) + addend
    return np.where(np.isfinite(plain), found, plain.astype(np.float32))


_LANES: Final = np.arange(WARP)
_ROW, _PAIR = _LANES >> 2, _LANES & 3


def _fragment_a(words: Values, kind: str) -> npt.NDArray[np.float64]:
    """Return A, (warps, 16, k), from the registers (warps, 32, 4) of a warp."""
    per = 4 // FORMATS[kind].nbytes
    values = decode(np.ascontiguousarray(words).view(BITS[FORMATS[kind].nbytes]), kind)
    found = np.zeros((len(words), 16, 8 * per))
    for register in range(4):
        for half in range(per):
            column = _PAIR * per + half + 4 * per * (register >> 1)
            found[:, _ROW + 8 * (register & 1), column] = values[:, :, register * per + half]
    return found


def _fragment_b(words: Values, kind: str) -> npt.NDArray[np.float64]:
    """Return B, (warps, k, 8), from the registers (warps, 32, 2)."""
    per = 4 // FORMATS[kind].nbytes
    values = decode(np.ascontiguousarray(words).view(BITS[FORMATS[kind].nbytes]), kind)
    found = np.zeros((len(words), 8 * per, 8))
    for register in range(2):
        for half in range(per):
            found[:, _PAIR * per + half + 4 * per * register, _ROW] = values[:, :, register * per + half]
    return found


_SHAPES: Final = {"m16n8k16": ("bf16", "f16"), "m16n8k8": ("tf32",)}


@instruction("mma", modifiers=f"sync aligned row col {' '.join(_SHAPES)}")
def _mma(run: Run, i: Instruction) -> None:
    warps = run.warps("mma")
    shape, (into, left, right, addend) = i.modifiers[2], i.modifiers[-4:]
    if left != right or left not in _SHAPES.get(shape, ()) or into != "f32" or addend != "f32":
        raise unsupported(i)
    words = [values_of(run, one, 4).reshape(*warps.shape, -1) for one in i.operands[1:]]
    rows = [_ROW + 8 * (register >> 1) for register in range(4)]
    columns = [2 * _PAIR + (register & 1) for register in range(4)]
    c = np.zeros((len(warps), 16, 8), np.float32)
    for register in range(4):
        c[:, rows[register], columns[register]] = words[2].view(np.float32)[:, :, register]
    found = multiply_add(_fragment_a(words[0], left), _fragment_b(words[1], left), c, (left, left))
    for register, result in enumerate(items(i.operands[0])):
        run.put(result, np.ascontiguousarray(found[:, rows[register], columns[register]]).reshape(-1))


_SWIZZLES: Final = {1: 128, 2: 64, 3: 32}


def descriptor_places(descriptor: int, rows: int, columns: int, nbytes: int, *, transposed: bool) -> Ints:
    """Return the byte addresses in shared memory of a tile, (rows, columns), that a descriptor describes.

    transposed: consecutive rows lie beside each other (MN-major), otherwise consecutive columns (K-major).
    """
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    swizzle = _SWIZZLES.get(descriptor >> 62 & 3, 16)
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    if transposed:
        per = swizzle // nbytes
        inner = row % per * nbytes + column % 8 * swizzle
        outer = row // per * leading + column // 8 * stride
        if swizzle == 16:
            outer = row // per * stride + column // 8 * leading
    else:
        inner = row % 8 * swizzle + column * nbytes
        outer = row // 8 * stride
        if swizzle == 16:
            inner = row % 8 * swizzle + column * nbytes % 16
            outer = outer + column * nbytes // 16 * leading
    address: Ints = start + inner + outer
    mask = swizzle // 16 - 1
    return address ^ ((address >> 7 & mask) << 4)


@dataclass(slots=True, kw_only=True)
class _Product:
    """A `wgmma` under way."""

    threads: Ints
    group: int
    results: tuple[Register, ...]
    kinds: tuple[str, str]
    a: npt.NDArray[np.float64]
    b: npt.NDArray[np.float64]
    adds: bool
    cells: Ints
    """Of shared memory that it reads."""


@instruction(
    "wgmma",
    modifiers="fence sync aligned commit_group wait_group mma_async e4m3 e5m2 "
    + " ".join(f"m64n{n}k{k}" for n in range(8, 264, 8) for k in (16, 32)),
)
def _wgmma(run: Run, i: Instruction) -> None:
    warpgroups = _warpgroups(run)
    if "fence" in i.modifiers:
        return
    if "commit_group" in i.modifiers:
        run.product_groups[run.threads] += 1
    elif "wait_group" in i.modifiers:
        if not isinstance(i.operands[0], Immediate):
            raise unsupported(i)
        for threads in warpgroups:
            _finish_products(run, threads, i.operands[0].value)
    else:
        for threads in warpgroups:
            run.select(threads)
            _begin_product(run, i)


def _warpgroups(run: Run) -> list[Ints]:
    threads = run.threads
    if len(threads) % WARPGROUP == 0:
        rows = threads.reshape(-1, WARPGROUP)
        first = rows[:, 0] % run.block % WARPGROUP == 0
        if (first & (rows[:, -1] - rows[:, 0] == WARPGROUP - 1)).all():
            return list(rows)
    raise DivergentThreads("wgmma needs all 128 threads of a warpgroup")


def _begin_product(run: Run, i: Instruction) -> None:
    shape, (into, left, right) = i.modifiers[3], i.modifiers[4:7]
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    nbytes = FORMATS[left].nbytes if left in FORMATS else 0
    if match is None or into != "f32" or nbytes not in (1, 2) or nbytes * int(match[2]) != WARP:
        raise unsupported(i)
    n, k = int(match[1]), int(match[2])
    result, a_from, b_from, scale, *signs = i.operands
    if [one.value for one in signs[:2] if isinstance(one, Immediate)] != [1, 1]:
        raise unsupported(i)
    majors = [one.value for one in signs[2:] if isinstance(one, Immediate)]
    adds = run.column(scale, "pred") if not isinstance(scale, Immediate) else np.array([scale.value != 0])
    cells = list[Ints]()
    b_tile = _tile(run, b_from, n, k, (right, majors[-1:] == [1]), cells)
    if isinstance(a_from, Group):
        words = values_of(run, a_from, 4).reshape(4, WARP, 4)
        a_tile = _fragment_a(words, left).reshape(64, k)
    else:
        a_tile = _tile(run, a_from, 64, k, (left, majors[:1] == [1] and len(majors) == 2), cells)
    threads, every = run.threads, np.unique(np.concatenate(cells))
    for first in threads[::WARP].tolist():
        run.shared.shadow.read(every[None], np.array([first]), run.now, asynchronous=True)
    run.shared.shadow.hold(every, 1)
    results = tuple(one for one in items(result) if isinstance(one, Register))
    for one in results:
        run.busy.setdefault(one.index, np.zeros(run.count, np.bool_))[threads] = True
    product = _Product(
        threads=threads,
        group=int(run.product_groups[threads[0]]),
        results=results,
        kinds=(left, right),
        a=a_tile,
        b=b_tile.T,
        adds=bool(adds[0]),
        cells=every,
    )
    run.products.append(product)


def _tile(
    run: Run, operand: Operand, rows: int, columns: int, form: tuple[str, bool], cells: list[Ints]
) -> npt.NDArray[np.float64]:
    """Return a tile's values, (rows, columns), and append the cells of shared memory that hold it."""
    kind, transposed = form
    nbytes = FORMATS[kind].nbytes
    addresses = descriptor_places(
        int(run.column(operand, "u64")[0]), rows, columns, nbytes, transposed=transposed
    ).reshape(-1)
    one = np.broadcast_to(run.threads[:1], addresses.shape)
    places = run.shared.places(addresses, nbytes, one, "", counted=False)
    cells.append(run.shared.cells(places, nbytes).reshape(-1))
    return decode(run.shared.data.view(BITS[nbytes])[places // nbytes], kind).reshape(rows, columns)


def _finish_products(run: Run, threads: Ints, pending: int) -> None:
    """End the products of a warpgroup but those of its last `pending` groups."""
    due = int(run.product_groups[threads[0]]) - pending
    mine = [one for one in run.products if one.threads[0] == threads[0]]
    ready = [one for one in mine if one.group < due]
    for one in mine:
        for result in one.results:
            run.busy[result.index][threads] = False
    before, lane = run.threads, np.arange(WARPGROUP)
    row = (lane >> 5) * 16 + (lane >> 2 & 7)
    run.select(threads)
    for one in ready:
        count = len(one.results)
        places = [(row + 8 * (n >> 1 & 1), 2 * (lane & 3) + 8 * (n >> 2) + (n & 1)) for n in range(count)]
        c = np.zeros((64, 2 * count), np.float32)
        if one.adds:
            for place, result in zip(places, one.results, strict=True):
                c[place] = run.column(result, "f32")
        found = multiply_add(one.a, one.b, c, one.kinds)
        for place, result in zip(places, one.results, strict=True):
            run.put(result, found[place])
        run.shared.shadow.hold(one.cells, -1)
        run.shared.shadow.note_readers(one.cells, threads, run.now)
    run.products[:] = [one for one in run.products if not any(one is other for other in ready)]
    for one in run.products:
        for result in one.results:
            run.busy[result.index][one.threads] = True
    run.select(None if len(before) == run.count else before)
