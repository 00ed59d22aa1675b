"""Kernels that reduce one array of each rank, in the order of the ranks, on a device.

The bits are those of the host's kernels (`collectives/native/kernels.h`, `half_floats.h`): integers wrap
around, minimum and maximum of floats are NaN if either is, a 16-bit float is reduced in float32 and rounded
once, and nothing is fused. NVRTC compiles the source on a GPU's machine, and any C compiler elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from zbmd.collectives.programs.reductions import DTYPE_NAMES, REDUCTIONS
from zbmd.transport.cuda.api import DeviceKernels

SOURCES_MAX: Final = 16
"""Ranks whose arrays a kernel takes: more GPUs than a host has."""
OPTIONS: Final = ("-std=c++17", "--fmad=false")

_HEAD: Final = r"""
#ifdef __CUDACC_RTC__
#define ZBMD_ENTRY(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define ZBMD_EACH(i, n) for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; \
                             i += (u64)gridDim.x * blockDim.x)
#define ZBMD_INLINE static __device__ __forceinline__
#else
#define ZBMD_ENTRY(name, ...) void name(__VA_ARGS__)
#define ZBMD_EACH(i, n) for (u64 i = 0; i < n; i++)
#define ZBMD_INLINE static inline
#endif
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { float re, im; } c64;
typedef struct { double re, im; } c128;

