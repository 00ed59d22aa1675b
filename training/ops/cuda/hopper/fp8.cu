// FP8: numbers of 8 bits with a scale, and their products by `wgmma` (sm_90a).
//
// A scale is a power of two by which values are multiplied before they are rounded: only the rounding loses anything. Both
// operands of a product are K-major, so a tensor is stored in both orientations. Leading dimensions are multiples of 16.
// A scale is that of a tensor, or of a block: of 128 elements of a row of activations, or of 128 x 128 weights.
#include "product_tiles.cuh"

#define TILE 128
#define DEPTH 128
#define STAGES 4
#define STAGE_BYTES (2 * TILE * DEPTH)
#define SCALE_EXPONENT_MOST 60  // the inverse of two scales is a normal number

DEVICE float inverse_of(float scale) { return __uint_as_float(0x7f000000u - __float_as_uint(scale)); }  // of a power of two

// The largest power of two by which `most` stays in the range, divided by 2**margin; `before` if `most` says nothing.
template <bool E5M2> DEVICE float scale_for(float most, float before, int margin) {
    u32 bits = __float_as_uint(most);
    if (!(most >= 1.17549435e-38f) || bits >= 0x7f800000u) return before;
    int exponent = (E5M2 ? 15 : 8) + 127 - (int)(bits >> 23) - ((bits & 0x7fffffu) > 0x600000u) - margin;
    exponent = exponent < -SCALE_EXPONENT_MOST ? -SCALE_EXPONENT_MOST : exponent > SCALE_EXPONENT_MOST ? SCALE_EXPONENT_MOST : exponent;
    return __uint_as_float((u32)(exponent + 127) << 23);
}

// Two values as FP8, to nearest even; what is too large becomes the largest.
template <bool E5M2> DEVICE u32 pack_fp8(float low, float high) {
    bf16 packed;  // 16 bits
    if (E5M2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}
// An infinity becomes NaN: as the largest number it would be hidden.
DEVICE float scaled(float x, float scale) { return fabsf(x) == __uint_as_float(0x7f800000u) ? __uint_as_float(0x7fffffffu) : x * scale; }

// Block (i, j): columns 64 i to 64 i + 63 and rows 64 j to 64 j + 63 of x (rows, columns), scaled and rounded, to q (rows,
// columns) and transposed (columns, rows), which may be 0; most[block] = the largest |x|. Each thread has 4 x 4 elements.
template <bool E5M2, typename T>
DEVICE void quantise(u8 *q, u8 *transposed, float *most, const T *x, const float *scale, int rows, int columns) {
    __shared__ float partial[WARP];
    __shared__ u32 tile[64 * 17];  // 64 columns of 16 words: 17 apart, so that lanes use different banks
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int x4 = warp % 2 * 8 + lane % 8, y4 = warp / 2 * 4 + lane / 8;
    int column = blockIdx.x * 64 + x4 * 4, row = blockIdx.y * 64 + y4 * 4;
    float factor = *scale, top = 0.0f;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[4] = {};
        bool wanted = row + i < rows && column < columns;
        u64 at = (u64)(row + i) * columns + column;
        if (wanted) load4(v, x + at);
#pragma unroll
        for (int k = 0; k < 4; k++) top = larger(fabsf(v[k]), top), v[k] = scaled(v[k], factor);
        words[i] = pack_fp8<E5M2>(v[0], v[1]) | pack_fp8<E5M2>(v[2], v[3]) << 16;
        if (wanted && q) *(u32 *)(q + at) = words[i];
    }
    top = block_max(top, partial);
    if (threadIdx.x == 0) most[blockIdx.y * gridDim.x + blockIdx.x] = top;
    if (!transposed) return;
    u32 low = __byte_perm(words[0], words[1], 0x5140), high = __byte_perm(words[2], words[3], 0x5140);
    u32 low2 = __byte_perm(words[0], words[1], 0x7362), high2 = __byte_perm(words[2], words[3], 0x7362);
    tile[(x4 * 4) * 17 + y4] = __byte_perm(low, high, 0x5410);
    tile[(x4 * 4 + 1) * 17 + y4] = __byte_perm(low, high, 0x7632);
    tile[(x4 * 4 + 2) * 17 + y4] = __byte_perm(low2, high2, 0x5410);
    tile[(x4 * 4 + 3) * 17 + y4] = __byte_perm(low2, high2, 0x7632);
    __syncthreads();  // the transposed tile is there
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int inside = i % 2 * 32 + lane / 16 * 16 + i / 2 * 8 + warp, word = lane % 16;
        int line = blockIdx.x * 64 + inside, at = blockIdx.y * 64 + word * 4;
        if (line < columns && at < rows) *(u32 *)(transposed + (u64)line * rows + at) = tile[inside * 17 + word];
    }
}

