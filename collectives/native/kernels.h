/* Element-wise kernels: dst = a op b. `dst` may be exactly `a` or `b`, which is why the loops promise the
 * compiler independent iterations (ivdep) and not restrict. Integers wrap around; minimum and maximum of
 * floats are NaN if either is. No operation is fused, so the bits are those of numpy's ufuncs.
 *
 * Truth values are bytes 0 and 1: their sum is the bitwise or, their product the bitwise and, as numpy's.
 * The 16-bit floats have no kernels of their own: half_floats.h widens them to f32. */
#ifndef ZBMD_KERNELS_H
#define ZBMD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

typedef void (*zbmd_kernel)(void *dst, const void *a, const void *b, size_t count);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define ZBMD_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define ZBMD_CLONES
#endif

#define ZBMD_KERNEL(name, type, expression)                                        \
    ZBMD_CLONES void zbmd_##name(void *d, const void *l, const void *r, size_t n) { \
        type *dst = (type *)d;                                                     \
        const type *left = (const type *)l, *right = (const type *)r;              \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {                      \
            type a = left[i], b = right[i];                                        \
            dst[i] = (type)(expression);                                           \
        }                                                                          \
    }

/* Sums and products in `wide`, an unsigned type for integers, so that they wrap. */
#define ZBMD_KERNELS(suffix, type, wide)                       \
    ZBMD_KERNEL(sum_##suffix, type, (wide)a + (wide)b)         \
    ZBMD_KERNEL(prod_##suffix, type, (wide)a * (wide)b)        \
    ZBMD_KERNEL(min_##suffix, type, (a < b || a != a) ? a : b) \
    ZBMD_KERNEL(max_##suffix, type, (a > b || a != a) ? a : b)

#define ZBMD_BITWISE(suffix, type)              \
    ZBMD_KERNEL(band_##suffix, type, a & b)     \
    ZBMD_KERNEL(bor_##suffix, type, a | b)      \
    ZBMD_KERNEL(bxor_##suffix, type, a ^ b)

/* Complex numbers: pairs of reals. */
#define ZBMD_COMPLEX(suffix, type, real)                                                 \
    static void zbmd_sum_##suffix(void *d, const void *l, const void *r, size_t n) {     \
        zbmd_sum_##real(d, l, r, 2 * n);                                                 \
    }                                                                                    \
    ZBMD_CLONES void zbmd_prod_##suffix(void *d, const void *l, const void *r, size_t n) { \
        type *dst = (type *)d;                                                           \
        const type *left = (const type *)l, *right = (const type *)r;                    \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {                            \
            type a = left[2 * i], b = left[2 * i + 1];                                   \
            type x = right[2 * i], y = right[2 * i + 1];                                 \
            dst[2 * i] = a * x - b * y;                                                  \
            dst[2 * i + 1] = a * y + b * x;                                              \
        }                                                                                \
    }

#define ZBMD_DIVISION(suffix, type)                                        \
    ZBMD_CLONES void zbmd_divide_##suffix(void *d, size_t n, uint32_t by) { \
        type *dst = (type *)d, divisor = (type)by;                         \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) dst[i] /= divisor; \
    }

/* A quotient of integers is cut off towards zero, as NCCL's is. `widest` holds every number of ranks. */
#define ZBMD_INTEGER_KERNELS(suffix, type, wide, widest)                             \
    ZBMD_KERNELS(suffix, type, wide)                                                 \
    ZBMD_CLONES void zbmd_divide_##suffix(void *d, size_t n, uint32_t by) {          \
        type *dst = (type *)d;                                                       \
        for (size_t i = 0; i < n; i++) dst[i] = (type)((widest)dst[i] / (widest)by); \
    }

#pragma GCC visibility push(hidden)
ZBMD_KERNELS(f32, float, float)
ZBMD_KERNELS(f64, double, double)
ZBMD_INTEGER_KERNELS(i8, int8_t, uint32_t, int64_t)
ZBMD_INTEGER_KERNELS(i16, int16_t, uint32_t, int64_t)
ZBMD_INTEGER_KERNELS(i32, int32_t, uint32_t, int64_t)
ZBMD_INTEGER_KERNELS(i64, int64_t, uint64_t, int64_t)
ZBMD_INTEGER_KERNELS(u8, uint8_t, uint32_t, uint64_t)
ZBMD_INTEGER_KERNELS(u16, uint16_t, uint32_t, uint64_t)
ZBMD_INTEGER_KERNELS(u32, uint32_t, uint32_t, uint64_t)
ZBMD_INTEGER_KERNELS(u64, uint64_t, uint64_t, uint64_t)
ZBMD_BITWISE(8, uint8_t)
ZBMD_BITWISE(16, uint16_t)
ZBMD_BITWISE(32, uint32_t)
ZBMD_BITWISE(64, uint64_t)
ZBMD_COMPLEX(c64, float, f32)
ZBMD_COMPLEX(c128, double, f64)
ZBMD_DIVISION(f32, float)
ZBMD_DIVISION(f64, double)
#pragma GCC visibility pop

/* By code; reductions.py holds the same order. */
enum {
    ZBMD_F32, ZBMD_F64, ZBMD_I32, ZBMD_I64, ZBMD_U8, ZBMD_I8, ZBMD_I16, ZBMD_U16, ZBMD_U32, ZBMD_U64,
    ZBMD_F16, ZBMD_BF16, ZBMD_C64, ZBMD_C128, ZBMD_BOOL, ZBMD_DTYPES
};
enum { ZBMD_SUM, ZBMD_PROD, ZBMD_MIN, ZBMD_MAX, ZBMD_AVG, ZBMD_BAND, ZBMD_BOR, ZBMD_BXOR, ZBMD_REDUCTIONS };

static const size_t zbmd_itemsize[ZBMD_DTYPES] = {4, 8, 4, 8, 1, 1, 2, 2, 4, 8, 2, 2, 8, 16, 1};

#define ZBMD_ROW(suffix, average) \
    zbmd_sum_##suffix, zbmd_prod_##suffix, zbmd_min_##suffix, zbmd_max_##suffix, average
#define ZBMD_FLOATS(suffix) {ZBMD_ROW(suffix, zbmd_sum_##suffix), NULL, NULL, NULL}
#define ZBMD_INTEGERS(suffix, bits) \
    {ZBMD_ROW(suffix, zbmd_sum_##suffix), zbmd_band_##bits, zbmd_bor_##bits, zbmd_bxor_##bits}
#define ZBMD_COMPLEXES(suffix) \
    {zbmd_sum_##suffix, zbmd_prod_##suffix, NULL, NULL, zbmd_sum_##suffix, NULL, NULL, NULL}

/* NULL where a reduction means nothing. An average is a sum, and `zbmd_divide` at the end. */
static inline zbmd_kernel zbmd_kernel_of(int dtype, int reduction) {
    static const zbmd_kernel table[ZBMD_DTYPES][ZBMD_REDUCTIONS] = {
        [ZBMD_F32] = ZBMD_FLOATS(f32),
        [ZBMD_F64] = ZBMD_FLOATS(f64),
        [ZBMD_I32] = ZBMD_INTEGERS(i32, 32),
        [ZBMD_I64] = ZBMD_INTEGERS(i64, 64),
        [ZBMD_U8] = ZBMD_INTEGERS(u8, 8),
        [ZBMD_I8] = ZBMD_INTEGERS(i8, 8),
        [ZBMD_I16] = ZBMD_INTEGERS(i16, 16),
        [ZBMD_U16] = ZBMD_INTEGERS(u16, 16),
        [ZBMD_U32] = ZBMD_INTEGERS(u32, 32),
        [ZBMD_U64] = ZBMD_INTEGERS(u64, 64),
        [ZBMD_F16] = ZBMD_FLOATS(f32),
        [ZBMD_BF16] = ZBMD_FLOATS(f32),
        [ZBMD_C64] = ZBMD_COMPLEXES(c64),
        [ZBMD_C128] = ZBMD_COMPLEXES(c128),
        [ZBMD_BOOL] = {zbmd_bor_8, zbmd_band_8, zbmd_min_u8, zbmd_max_u8, NULL, zbmd_band_8, zbmd_bor_8,
                       zbmd_bxor_8},
    };
    return table[dtype][reduction];
}

/* Divide what a reduction to an average has summed up: `count` elements of a dtype that has averages, which
 * for a 16-bit float are the f32 that it was widened to. */
static inline void zbmd_divide(int dtype, void *dst, size_t count, uint32_t by) {
    switch (dtype) {
    case ZBMD_F64: zbmd_divide_f64(dst, count, by); return;
    case ZBMD_C128: zbmd_divide_f64(dst, 2 * count, by); return;
    case ZBMD_C64: zbmd_divide_f32(dst, 2 * count, by); return;
    case ZBMD_I8: zbmd_divide_i8(dst, count, by); return;
    case ZBMD_I16: zbmd_divide_i16(dst, count, by); return;
    case ZBMD_I32: zbmd_divide_i32(dst, count, by); return;
    case ZBMD_I64: zbmd_divide_i64(dst, count, by); return;
    case ZBMD_U8: zbmd_divide_u8(dst, count, by); return;
    case ZBMD_U16: zbmd_divide_u16(dst, count, by); return;
    case ZBMD_U32: zbmd_divide_u32(dst, count, by); return;
    case ZBMD_U64: zbmd_divide_u64(dst, count, by); return;
    default: zbmd_divide_f32(dst, count, by);
    }
}

#endif
