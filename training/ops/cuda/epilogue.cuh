// What follows a matrix product before its result is stored, for all product kernels.
#pragma once
#include "device.cuh"

template <typename E> struct EpilogueOf {
    const float *bias;  // (n,), or 0
    const E *residual;  // (m, n), or 0; with a gradient, what the activation was given
    E *before;          // (m, n), or 0: gets the value before the activation
    float scale;
    int activation;     // 0: none, 1: GELU, 2: squared ReLU, 3 and 4: their gradients
};
using Epilogue = EpilogueOf<bf16>;

DEVICE float activate(float x, int kind) {
    if (kind == 1) return x / (fast_exp(-x * 1.59576912160573081145f * (x * x * 0.044715f + 1.0f)) + 1.0f);
    if (kind == 2) return x < 0.0f ? 0.0f : x * x;
    return x;
}

DEVICE float combine(float x, float other, int kind) {
    if (kind == 3) return x * gelu_slope(other);
    if (kind == 4) return x * (positive(other) * 2.0f);
    return x + other;
}

DEVICE void load4(float (&v)[4], const float *from) {
    Words4 words = *(const Words4 *)from;
    v[0] = __uint_as_float(words.x), v[1] = __uint_as_float(words.y), v[2] = __uint_as_float(words.z), v[3] = __uint_as_float(words.w);
}
DEVICE void load4(float (&v)[4], const bf16 *from) {
    Words2 words = *(const Words2 *)from;
    v[0] = to_float((bf16)words.x), v[1] = to_float((bf16)(words.x >> 16));
    v[2] = to_float((bf16)words.y), v[3] = to_float((bf16)(words.y >> 16));
}

DEVICE void store4(float *to, const float (&v)[4]) {
    *(Words4 *)to = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
}
DEVICE void store4(bf16 *to, const float (&v)[4]) { *(Words2 *)to = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])}; }

// Where the pair of columns that begins at the even `column` is in the staged tile: swizzled by the row, so that the 8
// rows of a fragment are in different banks.
template <int COLUMNS> DEVICE float *staged_pair(float *staged, int row, int column) {
    return staged + row * COLUMNS + ((column / 2 ^ (row & 7) << 2) * 2);
}

// Writes a tile of ROWS x COLUMNS whose sums are staged in shared memory: whole rows by each warp, in pieces of 4
// columns. y = activation(scale * sum + bias) + residual, or (scale * sum + bias) times the activation's slope there.
template <typename T, int ROWS, int COLUMNS, typename E>
DEVICE void write_tile(T *c, float *staged, int row0, int column0, int m, int n, const EpilogueOf<E> &end) {
#pragma unroll
    for (int inside = threadIdx.x % WARP * 4; inside < COLUMNS; inside += WARP * 4) {
        int column = column0 + inside;
        if (column >= n) return;
        float bias[4] = {};
        if (end.bias)
            for (int k = 0; k < 4; k++) bias[k] = end.bias[column + k];
        for (int row = threadIdx.x / WARP; row < ROWS && row0 + row < m; row += blockDim.x / WARP) {
            Words4 words = *(const Words4 *)staged_pair<COLUMNS>(staged, row, inside);
            u64 at = (u64)(row0 + row) * n + column;
            float v[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                          __uint_as_float(words.w)};
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = v[k] * end.scale + bias[k];
            if (end.before) store4(end.before + at, v);
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = activate(v[k], end.activation);
            if (end.residual) {
                float other[4];
                load4(other, end.residual + at);
#pragma unroll
                for (int k = 0; k < 4; k++) v[k] = combine(v[k], other[k], end.activation);
            }
            store4(c + at, v);
        }
    }
}

// The entries of a source of products, by its `multiply<TA, TB, T>`.
#define PRODUCT_OF(E, name, T, TA, TB)                                                                              \
    extern "C" __global__ void __launch_bounds__(256) name(T *c, const E *a, const E *b, int m, int n, int k,       \
                                                           const float *bias, const E *residual, E *before,         \
                                                           float scale, int activation) {                           \
        multiply<TA, TB, T>(c, a, b, m, n, k, {bias, residual, before, scale, activation});                         \
    }
#define PRODUCT(name, T, TA, TB) PRODUCT_OF(bf16, name, T, TA, TB)

#define PRODUCTS(prefix)                                 \
    PRODUCT(prefix##_nn_bf16, bf16, false, false)        \
    PRODUCT(prefix##_nt_bf16, bf16, false, true)         \
    PRODUCT(prefix##_tn_bf16, bf16, true, false)         \
    PRODUCT(prefix##_nn_f32, float, false, false)        \
    PRODUCT(prefix##_nt_f32, float, false, true)         \
    PRODUCT(prefix##_tn_f32, float, true, false)
