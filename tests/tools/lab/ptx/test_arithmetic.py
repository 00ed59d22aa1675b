"""Each instruction that computes, beside numpy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.ptx_programs import evaluate

from zbmd.tools.lab.ptx.arithmetic import from_bfloat, fused, to_bfloat

RANDOM = np.random.default_rng(5)
F32 = np.concatenate(
    [
        RANDOM.standard_normal(52) * 10.0 ** RANDOM.integers(-9, 9, 52),
        [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan],
    ]
).astype(np.float32)
G32 = RANDOM.permutation(F32)
U32 = np.concatenate([RANDOM.integers(0, 2**32, 59), [0, 1, 2**31, 2**32 - 1, 31]]).astype(np.uint32)
V32 = RANDOM.permutation(U32)
S32, T32 = U32.view(np.int32), V32.view(np.int32)
U64 = U32.astype(np.uint64) << np.uint64(13)
COUNTS = (np.arange(64) % 40).astype(np.uint32)
Case = tuple[str, str, list[tuple[str, npt.NDArray[Any]]], npt.NDArray[Any]]


def _wide(a: npt.NDArray[Any], b: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    return a.astype(kind) * b.astype(kind)


FLOATS_IN, WORDS = [("f32", F32), ("f32", G32)], [("u32", U32), ("u32", V32)]
SIGNED = [("s32", S32), ("s32", T32)]


def _float_cases() -> list[Case]:
    f, g = np.resize(F32, 64), np.resize(G32, 64)
    return [
        ("add.f32 %d, %a, %b;", "f32", FLOATS_IN, f + g),
        ("sub.f32 %d, %a, %b;", "f32", FLOATS_IN, f - g),
        ("mul.f32 %d, %a, %b;", "f32", FLOATS_IN, f * g),
        ("mul.f32 %d, %a, 0f40400000;", "f32", FLOATS_IN[:1], f * np.float32(3)),
        ("div.rn.f32 %d, %a, %b;", "f32", FLOATS_IN, f / g),
        ("sqrt.rn.f32 %d, %a;", "f32", FLOATS_IN[:1], np.sqrt(f)),
        ("rcp.rn.f32 %d, %a;", "f32", FLOATS_IN[:1], (1 / f.astype(np.float64)).astype(np.float32)),
        ("ex2.approx.f32 %d, %a;", "f32", FLOATS_IN[:1], np.exp2(f.astype(np.float64)).astype(np.float32)),
        ("lg2.approx.f32 %d, %a;", "f32", FLOATS_IN[:1], np.log2(f.astype(np.float64)).astype(np.float32)),
        ("min.f32 %d, %a, %b;", "f32", FLOATS_IN, np.fmin(f, g)),
        ("max.f32 %d, %a, %b;", "f32", FLOATS_IN, np.fmax(f, g)),
        ("max.NaN.f32 %d, %a, %b;", "f32", FLOATS_IN, np.maximum(f, g)),
        ("neg.f32 %d, %a;", "f32", FLOATS_IN[:1], -f),
        ("abs.f32 %d, %a;", "f32", FLOATS_IN[:1], abs(f)),
    ]


def _integer_cases() -> list[Case]:
    shifted = np.where(COUNTS < 32, U32 << np.minimum(COUNTS, 31), 0)
    return [
        ("add.s32 %d, %a, %b;", "u32", WORDS, U32 + V32),
        ("sub.s32 %d, %a, 7;", "u32", WORDS[:1], U32 - np.uint32(7)),
        ("mul.lo.s32 %d, %a, %b;", "u32", WORDS, U32 * V32),
        (
            "mul.hi.u32 %d, %a, %b;",
            "u32",
            WORDS,
            (_wide(U32, V32, np.uint64) >> np.uint64(32)).astype(np.uint32),
        ),
        ("mul.wide.u32 %d, %a, %b;", "u64", WORDS, _wide(U32, V32, np.uint64)),
        ("mul.wide.s32 %d, %a, %b;", "s64", SIGNED, _wide(S32, T32, np.int64)),
        ("mad.lo.s32 %d, %a, %b, %a;", "u32", WORDS, U32 * V32 + U32),
        ("div.u32 %d, %a, 7;", "u32", WORDS[:1], U32 // 7),
        ("rem.u32 %d, %a, 7;", "u32", WORDS[:1], U32 % 7),
        ("rem.s32 %d, %a, 7;", "s32", SIGNED[:1], np.fmod(S32, 7)),
        ("and.b32 %d, %a, %b;", "u32", WORDS, U32 & V32),
        ("xor.b32 %d, %a, %b;", "u32", WORDS, U32 ^ V32),
        ("not.b32 %d, %a;", "u32", WORDS[:1], ~U32),
        ("lop3.b32 %d, %a, %b, %a, 0x3c;", "u32", WORDS, U32 ^ V32),
        ("shl.b32 %d, %a, %b;", "u32", [("u32", U32), ("u32", COUNTS)], shifted),
        (
            "shr.s32 %d, %a, %b;",
            "s32",
            [("s32", S32), ("u32", COUNTS)],
            S32 >> np.minimum(COUNTS, 31).astype(int),
        ),
        ("shf.l.wrap.b32 %d, %a, %a, 8;", "u32", WORDS[:1], (U32 << 8) | (U32 >> 24)),
        ("bfe.u32 %d, %a, 4, 9;", "u32", WORDS[:1], (U32 >> 4) & 511),
        ("bfe.s32 %d, %a, 0, 16;", "s32", WORDS[:1], U32.astype(np.uint16).view(np.int16).astype(np.int32)),
        ("bfi.b32 %d, %a, %b, 8, 8;", "u32", WORDS, (V32 & ~np.uint32(0xFF00)) | ((U32 & 0xFF) << 8)),
        ("prmt.b32 %d, %a, %b, 0x5410;", "u32", WORDS, (U32 & 0xFFFF) | (V32 << 16)),
        ("popc.b32 %d, %a;", "u32", WORDS[:1], np.array([int(v).bit_count() for v in U32])),
        ("clz.b32 %d, %a;", "u32", WORDS[:1], np.array([32 - int(v).bit_length() for v in U32])),
        ("brev.b32 %d, %a;", "u32", WORDS[:1], np.array([int(f"{v:032b}"[::-1], 2) for v in U32])),
    ]


def _other_cases() -> list[Case]:
    f, g = np.resize(F32, 64), np.resize(G32, 64)
    return [
        ("setp.lt.s32 %p, %a, %b; selp.b32 %d, 7, %b, %p;", "s32", SIGNED, np.where(S32 < T32, 7, T32)),
        ("setp.gtu.f32 %p, %a, %b; selp.f32 %d, %a, %b, %p;", "f32", FLOATS_IN, np.where(~(f <= g), f, g)),
        ("setp.ne.f32 %p, %a, %a; selp.u32 %d, 1, 0, %p;", "u32", FLOATS_IN[:1], np.zeros(64)),
        ("setp.neu.f32 %p, %a, %a; selp.u32 %d, 1, 0, %p;", "u32", FLOATS_IN[:1], np.isnan(f)),
        (
            "setp.lt.u32 %q, %a, 99; setp.gt.or.u32 %p|%q, %a, %b, %q; selp.u32 %d, 1, 0, %p;",
            *("u32", WORDS, (U32 > V32) | (U32 < 99)),
        ),
        (
            "{ .reg .b16 %l, %h; mov.b32 {%l, %h}, %a; mov.b32 %d, {%h, %l}; }",
            "u32",
            WORDS[:1],
            (U32 << 16) | (U32 >> 16),
        ),
        ("cvt.u64.u32 %d, %a;", "u64", WORDS[:1], U32.astype(np.uint64)),
        ("cvt.s64.s32 %d, %a;", "s64", SIGNED[:1], S32.astype(np.int64)),
        ("cvt.u32.u64 %d, %a;", "u32", [("u64", U64)], U64.astype(np.uint32)),
        ("cvt.rn.f32.s32 %d, %a;", "f32", SIGNED[:1], S32.astype(np.float32)),
        ("cvt.rni.f32.f32 %d, %a;", "f32", FLOATS_IN[:1], np.rint(f)),
        ("cvt.f64.f32 %d, %a;", "f64", FLOATS_IN[:1], f.astype(np.float64)),
        ("cvt.rn.f16.f32 %d, %a;", "f16", FLOATS_IN[:1], f.astype(np.float16)),
        ("tanh.approx.f32 %d, %a;", "f32", FLOATS_IN[:1], np.tanh(f.astype(np.float64)).astype(np.float32)),
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_instruction_computes_what_numpy_does() -> None:
    with np.errstate(all="ignore"):
        for body, result, inputs, expected in [*_float_cases(), *_integer_cases(), *_other_cases()]:
            found = evaluate(body, result, *inputs)
            np.testing.assert_array_equal(found, expected.astype(found.dtype), err_msg=body)


def test_conversions_to_integers_saturate() -> None:
    found = evaluate("cvt.rzi.s32.f32 %d, %a;", "s32", ("f32", F32))
    for value, whole in zip(np.resize(F32, 64).tolist(), found.tolist(), strict=True):
        expected = 0 if math.isnan(value) else max(-(2**31), min(2**31 - 1, value))
        assert whole == (int(expected) if math.isfinite(expected) else expected)


def test_narrow_floats_are_those_of_ml_dtypes() -> None:
    finite = np.where(np.isnan(F32), 1, F32)
    with np.errstate(all="ignore"):
        pairs = evaluate("cvt.rn.bf16x2.f32 %d, %a, %b;", "u32", ("f32", finite), ("f32", finite[::-1]))
        halves = [
            np.resize(one, 64).astype(ml_dtypes.bfloat16).view(np.uint16) for one in (finite[::-1], finite)
        ]
        np.testing.assert_array_equal(pairs, halves[0] | halves[1].astype(np.uint32) << 16)
        for name, kind in (("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)):
            found = evaluate(f"cvt.rn.satfinite.{name}.f32 %d, %a, %a;", "b16", ("f32", finite))
            most = float(ml_dtypes.finfo(kind).max)
            expected = np.resize(np.clip(finite, -most, most), 64).astype(kind).view(np.uint8)
            np.testing.assert_array_equal(found, expected | expected.astype(np.uint16) << 8)
    assert to_bfloat(np.array([np.nan], np.float32)).tolist() == [0x7FFF]
    np.testing.assert_array_equal(from_bfloat(to_bfloat(np.array([1.5, -2], np.float32))), [1.5, -2])


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@settings(max_examples=200, deadline=None)
@given(a=FLOATS, b=FLOATS, c=FLOATS, near=st.sampled_from([0, 1, -1]))
def test_fma_rounds_once(a: float, b: float, c: float, near: int) -> None:
    """Beside exact arithmetic, also where the sum lies near the middle of two floats."""
    from fractions import Fraction

    if near and a and b:
        c = float(np.float32(near * a * b * 2.0**-24)) if abs(a * b) < 2.0**100 else c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    found = float(fused(*(np.array([one], np.float32) for one in (a, b, c)))[0])
    for step in (-np.inf, np.inf):
        other = float(np.nextafter(np.float32(found), np.float32(step)))
        assert abs(Fraction(found) - exact) <= abs(Fraction(other) - exact)