// Block (i, j): columns 128 i to 128 i + 127 and rows 128 j to 128 j + 127 of x (rows, columns), or of x transposed if TURNED,
// rounded to q. Each row of 128 has a scale of its own, or all with TILES, by its largest magnitude; 1 if that says nothing.
// scales: (rows, blocks), or (blocks, blocks) with TILES.
template <bool TILES, bool TURNED, typename T> DEVICE void quantise_blocks(u8 *q, float *scales, const T *x, int rows, int columns) {
    extern __shared__ __align__(16) float values[];  // rows of x, 129 apart, so that lanes use different banks either way
    __shared__ float partial[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int outer = blockIdx.y * TILE, inner = blockIdx.x * DEPTH, outers = TURNED ? columns : rows, inners = TURNED ? rows : columns;
    for (int row = warp; row < TILE; row += 8)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int y = (TURNED ? inner : outer) + row, column = lane + i * WARP, at = (TURNED ? outer : inner) + column;
            values[row * 129 + column] = y < rows && at < columns ? to_float(x[(u64)y * columns + at]) : 0.0f;
        }
    __syncthreads();  // the tile is there
    auto value = [&](int row, int i) { return TURNED ? values[(lane + i * WARP) * 129 + row] : values[row * 129 + lane + i * WARP]; };
    auto largest = [&](int row) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) top = larger(fabsf(value(row, i)), top);
        return top;
    };
    float scale = 1.0f;
    if (TILES) {
        float top = 0.0f;
        for (int row = warp; row < TILE; row += 8) top = larger(largest(row), top);
        scale = scale_for<false>(block_max(top, partial), 1.0f, 0);
        if (threadIdx.x == 0) scales[blockIdx.y * gridDim.x + blockIdx.x] = scale;
    }
    for (int row = warp; row < TILE && outer + row < outers; row += 8) {
        if (!TILES) {
            scale = scale_for<false>(warp_max(largest(row)), 1.0f, 0);
            if (lane == 0) scales[(u64)(outer + row) * gridDim.x + blockIdx.x] = scale;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = inner + lane + i * WARP;
            if (at < inners) q[(u64)(outer + row) * inners + at] = (u8)pack_fp8<false>(scaled(value(row, i), scale), 0.0f);
        }
    }
}

// One warp, for a tensor: enters the largest of `most` (count) into place *step % length of its history, and sets its
// scale by the largest of the history. state: the scale, then the history. What is not finite enters as 0.
template <bool E5M2> DEVICE void update_scale(float *state, const float *most, int count, const int *step, int length, int margin) {
    float top = 0.0f;
    for (int i = threadIdx.x; i < count; i += WARP) top = larger(most[i], top);
    top = warp_max(top);
    if (!(top < __uint_as_float(0x7f800000u))) top = 0.0f;
    float all = top;
    int place = *step % length;
    for (int i = threadIdx.x; i < length; i += WARP) {
        if (i == place)
            state[1 + i] = top;
        else
            all = larger(state[1 + i], all);
    }
    all = warp_max(all);
    if (threadIdx.x == 0) state[0] = scale_for<E5M2>(all, state[0], margin);
}

// d (64, 128) = a b, or += with ADD, for K-major tiles.
template <bool A5, bool B5, int ADD> DEVICE void wgmma_128(float (&d)[64], u64 a, u64 b) {
    if (A5)
        WGMMA(d, "m64n128k32", "e5m2.e4m3", 64, "%64, %65, %66, 1, 1;", "l"(a), "l"(b), "n"(ADD));
    else if (B5)
        WGMMA(d, "m64n128k32", "e4m3.e5m2", 64, "%64, %65, %66, 1, 1;", "l"(a), "l"(b), "n"(ADD));
    else
        WGMMA(d, "m64n128k32", "e4m3.e4m3", 64, "%64, %65, %66, 1, 1;", "l"(a), "l"(b), "n"(ADD));
}

