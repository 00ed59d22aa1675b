"""Instructions that compute on registers, and conversions between types.

Sums, products and conversions are rounded as the standard says; `fma` once. The approximations (`ex2`, `lg2`,
`rcp`, `rsqrt`, `sqrt`, `tanh`) are rounded correctly here, and are up to 2 units in the last place off on
hardware (docs/H100.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from zbmd.tools.lab.ptx.memory import Values
from zbmd.tools.lab.ptx.program import WIDTHS, Group, Instruction, Symbol
from zbmd.tools.lab.ptx.state import BITS, DTYPES, SHARED_WINDOW, Run, instruction, unsupported

Function = Callable[..., Values]
_LOGIC: Final[dict[str, Function]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_COMPARISONS: Final[dict[str, Function]] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
    **{"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
_APPROXIMATED: Final[dict[str, Function]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}
_ROUNDED: Final[dict[str, Function]] = {
    "rzi": np.trunc,
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_BFLOAT_NAN: Final = np.uint16(0x7FFF)
_FP8: Final[dict[str, type[np.generic]]] = {
    "e4m3x2": ml_dtypes.float8_e4m3fn,
    "e5m2x2": ml_dtypes.float8_e5m2,
}
_FP8_LARGEST: Final = {"e4m3x2": np.float32(448), "e5m2x2": np.float32(57344)}


def from_bfloat(bits: Values) -> npt.NDArray[np.float32]:
    """Return bfloat16 values, given by their bits, as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(values: Values) -> npt.NDArray[np.uint16]:
    """Return the bits of float32 values rounded to bfloat16, to nearest even; NaN is 0x7fff."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), _BFLOAT_NAN, rounded.astype(np.uint16))


def fused(a: Values, b: Values, c: Values) -> Values:
    """Return a * b + c of float32, rounded once; of float64, rounded twice."""
    if a.dtype != np.float32:
        twice: Values = a * b + c
        return twice
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + addend)
    # The exact error of the sum (D. Knuth). A total that is not exact is rounded to odd in float64, so that
    # rounding it again, to float32, gives what rounding once gives (S. Boldo, G. Melquiond, 2008).
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = np.isfinite(total) & (error != 0)
    bits = total.view(np.int64)
    odd = (bits - (inexact & ((error < 0) != (total < 0)))) | 1
    rounded: Values = np.where(inexact, odd, bits).view(np.float64).astype(np.float32)
    return rounded


def _kind(i: Instruction) -> str:
    if i.modifiers and i.modifiers[-1] in WIDTHS:
        return i.modifiers[-1]
    raise unsupported(i)


@instruction("add", "sub", "mul", "mad", "fma", modifiers="rn lo hi wide")
def _sums(run: Run, i: Instruction) -> None:
    kind = _kind(i)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        raise unsupported(i)
    result, *rest = i.operands
    wide = "wide" in i.modifiers
    a, b = run.get(rest[0], kind), run.get(rest[1], kind)
    if i.opcode == "fma":
        run.put(result, fused(a, b, run.get(rest[2], kind)))
        return
    if wide:
        double = kind[0] + str(2 * int(kind[1:]))
        a, b = a.astype(DTYPES[double]), b.astype(DTYPES[double])
        kind = double
    if i.opcode in ("add", "sub"):
        run.put(result, a + b if i.opcode == "add" else a - b)
        return
    if "hi" in i.modifiers:
        if kind not in ("u32", "s32"):
            raise unsupported(i)
        long = "u8" if kind == "u32" else "i8"
        product = (a.astype(long) * b.astype(long) >> 32).astype(DTYPES[kind])
    else:
        product = a * b
    run.put(result, product + run.get(rest[2], kind) if i.opcode == "mad" else product)


@instruction("div", "rem", modifiers="rn approx full")
def _divide(run: Run, i: Instruction) -> None:
    kind = _kind(i)
    a, b = run.get(i.operands[1], kind), run.get(i.operands[2], kind)
    if kind in ("f32", "f64"):
        run.put(i.operands[0], a / b)
        return
    if (b == 0).any():
        raise unsupported(i)
    quotient = np.asarray(a // b)
    if kind[0] == "s":  # numpy rounds down, PTX toward zero
        quotient = quotient + ((quotient * b != a) & ((a < 0) != (b < 0)))
    quotient = quotient.astype(DTYPES[kind])
    run.put(i.operands[0], quotient if i.opcode == "div" else a - quotient * b)


@instruction(*_APPROXIMATED, modifiers="approx rn")
def _approximate(run: Run, i: Instruction) -> None:
    value = run.get(i.operands[1], _kind(i))
    run.put(i.operands[0], np.asarray(_APPROXIMATED[i.opcode](value.astype(np.float64)), value.dtype))


@instruction("neg", "abs", "not")
def _unary(run: Run, i: Instruction) -> None:
    kind = _kind(i)
    value = run.get(i.operands[1], kind)
    functions: dict[str, Function] = {"neg": np.negative, "abs": np.abs, "not": np.invert}
    run.put(i.operands[0], functions[i.opcode](value))


@instruction("min", "max", modifiers="NaN")
def _extreme(run: Run, i: Instruction) -> None:
    a, b = run.get(i.operands[1], _kind(i)), run.get(i.operands[2], _kind(i))
    functions: dict[str, Function] = (
        {"min": np.minimum, "max": np.maximum} if "NaN" in i.modifiers else {"min": np.fmin, "max": np.fmax}
    )
    run.put(i.operands[0], functions[i.opcode](a, b))


@instruction("and", "or", "xor")
def _logic(run: Run, i: Instruction) -> None:
    kind = _kind(i)
    a, b = run.get(i.operands[1], kind), run.get(i.operands[2], kind)
    run.put(i.operands[0], _LOGIC[i.opcode](a, b))


@instruction("lop3")
def _lookup_logic(run: Run, i: Instruction) -> None:
    a, b, c, table = (run.get(one, "b32") for one in i.operands[1:])
    found = np.zeros(run.threads.shape, np.uint32)
    for number in range(8):
        if int(table) >> number & 1:
            term = (a if number & 4 else ~a) & (b if number & 2 else ~b) & (c if number & 1 else ~c)
            found |= term
    run.put(i.operands[0], found)


@instruction("shl", "shr")
def _shift(run: Run, i: Instruction) -> None:
    kind = _kind(i)
    value, count = run.get(i.operands[1], kind), run.get(i.operands[2], "u32")
    bits = 8 * WIDTHS[kind]
    inside = np.minimum(count, bits - 1).astype(value.dtype)
    if i.opcode == "shl":
        run.put(i.operands[0], np.where(count < bits, value << inside, value.dtype.type(0)))
    elif kind[0] == "s":
        run.put(i.operands[0], value >> inside)
    else:
        run.put(i.operands[0], np.where(count < bits, value >> inside, value.dtype.type(0)))


@instruction("shf", modifiers="l r wrap clamp")
def _funnel(run: Run, i: Instruction) -> None:
    low, high, count = (run.get(one, "u32").astype(np.uint64) for one in i.operands[1:])
    count = count & np.uint64(31) if "wrap" in i.modifiers else np.minimum(count, np.uint64(32))
    both = (high << np.uint64(32)) | low
    moved = both >> count if "r" in i.modifiers else (both << count) >> np.uint64(32)
    run.put(i.operands[0], moved.astype(np.uint32))


@instruction("bfi", "bfe")
def _bit_fields(run: Run, i: Instruction) -> None:
    kind = _kind(i)
    if kind not in ("b32", "u32", "s32"):
        raise unsupported(i)
    values: list[Values]
    *values, position, length = (run.get(one, "u32").astype(np.uint64) for one in i.operands[1:])
    position, length = np.minimum(position, np.uint64(32)), np.minimum(length, np.uint64(32))
    mask = (np.uint64(1) << length) - np.uint64(1)
    if i.opcode == "bfi":
        kept = values[1] & ~(mask << position)
        run.put(i.operands[0], (kept | ((values[0] & mask) << position)).astype(np.uint32))
        return
    field = (values[0] >> position) & mask
    if kind == "s32":
        sign = (length > 0) & ((field >> (np.maximum(length, 1) - np.uint64(1))) & np.uint64(1) == 1)
        field = np.where(sign, field | ~mask, field)
    run.put(i.operands[0], field.astype(np.uint32))


@instruction("prmt")
def _permute(run: Run, i: Instruction) -> None:
    a, b, selector = (run.get(one, "u32") for one in i.operands[1:])
    source = (b.astype(np.uint64) << np.uint64(32)) | a
    found = np.zeros(run.threads.shape, np.uint32)
    for byte in range(4):
        choice = (selector >> np.uint32(4 * byte)) & np.uint32(0xF)
        picked = (source >> ((choice & np.uint32(7)) * 8).astype(np.uint64)) & np.uint64(0xFF)
        sign = np.where(picked & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        picked = np.where(choice & np.uint32(8), sign, picked)
        found |= picked.astype(np.uint32) << np.uint32(8 * byte)
    run.put(i.operands[0], found)


@instruction("popc", "clz", "brev")
def _count_bits(run: Run, i: Instruction) -> None:
    value = run.column(i.operands[1], "b32")
    table = np.unpackbits(np.ascontiguousarray(value).view(np.uint8).reshape(-1, 4)[:, ::-1], axis=1)
    if i.opcode == "popc":
        found = table.sum(axis=1).astype(np.uint32)
    elif i.opcode == "clz":
        found = np.where(table.any(axis=1), table.argmax(axis=1), 32).astype(np.uint32)
    else:
        found = np.packbits(table[:, ::-1], axis=1)[:, ::-1].copy().view(np.uint32)[:, 0]
    run.put(i.operands[0], found)


@instruction("setp", modifiers=" ".join([*_COMPARISONS, *_LOGIC, "num nan equ neu ltu leu gtu geu"]))
def _compare(run: Run, i: Instruction) -> None:
    kind, name = _kind(i), i.modifiers[0]
    a, b = run.get(i.operands[1], kind), run.get(i.operands[2], kind)
    if kind[0] == "f" and name in ("num", "nan"):
        found = np.isnan(a) | np.isnan(b)
        found = ~found if name == "num" else found
    elif kind[0] == "f" and name.endswith("u"):
        found = _COMPARISONS[name[:-1]](a, b) | np.isnan(a) | np.isnan(b)
    elif kind[0] == "f" and name == "ne":
        found = (a != b) & ~(np.isnan(a) | np.isnan(b))
    else:
        found = _COMPARISONS[name](a, b)
    results = i.operands[0].items if isinstance(i.operands[0], Group) else (i.operands[0],)
    other = run.get(i.operands[3], "pred") if len(i.operands) == 4 else None
    for result, outcome in zip(results, (found, ~found), strict=False):
        value = outcome if other is None else _LOGIC[i.modifiers[1]](outcome, other)
        run.put(result, np.broadcast_to(value, run.threads.shape))


@instruction("selp")
def _select(run: Run, i: Instruction) -> None:
    kind = _kind(i)
    chosen = run.get(i.operands[3], "pred")
    run.put(i.operands[0], np.where(chosen, run.get(i.operands[1], kind), run.get(i.operands[2], kind)))


@instruction("mov")
def _move(run: Run, i: Instruction) -> None:
    kind, (result, source) = _kind(i), i.operands
    if isinstance(source, Group):
        part = f"b{8 * WIDTHS[kind] // len(source.items)}"
        packed = np.stack([run.column(one, part) for one in source.items], axis=1)
        run.put(result, packed.view(BITS[WIDTHS[kind]])[:, 0])
    elif isinstance(result, Group):
        parts = np.ascontiguousarray(run.column(source, kind))[:, None]
        values: Values = parts.view(BITS[WIDTHS[kind] // len(result.items)])
        for number, one in enumerate(result.items):
            run.put(one, values[:, number])
    elif isinstance(source, Symbol) and source.name not in run.symbols:
        raise unsupported(i)
    else:
        run.put(result, run.column(source, kind))


@instruction("cvta", modifiers="to shared global param")
def _convert_address(run: Run, i: Instruction) -> None:
    value = run.column(i.operands[1], "u64")
    window = np.uint64(SHARED_WINDOW if "shared" in i.modifiers else 0)
    run.put(i.operands[0], value - window if "to" in i.modifiers else value + window)


_INTEGERS: Final = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


@instruction("cvt", modifiers=" ".join(["rn rz rna tf32 sat satfinite relu", *_ROUNDED, *_FP8]))
def _convert(run: Run, i: Instruction) -> None:
    if "tf32" in i.modifiers:
        _convert_to_tf32(run, i)
        return
    types = [one for one in i.modifiers if one in WIDTHS or one in _FP8]
    modes = [one for one in i.modifiers if one not in types]
    if len(types) != 2 or {"sat", "relu"} & set(modes):
        raise unsupported(i)
    into, source = types
    if into in ("bf16x2", "f16x2") or into in _FP8:
        _convert_pair(run, i, into, source, modes)
        return
    value = run.get(i.operands[1], source)
    if source == "bf16":
        value = from_bfloat(value)
    if into in _INTEGERS:
        result = value.astype(DTYPES[into]) if source in _INTEGERS else _to_integer(value, into, modes)
    elif into == "bf16":
        if modes != ["rn"]:
            raise unsupported(i)
        result = to_bfloat(value)
    elif into in ("f16", "f32", "f64"):
        if modes and modes[0] in _ROUNDED:
            value = _ROUNDED[modes[0]](value)
        elif "rz" in modes:
            raise unsupported(i)
        result = value.astype(DTYPES[into])
    else:
        raise unsupported(i)
    run.put(i.operands[0], np.broadcast_to(result, run.threads.shape))


def _convert_to_tf32(run: Run, i: Instruction) -> None:
    if list(i.modifiers) != ["rna", "tf32", "f32"]:
        raise unsupported(i)
    run.put(i.operands[0], to_tf32(run.column(i.operands[1], "f32")).view(np.uint32))


def to_tf32(values: Values) -> npt.NDArray[np.float32]:
    """Return float32 values with 10 bits of a fraction: to nearest, and a tie away from zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, bits).astype(np.uint32).view(np.float32)


