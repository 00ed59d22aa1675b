/* Linear codes over GF(2^8), of the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11D).
 *
 * A product with a constant is two lookups in tables of 16 bytes, one of each half of a byte: J. S. Plank, K. M.
 * Greenan, E. L. Miller, "Screaming fast Galois field arithmetic using Intel SIMD instructions", FAST 2013. Each
 * source is read once for up to CODE_OUTPUTS results. Sizes are checked by the caller. */
#ifndef ZBMD_CODING_H
#define ZBMD_CODING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CODE_OUTPUTS 4
#define CODE_SOURCES_MAX 255

typedef struct {
    uint8_t low[16], high[16];
} zbmd_halves;

static inline uint8_t zbmd_gf_product(uint8_t a, uint8_t b) {
    uint8_t sum = 0;
    for (; b; b >>= 1, a = (uint8_t)(a << 1 ^ (a & 0x80 ? 0x1D : 0)))
        if (b & 1) sum ^= a;
    return sum;
}

static inline uint8_t zbmd_gf_look_up(const zbmd_halves *of, uint8_t byte) {
    return of->low[byte & 15] ^ of->high[byte >> 4];
}

/* out = the sum of all sources: coefficients of one. */
ZBMD_CLONES void zbmd_xor_all(uint8_t *out, const uint8_t *const *sources, size_t count, size_t n) {
    typedef uint64_t words __attribute__((vector_size(64), aligned(1), may_alias));
    size_t at = 0;
    for (; at + 128 <= n; at += 128) {
        words first = *(const words *)(sources[0] + at), second = *(const words *)(sources[0] + at + 64);
        for (size_t i = 1; i < count; i++) {
            first ^= *(const words *)(sources[i] + at);
            second ^= *(const words *)(sources[i] + at + 64);
        }
        *(words *)(out + at) = first;
        *(words *)(out + at + 64) = second;
    }
    for (; at < n; at++) {
        uint8_t sum = 0;
        for (size_t i = 0; i < count; i++) sum ^= sources[i][at];
        out[at] = sum;
    }
}

/* Bytes [at, n) of `results` outputs; tables: of the coefficient of source i in result j at [j * count + i]. */
static void zbmd_code_bytes(uint8_t *const *outs, size_t results, const uint8_t *const *sources, size_t count,
                            const zbmd_halves *tables, size_t at, size_t n) {
    for (; at < n; at++)
        for (size_t j = 0; j < results; j++) {
            uint8_t sum = 0;
            for (size_t i = 0; i < count; i++) sum ^= zbmd_gf_look_up(&tables[j * count + i], sources[i][at]);
            outs[j][at] = sum;
        }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

__attribute__((target("avx2"))) static size_t zbmd_code_avx2(uint8_t *const *outs, size_t results,
                                                             const uint8_t *const *sources, size_t count,
                                                             const zbmd_halves *tables, size_t n) {
    const __m256i mask = _mm256_set1_epi8(15);
    size_t at = 0;
    for (; at + 64 <= n; at += 64) {
        __m256i sums[CODE_OUTPUTS][2];
        for (size_t j = 0; j < results; j++) sums[j][0] = sums[j][1] = _mm256_setzero_si256();
        for (size_t i = 0; i < count; i++) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(sources[i] + at));
            __m256i b = _mm256_loadu_si256((const __m256i *)(sources[i] + at + 32));
            __m256i a_low = _mm256_and_si256(a, mask), a_high = _mm256_and_si256(_mm256_srli_epi64(a, 4), mask);
            __m256i b_low = _mm256_and_si256(b, mask), b_high = _mm256_and_si256(_mm256_srli_epi64(b, 4), mask);
            for (size_t j = 0; j < results; j++) {
                const zbmd_halves *of = &tables[j * count + i];
                __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)of->low));
                __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)of->high));
                sums[j][0] = _mm256_xor_si256(sums[j][0], _mm256_xor_si256(_mm256_shuffle_epi8(low, a_low),
                                                                           _mm256_shuffle_epi8(high, a_high)));
                sums[j][1] = _mm256_xor_si256(sums[j][1], _mm256_xor_si256(_mm256_shuffle_epi8(low, b_low),
                                                                           _mm256_shuffle_epi8(high, b_high)));
            }
        }
        for (size_t j = 0; j < results; j++) {
            _mm256_storeu_si256((__m256i *)(outs[j] + at), sums[j][0]);
            _mm256_storeu_si256((__m256i *)(outs[j] + at + 32), sums[j][1]);
        }
    }
    return at;
}
#endif

/* outs[j] = sum over i of matrix[j * count + i] * sources[i], n bytes each; at most CODE_OUTPUTS outputs. */
static void zbmd_code_some(uint8_t *const *outs, size_t results, const uint8_t *const *sources, size_t count,
                           const uint8_t *matrix, zbmd_halves *tables, size_t n) {
    for (size_t entry = 0; entry < results * count; entry++)
        for (int half = 0; half < 16; half++) {
            tables[entry].low[half] = zbmd_gf_product(matrix[entry], (uint8_t)half);
            tables[entry].high[half] = zbmd_gf_product(matrix[entry], (uint8_t)(half << 4));
        }
    size_t at = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2")) at = zbmd_code_avx2(outs, results, sources, count, tables, n);
#endif
    zbmd_code_bytes(outs, results, sources, count, tables, at, n);
}

static void zbmd_code(uint8_t *const *outs, size_t results, const uint8_t *const *sources, size_t count,
                      const uint8_t *matrix, size_t n) {
    zbmd_halves tables[CODE_OUTPUTS * CODE_SOURCES_MAX];
    for (size_t j = 0; j < results;) {
        size_t some = results - j < CODE_OUTPUTS ? results - j : CODE_OUTPUTS;
        size_t ones = 0;
        while (ones < count && matrix[j * count + ones] == 1) ones++;
        if (ones == count) {
            zbmd_xor_all(outs[j], sources, count, n);
            some = 1;
        } else
            zbmd_code_some(outs + j, some, sources, count, matrix + j * count, tables, n);
        j += some;
    }
}

/* The sum, modulo 2^64, of words, each times an odd number of its place; `state_sums` in optimizers.cu is the same. */
static uint64_t zbmd_state_sum(const uint32_t *words, size_t n, uint64_t first) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t z = (first + i + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 32) * 0xD6E8FEB86659FD93u;
        sum += words[i] * ((z ^ z >> 32) | 1u);
    }
    return sum;
}
#endif