// Rows first to first + 127 of a matrix (outers, inners), DEPTH columns from `inner` on, with the 128-byte swizzle.
DEVICE void load_tile(u32 tile, const u8 *matrix, int first, int inner, int outers, int inners) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * DEPTH / 16; i += 256) {
        int row = i / (DEPTH / 16), chunk = i % (DEPTH / 16), y = first + row, x = inner + chunk * 16;
        bool wanted = y < outers && x < inners;
        copy_async_16(tile + row * 128 + ((chunk ^ (row & 7)) << 4), matrix + (wanted ? (u64)y * inners + x : 0), wanted);
    }
}

// Whose scales a product divides each DEPTH of its sums by: those of both tensors, at its end; of rows of a and tiles of b, as
// for activations and weights; of rows of both, as for the gradient of weights, whose sums go over the tokens.
enum Scales { OF_TENSORS, OF_ROWS_AND_TILES, OF_ROWS };

// c (m, n) = a (m, k) times b (n, k) transposed. The accumulators of FP8 keep 13 bits of a fraction (docs/H100.md), so the
// products of DEPTH are added up in float32 registers, divided by the scales of their blocks, if these have any.
template <bool A5, bool B5, int SCALES, typename T>
DEVICE void multiply(T *c, const u8 *a, const u8 *b, const float *scale_a, const float *scale_b, int m, int n, int k, const Epilogue &end) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ float by_column[2][TILE];  // of OF_ROWS: for b's rows, of this step and the one before
    u32 tiles = shared_address(memory);
    int group = threadIdx.x / 128, row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;
    int steps = (k + DEPTH - 1) / DEPTH;
    auto load = [&](int step) {
        u32 at = tiles + step % STAGES * STAGE_BYTES;
        if (step < steps) {
            load_tile(at, a, row0, step * DEPTH, m, k);
            load_tile(at + TILE * DEPTH, b, column0, step * DEPTH, n, k);
        }
        copy_async_commit();
    };
    float sums[64] = {}, part[64] = {};
    for (int step = 0; step < STAGES - 1; step++) load(step);
    for (int step = 0; step < steps; step++) {
        if (SCALES == OF_ROWS && threadIdx.x < TILE) {
            int column = column0 + threadIdx.x;
            by_column[step % 2][threadIdx.x] = column < n ? inverse_of(scale_b[(u64)column * steps + step]) : 1.0f;
        }
        copy_async_wait<STAGES - 2>();
        fence_for_wgmma();
        __syncthreads();  // tile `step` is there, and both warpgroups have ended the products of step - 1
        u32 ta = tiles + step % STAGES * STAGE_BYTES + group * 64 * DEPTH, tb = tiles + step % STAGES * STAGE_BYTES + TILE * DEPTH;
        wgmma_fence();
        wgmma_128<A5, B5, 0>(part, describe(ta, 16), describe(tb, 16));
#pragma unroll
        for (int s = 32; s < DEPTH; s += 32) wgmma_128<A5, B5, 1>(part, describe(ta + s, 16), describe(tb + s, 16));
        wgmma_commit();
        load(step + STAGES - 1);  // where the tile of step - 1 was
        float factors[2] = {1.0f, 1.0f};
#pragma unroll
        for (int half = 0; SCALES != OF_TENSORS && half < 2; half++) {
            int row = row0 + threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + half * 8;
            if (row >= m) continue;
            factors[half] = inverse_of(scale_a[(u64)row * steps + step]);
            if (SCALES == OF_ROWS_AND_TILES) factors[half] *= inverse_of(scale_b[(u64)blockIdx.x * steps + step]);
        }
        wgmma_wait<0>();
        wgmma_done(part);
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
            float f = factors[i / 2 % 2], first = f, second = f;
            if (SCALES == OF_ROWS) {
                int column = i / 4 * 8 + threadIdx.x % 4 * 2;
                Words2 of_columns = *(const Words2 *)&by_column[step % 2][column];
                first *= __uint_as_float(of_columns.x), second *= __uint_as_float(of_columns.y);
            }
            sums[i] += SCALES == OF_TENSORS ? part[i] : part[i] * first;
            sums[i + 1] += SCALES == OF_TENSORS ? part[i + 1] : part[i + 1] * second;
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    float *staged = (float *)memory;
    stage_sums(staged, sums);
    __syncthreads();
    write_tile<T, TILE, TILE>(c, staged, row0, column0, m, n, end);
}