def _to_integer(value: Values, into: str, modes: list[str]) -> Values:
    limits = np.iinfo(np.dtype(DTYPES[into]).name)
    whole = _ROUNDED[modes[0]](value.astype(np.float64))
    below, above = whole <= float(limits.min), whole >= float(limits.max)
    middle = np.where(np.isnan(whole) | below | above, 0.0, whole).astype(DTYPES[into])
    found: Values = np.where(below, limits.min, np.where(above, limits.max, middle)).astype(DTYPES[into])
    return found


def _convert_pair(run: Run, i: Instruction, into: str, source: str, modes: list[str]) -> None:
    """The first source operand is the upper half of the result."""
    if source != "f32" or "rn" not in modes:
        raise unsupported(i)
    high, low = run.column(i.operands[1], "f32"), run.column(i.operands[2], "f32")
    if into in _FP8:
        halves = [to_fp8(one, into) for one in (low, high)]
        run.put(i.operands[0], np.stack(halves, axis=1).view(np.uint16)[:, 0])
        return
    bits = [
        to_bfloat(one) if into == "bf16x2" else one.astype(np.float16).view(np.uint16) for one in (low, high)
    ]
    run.put(i.operands[0], np.stack(bits, axis=1).view(np.uint32)[:, 0])


def to_fp8(values: Values, into: str) -> npt.NDArray[np.uint8]:
    """Return the bits of float32 values in FP8, to nearest even; what is too large becomes the largest."""
    most = _FP8_LARGEST[into]
    clamped = np.clip(values, -most, most)
    bits = np.ascontiguousarray(clamped).astype(_FP8[into]).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), bits)
