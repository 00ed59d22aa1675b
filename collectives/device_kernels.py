"""The kernels of collectives on devices: what `kernels.h` and `narrow.h` do on a processor, to the same bits.

The source is C that NVRTC compiles on a GPU's machine and any C compiler elsewhere, where a test runs it
beside numpy and the processor's kernels. Every argument is 64 bits wide, a pointer or a number. It is
compiled without fused multiply-adds (`KERNELS`), which would change the bits of complex products.
"""

from __future__ import annotations

from typing import Final

from zbmd.collectives.reductions import DTYPE_NAMES, REDUCTIONS
from zbmd.transport.cuda_api import DeviceKernels

STRIDED_DIMENSIONS_MAX: Final = 8
"""Dimensions that `strided_copy` takes."""
_SUFFIXES: Final = (
    "f32",
    "f64",
    "i32",
    "i64",
    "u8",
    "i8",
    "i16",
    "u16",
    "u32",
    "u64",
    "f16",
    "bf16",
    "c64",
    "c128",
    "u8",
)
"""By dtype code."""
_OF_BOOL: Final = {"sum": "bor", "prod": "band"}
_WIDE_DST, _WIDE_A, _WIDE_B = 1, 2, 4


def reduce_name(dtype: int, reduction: int) -> str:
    """The kernel `(dst, a, b, elements, wide, divisor)`, by codes; dst = a op b, then divided unless by 0.

    wide: which of dst, a and b hold a 16-bit float as f32 (`wide_flags`). An average is a sum.
    """
    name = REDUCTIONS[reduction]
    if DTYPE_NAMES[dtype] == "bool":
        name = _OF_BOOL.get(name, name)
    return f"zbmd_{'sum' if name == 'avg' else name}_{_SUFFIXES[dtype]}"


def convert_name(dtype: int) -> str:
    """The kernel `(dst, src, elements, wide)` that copies a 16-bit float from or to f32, by its code."""
    return f"zbmd_convert_{_SUFFIXES[dtype]}"


def wide_flags(dst: bool, a: bool, b: bool = False) -> int:
    """See `reduce_name`."""
    return _WIDE_DST * dst | _WIDE_A * a | _WIDE_B * b