#define QUANTISE(name, E5M2, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) name(u8 *q, u8 *transposed, float *most, const T *x,           \
                                                           const float *scale, int rows, int columns) {            \
        quantise<E5M2, T>(q, transposed, most, x, scale, rows, columns);                                           \
    }
#define UPDATE(name, E5M2)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARP) name(float *state, const float *most, int count, const int *step, \
                                                            int length, int margin) {                            \
        update_scale<E5M2>(state, most, count, step, length, margin);                                              \
    }
// scale_a, scale_b: those by which the operands were multiplied.
#define PRODUCT8(name, T, A5, B5)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) name(T *c, const u8 *a, const u8 *b, int m, int n, int k,        \
                                                           const float *scale_a, const float *scale_b,             \
                                                           const float *bias, const bf16 *residual, bf16 *before,  \
                                                           int activation) {                                       \
        float scale = inverse_of(*scale_a) * inverse_of(*scale_b);                                                 \
        multiply<A5, B5, OF_TENSORS, T>(c, a, b, 0, 0, m, n, k, {bias, residual, before, scale, activation});           \
    }
#define QUANTISE_BLOCKS(name, TILES, TURNED, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(256) name(u8 *q, float *scales, const T *x, int rows, int columns) { \
        quantise_blocks<TILES, TURNED, T>(q, scales, x, rows, columns);                                            \
    }

#define PRODUCT_OF_BLOCKS(name, T, SCALES)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) name(T *c, const u8 *a, const u8 *b, int m, int n, int k,              \
                                                           const float *scale_a, const float *scale_b,                   \
                                                           const float *bias, const bf16 *residual, bf16 *before,        \
                                                           int activation) {                                             \
        multiply<false, false, SCALES, T>(c, a, b, scale_a, scale_b, m, n, k, {bias, residual, before, 1.0f, activation}); \
    }

QUANTISE(fp8_quantise_e4m3_f32, false, float)
QUANTISE(fp8_quantise_e4m3_bf16, false, bf16)
QUANTISE(fp8_quantise_e5m2_f32, true, float)
QUANTISE(fp8_quantise_e5m2_bf16, true, bf16)
UPDATE(fp8_scale_e4m3, false)
UPDATE(fp8_scale_e5m2, true)
PRODUCT8(fp8_e4m3_e4m3_bf16, bf16, false, false)
PRODUCT8(fp8_e5m2_e4m3_bf16, bf16, true, false)
PRODUCT8(fp8_e4m3_e5m2_f32, float, false, true)
QUANTISE_BLOCKS(fp8_rows_f32, false, false, float)
QUANTISE_BLOCKS(fp8_rows_bf16, false, false, bf16)
QUANTISE_BLOCKS(fp8_rows_turned_f32, false, true, float)
QUANTISE_BLOCKS(fp8_rows_turned_bf16, false, true, bf16)
QUANTISE_BLOCKS(fp8_tiles_f32, true, false, float)
QUANTISE_BLOCKS(fp8_tiles_bf16, true, false, bf16)
QUANTISE_BLOCKS(fp8_tiles_turned_f32, true, true, float)
QUANTISE_BLOCKS(fp8_tiles_turned_bf16, true, true, bf16)
PRODUCT_OF_BLOCKS(fp8_blocks_bf16, bf16, OF_ROWS_AND_TILES)
PRODUCT_OF_BLOCKS(fp8_of_rows_f32, float, OF_ROWS)
PRODUCT_OF_BLOCKS(fp8_of_rows_bf16, bf16, OF_ROWS)
