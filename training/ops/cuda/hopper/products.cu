// Matrix products of bf16 by `wgmma` (sm_90a), with float32 sums. Tiles of 128 x 256 x 64, two warpgroups of 64 x 256, 4
// stages of cp.async. Leading dimensions are multiples of 8 elements; edges are filled with zeros.
#include "product_tiles.cuh"

#define ROWS 128
#define COLUMNS 256
#define DEPTH 64
#define STAGES 4
#define STAGE_BYTES ((ROWS + COLUMNS) * DEPTH * 2)

// Tiles have the 128-byte swizzle. TRANSPOSED: the outer index is contiguous, in blocks of 64 columns and DEPTH rows.
template <bool TRANSPOSED> DEVICE u32 place(u32 tile, int row, int chunk) {
    if (TRANSPOSED) tile += chunk / 8 * (DEPTH * 128);
    return tile + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}
// As in matmul.cu, for OUTER rows of a or columns of b.
template <int OUTER, bool TRANSPOSED>
DEVICE void load_tile(u32 tile, const bf16 *matrix, int outer, int inner, int outers, int inners) {
#pragma unroll
    for (int i = threadIdx.x; i < OUTER * DEPTH / 8; i += 256) {
        int row = TRANSPOSED ? i / (OUTER / 8) : i / (DEPTH / 8), chunk = TRANSPOSED ? i % (OUTER / 8) : i % (DEPTH / 8);
        int y = (TRANSPOSED ? inner : outer) + row, x = (TRANSPOSED ? outer : inner) + chunk * 8;
        int rows = TRANSPOSED ? inners : outers, columns = TRANSPOSED ? outers : inners;
        bool wanted = y < rows && x < columns;
        copy_async_16(place<TRANSPOSED>(tile, row, chunk), matrix + (wanted ? (u64)y * columns + x : 0), wanted);
    }
}

// c (m, n) = a b. a is (m, k), or (k, m) if TA; b is (k, n), or (n, k) if TB.
template <bool TA, bool TB, typename T>
DEVICE void multiply(T *c, const bf16 *a, const bf16 *b, int m, int n, int k, const Epilogue &end) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 tiles = shared_address(memory);
    int group = threadIdx.x / 128, row0 = blockIdx.y * ROWS, column0 = blockIdx.x * COLUMNS;
    int steps = (k + DEPTH - 1) / DEPTH;
    auto load = [&](int step) {
        u32 at = tiles + step % STAGES * STAGE_BYTES;
        if (step < steps) {
            load_tile<ROWS, TA>(at, a, row0, step * DEPTH, m, k);
            load_tile<COLUMNS, !TB>(at + ROWS * DEPTH * 2, b, column0, step * DEPTH, n, k);
        }
        copy_async_commit();
    };
    float sums[128] = {};
    for (int step = 0; step < STAGES - 2; step++) load(step);
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 3>();
        fence_for_wgmma();
        __syncthreads();  // tile `step` is there, and both warpgroups have ended the products of step - 2
        u32 ta = tiles + step % STAGES * STAGE_BYTES, tb = ta + ROWS * DEPTH * 2;
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < DEPTH / 16; s++)
            wgmma_256<TA, TB>(sums, describe(ta + group * 64 * 128 + s * (TA ? 2048 : 32), DEPTH * 128),
                              describe(tb + s * (TB ? 32 : 2048), DEPTH * 128));
        wgmma_commit();
        load(step + STAGES - 2);  // where the tile of step - 2 was
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_done(sums);
    copy_async_wait<0>();
    __syncthreads();
    float *staged = (float *)memory;
    stage_sums(staged, sums);
    __syncthreads();
    write_tile<T, ROWS, COLUMNS>(c, staged, row0, column0, m, n, end);
}

PRODUCTS(wgmma)