ZBMD_INLINE float float_of(u32 bits) { union { u32 u; float f; } x; x.u = bits; return x.f; }
ZBMD_INLINE u32 bits_of(float f) { union { u32 u; float f; } x; x.f = f; return x.u; }
ZBMD_INLINE float widen_f16(u16 h) {
    u32 exponent = (h & 0x7c00u) << 13, bits = ((h & 0x7fffu) << 13) + ((127u - 15) << 23);
    if (exponent == 0x7c00u << 13) bits += (128u - 16) << 23;
    else if (exponent == 0) bits = bits_of(float_of(bits + (1u << 23)) - float_of(113u << 23));
    return float_of(bits | (u32)(h & 0x8000u) << 16);
}
ZBMD_INLINE u16 narrow_f16(float f) {
    u32 bits = bits_of(f), sign = bits & 0x80000000u, half;
    bits ^= sign;
    if (bits >= (127u + 16) << 23) half = bits > 0x7f800000u ? 0x7e00 | (bits >> 13 & 0x3ff) : 0x7c00;
    else if (bits < 113u << 23) half = bits_of(float_of(bits) + float_of(126u << 23)) - (126u << 23);
    else half = (bits + ((u32)(15 - 127) << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    return (u16)(half | sign >> 16);
}
ZBMD_INLINE float widen_bf16(u16 h) { return float_of((u32)h << 16); }
ZBMD_INLINE u16 narrow_bf16(float f) {
    u32 bits = bits_of(f);
    return (u16)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40
                                                    : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#define SAME(x) (x)

/* out[i] = the fold of one element of each of `ranks` arrays, divided by `by` unless that is 0. */
#define ZBMD_FOLD(name, type, wide, widen, narrow, combine, divide) \
    ZBMD_ENTRY(name, type *out, u64 n, u64 ranks, u64 by, const type *of0, const type *of1, const type *of2, \
               const type *of3, const type *of4, const type *of5, const type *of6, const type *of7, \
               const type *of8, const type *of9, const type *of10, const type *of11, const type *of12, \
               const type *of13, const type *of14, const type *of15) { \
        const type *from[16] = {of0, of1, of2, of3, of4, of5, of6, of7, of8, of9, of10, of11, of12, of13, \
                                of14, of15}; \
        ZBMD_EACH(i, n) { \
            wide a = widen(from[0][i]); \
            for (u64 r = 1; r < ranks; r++) { wide b = widen(from[r][i]), c; combine; a = c; } \
            if (by) { wide c; divide; a = c; } \
            out[i] = narrow(a); \
        } \
    }
"""

_PLAIN: Final = {
    "float32": ("float", "float", "float"),
    "float64": ("double", "double", "double"),
    "int8": ("s8", "u32", "s64"),
    "int16": ("s16", "u32", "s64"),
    "int32": ("s32", "u32", "s64"),
    "int64": ("s64", "u64", "s64"),
    "uint8": ("u8", "u32", "u64"),
    "uint16": ("u16", "u32", "u64"),
    "uint32": ("u32", "u32", "u64"),
    "uint64": ("u64", "u64", "u64"),
}
"""The type, what sums and products are of, so that they wrap, and what is divided."""
_HALVES: Final = {"float16": "f16", "bfloat16": "bf16"}
_COMPLEX: Final = {"complex64": ("c64", "float"), "complex128": ("c128", "double")}
_LESS: Final = "c = (a {sign} b || a != a) ? a : b"


def fold_name(dtype: int, reduction: int) -> str:
    """Return the name of a kernel, by the codes of dtype and reduction."""
    return f"zbmd_fold_{DTYPE_NAMES[dtype]}_{REDUCTIONS[reduction]}"


@cache
def fold_kernels(dtype: int) -> DeviceKernels:
    """Return the kernels of a dtype, one for each reduction that it has."""
    name = DTYPE_NAMES[dtype]
    if name in _COMPLEX:
        found = _complex(*_COMPLEX[name])
    elif name == "bool":
        found = _truth()
    elif name in _HALVES:
        narrow = _HALVES[name]
        found = _numbers("u16", "float", "float", "float", f"widen_{narrow}", f"narrow_{narrow}")
    else:
        kind, wrapping, widest = _PLAIN[name]
        found = _numbers(kind, kind, wrapping, widest, "SAME", "SAME")
        if kind not in ("float", "double"):
            found |= _bits(kind)
    lines = [f"ZBMD_FOLD(zbmd_fold_{name}_{op}, {arguments})" for op, arguments in found.items()]
    return DeviceKernels(source="\n".join((_HEAD, *lines, "")), options=OPTIONS)


def _numbers(kind: str, wide: str, wrapping: str, widest: str, widen: str, narrow: str) -> dict[str, str]:
    def of(combine: str) -> str:
        divide = f"c = ({wide})(({widest})a / ({widest})by)"
        return f"{kind}, {wide}, {widen}, {narrow}, {combine}, {divide}"

    added = of(f"c = ({wide})(({wrapping})a + ({wrapping})b)")
    return {
        "sum": added,
        "avg": added,
        "prod": of(f"c = ({wide})(({wrapping})a * ({wrapping})b)"),
        "min": of(_LESS.format(sign="<")),
        "max": of(_LESS.format(sign=">")),
    }


def _bits(kind: str) -> dict[str, str]:
    signs = {"band": "&", "bor": "|", "bxor": "^"}
    return {op: f"{kind}, {kind}, SAME, SAME, c = ({kind})(a {sign} b), c = a" for op, sign in signs.items()}


def _truth() -> dict[str, str]:
    bits = _bits("u8")
    less = {
        op: f"u8, u8, SAME, SAME, {_LESS.format(sign=sign)}, c = a"
        for op, sign in (("min", "<"), ("max", ">"))
    }
    return bits | less | {"sum": bits["bor"], "prod": bits["band"]}


def _complex(kind: str, real: str) -> dict[str, str]:
    divide = f"c.re = a.re / ({real})by; c.im = a.im / ({real})by"
    added = f"{kind}, {kind}, SAME, SAME, c.re = a.re + b.re; c.im = a.im + b.im, {divide}"
    product = f"c.re = a.re * b.re - a.im * b.im; c.im = a.re * b.im + a.im * b.re, {divide}"
    return {"sum": added, "avg": added, "prod": f"{kind}, {kind}, SAME, SAME, {product}"}
