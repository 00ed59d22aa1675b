/* Element-wise kernels: dst = a op b. `dst` may be exactly `a` or `b`, which is why the loops promise the
 * compiler independent iterations (ivdep) and not restrict. Integers wrap around; minimum and maximum of
 * floats are NaN if either is. No operation is fused, so the bits are those of numpy's ufuncs. */
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
#define ZBMD_KERNELS(suffix, type, wide)                     \
    ZBMD_KERNEL(sum_##suffix, type, (wide)a + (wide)b)       \
    ZBMD_KERNEL(prod_##suffix, type, (wide)a * (wide)b)      \
    ZBMD_KERNEL(min_##suffix, type, (a < b || a != a) ? a : b) \
    ZBMD_KERNEL(max_##suffix, type, (a > b || a != a) ? a : b)

#pragma GCC visibility push(hidden)
ZBMD_KERNELS(f32, float, float)
ZBMD_KERNELS(f64, double, double)
ZBMD_KERNELS(i32, int32_t, uint32_t)
ZBMD_KERNELS(i64, int64_t, uint64_t)
ZBMD_KERNELS(u8, uint8_t, uint32_t)
#pragma GCC visibility pop

enum { ZBMD_DTYPES = 5, ZBMD_REDUCTIONS = 4 };

static const size_t zbmd_itemsize[ZBMD_DTYPES] = {4, 8, 4, 8, 1};

#define ZBMD_ROW(suffix) {zbmd_sum_##suffix, zbmd_prod_##suffix, zbmd_min_##suffix, zbmd_max_##suffix}

/* By dtype (f32, f64, i32, i64, u8), then by operation (sum, prod, min, max). */
static inline zbmd_kernel zbmd_kernel_of(int dtype, int reduction) {
    static const zbmd_kernel table[ZBMD_DTYPES][ZBMD_REDUCTIONS] = {
        ZBMD_ROW(f32), ZBMD_ROW(f64), ZBMD_ROW(i32), ZBMD_ROW(i64), ZBMD_ROW(u8)};
    return table[dtype][reduction];
}

#endif