_SOURCE: Final = r"""
#ifdef __CUDACC_RTC__
#define ZBMD_ENTRY(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define ZBMD_INLINE static __device__ __forceinline__
#define ZBMD_EACH(i, n) for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; \
                             i += (u64)gridDim.x * blockDim.x)
#else
#define ZBMD_ENTRY(name, ...) void name(__VA_ARGS__)
#define ZBMD_INLINE static inline
#define ZBMD_EACH(i, n) for (u64 i = 0; i < n; i++)
#endif
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

ZBMD_INLINE float float_of(u32 bits) { union { u32 u; float f; } x; x.u = bits; return x.f; }
ZBMD_INLINE u32 bits_of(float f) { union { u32 u; float f; } x; x.f = f; return x.u; }

/* As narrow.h. A signalling NaN becomes a quiet one, as the processor's instruction does it. */
ZBMD_INLINE float widen_f16(u16 h) {
    u32 exponent = (h & 0x7c00u) << 13, bits = ((h & 0x7fffu) << 13) + ((127 - 15) << 23);
    if (exponent == 0x7c00u << 13) {
        bits += (128 - 16) << 23;
        if (bits > 0x7f800000u) bits |= 0x400000u;
    } else if (exponent == 0)
        bits = bits_of(float_of(bits + (1 << 23)) - float_of(113 << 23));
    return float_of(bits | (u32)(h & 0x8000u) << 16);
}
ZBMD_INLINE u16 narrow_f16(float f) {
    u32 bits = bits_of(f), sign = bits & 0x80000000u, half;
    bits ^= sign;
    if (bits >= (127 + 16) << 23)
        half = bits > 0x7f800000u ? 0x7e00 | (bits >> 13 & 0x3ff) : 0x7c00;
    else if (bits < 113 << 23)
        half = bits_of(float_of(bits) + float_of(126 << 23)) - (126 << 23);
    else
        half = (bits + ((u32)(15 - 127) << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    return (u16)(half | sign >> 16);
}
ZBMD_INLINE float widen_bf16(u16 h) { return float_of((u32)h << 16); }
ZBMD_INLINE u16 narrow_bf16(float f) {
    u32 bits = bits_of(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define ZBMD_REDUCE(name, type, expression, DIVIDE)                                          \
    ZBMD_ENTRY(zbmd_##name, type *dst, const type *left, const type *right, u64 n, u64 wide, \
               u64 divisor) {                                                                \
        ZBMD_EACH(i, n) {                                                                    \
            type a = left[i], b = right[i], c = (type)(expression);                          \
            DIVIDE                                                                           \
            dst[i] = c;                                                                      \
        }                                                                                    \
    }
#define ZBMD_QUOTIENT(type) if (divisor) c = c / (type)(u32)divisor;
#define ZBMD_ARITHMETIC(suffix, type, sums, DIVIDE)                          \
    ZBMD_REDUCE(sum_##suffix, type, (sums)a + (sums)b, DIVIDE)               \
    ZBMD_REDUCE(prod_##suffix, type, (sums)a * (sums)b, DIVIDE)              \
    ZBMD_REDUCE(min_##suffix, type, (a < b || a != a) ? a : b, DIVIDE)       \
    ZBMD_REDUCE(max_##suffix, type, (a > b || a != a) ? a : b, DIVIDE)
#define ZBMD_INTEGER(suffix, type, sums)                                     \
    ZBMD_ARITHMETIC(suffix, type, sums, )                                    \
    ZBMD_REDUCE(band_##suffix, type, a & b, )                                \
    ZBMD_REDUCE(bor_##suffix, type, a | b, )                                 \
    ZBMD_REDUCE(bxor_##suffix, type, a ^ b, )
ZBMD_ARITHMETIC(f32, float, float, ZBMD_QUOTIENT(float))
ZBMD_ARITHMETIC(f64, double, double, ZBMD_QUOTIENT(double))
ZBMD_INTEGER(i8, i8, u32)
ZBMD_INTEGER(i16, i16, u32)
ZBMD_INTEGER(i32, i32, u32)
ZBMD_INTEGER(i64, i64, u64)
ZBMD_INTEGER(u8, u8, u32)
ZBMD_INTEGER(u16, u16, u32)
ZBMD_INTEGER(u32, u32, u32)
ZBMD_INTEGER(u64, u64, u64)

#define ZBMD_COMPLEX(suffix, type)                                                                 \
    ZBMD_ENTRY(zbmd_sum_##suffix, type *dst, const type *left, const type *right, u64 n, u64 wide, \
               u64 divisor) {                                                                      \
        ZBMD_EACH(i, 2 * n) {                                                                      \
            type c = left[i] + right[i];                                                           \
            ZBMD_QUOTIENT(type)                                                                    \
            dst[i] = c;                                                                            \
        }                                                                                          \
    }                                                                                              \
    ZBMD_ENTRY(zbmd_prod_##suffix, type *dst, const type *left, const type *right, u64 n, u64 wide, \
               u64 divisor) {                                                                      \
        ZBMD_EACH(i, n) {                                                                          \
            type a = left[2 * i], b = left[2 * i + 1], x = right[2 * i], y = right[2 * i + 1];     \
            dst[2 * i] = a * x - b * y;                                                            \
            dst[2 * i + 1] = a * y + b * x;                                                        \
        }                                                                                          \
    }
ZBMD_COMPLEX(c64, float)
ZBMD_COMPLEX(c128, double)

/* 1, 2 and 4 in `wide`: dst, a and b are f32. */
#define ZBMD_LOAD(suffix, at, bit) \
    ((wide & bit) ? ((const float *)at)[i] : widen_##suffix(((const u16 *)at)[i]))
#define ZBMD_STORE(suffix, c)                           \
    if (wide & 1) ((float *)dst)[i] = c;                \
    else ((u16 *)dst)[i] = narrow_##suffix(c);
#define ZBMD_NARROW_REDUCE(name, suffix, expression)                                          \
    ZBMD_ENTRY(zbmd_##name##_##suffix, void *dst, const void *left, const void *right, u64 n, \
               u64 wide, u64 divisor) {                                                       \
        ZBMD_EACH(i, n) {                                                                     \
            float a = ZBMD_LOAD(suffix, left, 2), b = ZBMD_LOAD(suffix, right, 4);            \
            float c = (expression);                                                           \
            ZBMD_QUOTIENT(float)                                                              \
            ZBMD_STORE(suffix, c)                                                             \
        }                                                                                     \
    }
#define ZBMD_NARROW(suffix)                                                               \
    ZBMD_NARROW_REDUCE(sum, suffix, a + b)                                                \
    ZBMD_NARROW_REDUCE(prod, suffix, a * b)                                               \
    ZBMD_NARROW_REDUCE(min, suffix, (a < b || a != a) ? a : b)                            \
    ZBMD_NARROW_REDUCE(max, suffix, (a > b || a != a) ? a : b)                            \
    ZBMD_ENTRY(zbmd_convert_##suffix, void *dst, const void *src, u64 n, u64 wide) {      \
        ZBMD_EACH(i, n) { float c = ZBMD_LOAD(suffix, src, 2); ZBMD_STORE(suffix, c) }    \
    }
ZBMD_NARROW(f16)
ZBMD_NARROW(bf16)

/* Elements of `item` bytes between a flat array and one with strides, 8 dimensions, the last the fastest.
 * `inwards`: into the flat one. `at`: where the first element of the other lies in `strided`. */
ZBMD_ENTRY(zbmd_strided_copy, u8 *flat, u8 *strided, u64 n, u64 item, u64 inwards, u64 at,
           u64 e0, u64 e1, u64 e2, u64 e3, u64 e4, u64 e5, u64 e6, u64 e7,
           u64 s0, u64 s1, u64 s2, u64 s3, u64 s4, u64 s5, u64 s6, u64 s7) {
    u64 extents[8] = {e0, e1, e2, e3, e4, e5, e6, e7}, strides[8] = {s0, s1, s2, s3, s4, s5, s6, s7};
    ZBMD_EACH(i, n) {
        u64 left = i, place = at;
        for (int d = 7; d >= 0; d--) {
            place += left % extents[d] * strides[d];
            left /= extents[d];
        }
        u8 *into = inwards ? flat + i * item : strided + place;
        const u8 *from = inwards ? strided + place : flat + i * item;
        for (u64 k = 0; k < item; k++) into[k] = from[k];
    }
}
"""
KERNELS: Final = DeviceKernels(
    source=_SOURCE,
    options=("--fmad=false", "-std=c++17"),
)
STRIDED_COPY: Final = "zbmd_strided_copy"
