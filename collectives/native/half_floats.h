/* The 16-bit floats: widened to f32 to be reduced, and rounded (to nearest, ties to even) once, where a
 * result is written to the caller's array. */
#ifndef ZBMD_NARROW_H
#define ZBMD_NARROW_H

#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define ZBMD_F16C __attribute__((target("avx2,f16c")))
#endif

#include "kernels.h"

enum { ZBMD_WIDE_BLOCK = 1024 }; /* elements widened at a time: they stay in the first-level cache */

static inline float zbmd_float_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint32_t zbmd_bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* binary16, as in F. Giesen, "half to float done quick" and its inverse with ties to even (public domain). */
static inline float zbmd_widen_one_f16(uint16_t h) {
    uint32_t exponent = (h & 0x7c00u) << 13, bits = ((h & 0x7fffu) << 13) + ((127 - 15) << 23);
    if (exponent == 0x7c00u << 13)
        bits += (128 - 16) << 23;
    else if (exponent == 0)
        bits = zbmd_bits_of(zbmd_float_of(bits + (1 << 23)) - zbmd_float_of(113 << 23));
    return zbmd_float_of(bits | (uint32_t)(h & 0x8000u) << 16);
}
static inline uint16_t zbmd_narrow_one_f16(float f) {
    uint32_t bits = zbmd_bits_of(f), sign = bits & 0x80000000u, half;
    bits ^= sign;
    if (bits >= (127 + 16) << 23)
        half = bits > 0x7f800000u ? 0x7e00 | (bits >> 13 & 0x3ff) : 0x7c00;
    else if (bits < 113 << 23)
        half = zbmd_bits_of(zbmd_float_of(bits) + zbmd_float_of(126 << 23)) - (126 << 23);
    else
        half = (bits + ((uint32_t)(15 - 127) << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    return (uint16_t)(half | sign >> 16);
}

#ifdef ZBMD_F16C
ZBMD_F16C static void zbmd_widen_f16c(float *dst, const uint16_t *src, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    for (; i < n; i++) dst[i] = zbmd_widen_one_f16(src[i]);
}
ZBMD_F16C static void zbmd_narrow_f16c(uint16_t *dst, const float *src, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) dst[i] = zbmd_narrow_one_f16(src[i]);
}
#endif

#pragma GCC visibility push(hidden)
ZBMD_CLONES void zbmd_widen_bf16(float *dst, const uint16_t *src, size_t n) {
    uint32_t *bits = (uint32_t *)dst;
    for (size_t i = 0; i < n; i++) bits[i] = (uint32_t)src[i] << 16;
}
ZBMD_CLONES void zbmd_narrow_bf16(uint16_t *dst, const float *src, size_t n) {
    const uint32_t *bits = (const uint32_t *)src;
    for (size_t i = 0; i < n; i++) {
        uint32_t rounded = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
        dst[i] = (uint16_t)((bits[i] & 0x7fffffffu) > 0x7f800000u ? bits[i] >> 16 | 0x40 : rounded);
    }
}
#pragma GCC visibility pop

static inline int zbmd_is_narrow(int dtype) { return dtype == ZBMD_F16 || dtype == ZBMD_BF16; }

static void zbmd_widen(int dtype, float *dst, const uint16_t *src, size_t n) {
    if (dtype == ZBMD_BF16) {
        zbmd_widen_bf16(dst, src, n);
        return;
    }
#ifdef ZBMD_F16C
    if (__builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2")) {
        zbmd_widen_f16c(dst, src, n);
        return;
    }
#endif
    for (size_t i = 0; i < n; i++) dst[i] = zbmd_widen_one_f16(src[i]);
}

static void zbmd_narrow(int dtype, uint16_t *dst, const float *src, size_t n) {
    if (dtype == ZBMD_BF16) {
        zbmd_narrow_bf16(dst, src, n);
        return;
    }
#ifdef ZBMD_F16C
    if (__builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2")) {
        zbmd_narrow_f16c(dst, src, n);
        return;
    }
#endif
    for (size_t i = 0; i < n; i++) dst[i] = zbmd_narrow_one_f16(src[i]);
}

/* A place in memory; whether it holds f32 (slots) or the 16-bit type itself (the caller's arrays); and the process whose
 * own memory it is in, or 0 if it is mapped here. */
typedef struct {
    char *at;
    int wide;
    int32_t pid;
} zbmd_place;

static inline const float *zbmd_wide_block(int dtype, zbmd_place place, size_t first, size_t n, float *room) {
    if (place.wide) return (const float *)place.at + first;
    zbmd_widen(dtype, room, (const uint16_t *)place.at + first, n);
    return room;
}

/* dst = a op b, divided by `divisor` unless that is 0. */
static void zbmd_reduce_narrow(int dtype, zbmd_kernel kernel, zbmd_place dst, zbmd_place a, zbmd_place b,
                               size_t count, uint32_t divisor) {
    float left[ZBMD_WIDE_BLOCK], right[ZBMD_WIDE_BLOCK];
    for (size_t first = 0; first < count; first += ZBMD_WIDE_BLOCK) {
        size_t n = count - first < ZBMD_WIDE_BLOCK ? count - first : ZBMD_WIDE_BLOCK;
        const float *x = zbmd_wide_block(dtype, a, first, n, left);
        const float *y = zbmd_wide_block(dtype, b, first, n, right);
        float *result = dst.wide ? (float *)dst.at + first : left;
        kernel(result, x, y, n);
        if (divisor) zbmd_divide_f32(result, n, divisor);
        if (!dst.wide) zbmd_narrow(dtype, (uint16_t *)dst.at + first, result, n);
    }
}

/* dst = src / divisor, where `src` is wide. */
static void zbmd_finish_narrow(int dtype, zbmd_place dst, zbmd_place src, size_t count, uint32_t divisor) {
    float room[ZBMD_WIDE_BLOCK];
    for (size_t first = 0; first < count; first += ZBMD_WIDE_BLOCK) {
        size_t n = count - first < ZBMD_WIDE_BLOCK ? count - first : ZBMD_WIDE_BLOCK;
        memcpy(room, (const float *)src.at + first, n * sizeof(float));
        zbmd_divide_f32(room, n, divisor);
        zbmd_narrow(dtype, (uint16_t *)dst.at + first, room, n);
    }
}

static void zbmd_copy_narrow(int dtype, zbmd_place dst, zbmd_place src, size_t count) {
    if (dst.wide == src.wide)
        memmove(dst.at, src.at, count * (dst.wide ? 4 : 2));
    else if (dst.wide)
        zbmd_widen(dtype, (float *)dst.at, (const uint16_t *)src.at, count);
    else
        zbmd_narrow(dtype, (uint16_t *)dst.at, (const float *)src.at, count);
}

#endif
