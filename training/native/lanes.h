/* Vectors of 64 bytes, for one type of real: include it with REAL, BITS (an integer as wide), LANES and SUFFIX
 * defined. The compiler makes of them what the machine has, one register or four: the lanes, and so the bits,
 * are the same. Sums go by lanes, element i to lane i % LANES, and then the lanes along a fixed tree. */
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed to inlined functions alone */
#define ZBMD_CAT2(a, b) zbmd_##a##_##b
#define ZBMD_CAT(a, b) ZBMD_CAT2(a, b)
#define NAME(name) ZBMD_CAT(name, SUFFIX)
#define VEC NAME(vec)
#define MASK NAME(mask)
#define INLINE static inline __attribute__((always_inline))

typedef REAL VEC __attribute__((vector_size(64)));
typedef BITS MASK __attribute__((vector_size(64)));
typedef REAL NAME(loose) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));

#define LOAD(p) ((VEC) * (const NAME(loose) *)(p))
#define STORE(p, v) (*(NAME(loose) *)(p) = (v))
#define SELECT(mask, a, b) ((VEC)(((mask) & (MASK)(a)) | (~(mask) & (MASK)(b))))

/* The first n < LANES elements, and zeros (the first of `rest` where that is given) behind them. */
INLINE VEC NAME(load_part)(const REAL *p, size_t n, REAL rest) {
    VEC v = rest - (VEC){0};
    for (size_t i = 0; i < n; i++) v[i] = p[i];
    return v;
}

INLINE void NAME(store_part)(REAL *p, VEC v, size_t n) {
    for (size_t i = 0; i < n; i++) p[i] = v[i];
}

INLINE REAL NAME(add_lanes)(VEC v) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

INLINE VEC NAME(larger)(VEC a, VEC b) { return SELECT(a > b, a, b); }

INLINE REAL NAME(largest_lane)(VEC v) {
    REAL most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e**x: Cody and Waite's reduction to |r| <= ln(2) / 2, then a polynomial (for float that of Cephes' expf,
 * for double Taylor's). Below -LIMIT the result is 0, above LIMIT that of LIMIT; NaN stays NaN. */
INLINE VEC NAME(exp)(VEC given) {
    VEC x = SELECT(given > EXP_LIMIT, EXP_LIMIT - (VEC){0}, given);
    x = SELECT(x < -EXP_LIMIT, -EXP_LIMIT - (VEC){0}, x);
    VEC shifted = x * (REAL)1.44269504088896340736 + EXP_SHIFTER;
    VEC n = shifted - EXP_SHIFTER;
    VEC r = x - n * EXP_LN2_HIGH;
    r -= n * EXP_LN2_LOW;
    static const REAL factors[] = EXP_FACTORS;
    VEC sum = factors[0] - (VEC){0};
    for (size_t i = 1; i < sizeof(factors) / sizeof(REAL); i++) sum = sum * r + factors[i];
    sum = sum * (r * r) + r + (REAL)1;
    MASK power = ((MASK)shifted - EXP_SHIFTER_BITS + EXP_BIAS) << EXP_MANTISSA_BITS;
    VEC y = sum * (VEC)power;
    return SELECT(given < -EXP_LIMIT, (VEC){0}, y);
}
