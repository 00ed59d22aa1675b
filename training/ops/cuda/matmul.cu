// Matrix products of bf16 by `mma.sync`, with float32 sums. Tiles of 128 x 128 x 32, 8 warps of 64 x 32, 4 stages of
// cp.async. Leading dimensions are multiples of 8 elements, for copies of 16 bytes; edges are filled with zeros.
#include "epilogue.cuh"

#define TILE 128
#define DEPTH 32
#define STAGES 4
#define TILE_BYTES (TILE * DEPTH * 2)

// Where piece `chunk` of 8 elements of row `row` is in a tile: swizzled, so that the 8 rows of a matrix that ldmatrix
// reads, and 8 pieces of a row that are written, are in different banks.
template <bool TRANSPOSED> DEVICE u32 place(u32 tile, int row, int chunk) {
    if (TRANSPOSED) return tile + row * (TILE * 2) + ((chunk ^ (row & 7)) << 4);  // DEPTH rows of TILE elements
    return tile + row * (DEPTH * 2) + ((chunk ^ ((row >> 1) & 3)) << 4);          // TILE rows of DEPTH elements
}

// Brings the tile of an operand whose outer index (rows of a, columns of b) begins at `outer` and inner one at `inner`.
// The matrix is (outers, inners), or (inners, outers) if TRANSPOSED.
template <bool TRANSPOSED>
DEVICE void load_tile(u32 tile, const bf16 *matrix, int outer, int inner, int outers, int inners) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * DEPTH / 8; i += 256) {
        int row = TRANSPOSED ? i / (TILE / 8) : i / (DEPTH / 8), chunk = TRANSPOSED ? i % (TILE / 8) : i % (DEPTH / 8);
        int y = (TRANSPOSED ? inner : outer) + row, x = (TRANSPOSED ? outer : inner) + chunk * 8;
        int rows = TRANSPOSED ? inners : outers, columns = TRANSPOSED ? outers : inners;
        bool wanted = y < rows && x < columns;
        copy_async_16(place<TRANSPOSED>(tile, row, chunk), matrix + (wanted ? (u64)y * columns + x : 0), wanted);
    }
}

// Stages the sums of a tile, and writes it.
template <typename T>
DEVICE void finish_tile(T *c, float *staged, const float (&sums)[4][4][4], int row0, int column0, int m, int n,
                        const Epilogue &end) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, wm = warp / 4 * 64, wn = warp % 4 * 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(Words2 *)staged_pair<TILE>(staged, wm + i * 16 + half * 8 + lane / 4, wn + j * 8 + lane % 4 * 2) = {
                    __float_as_uint(sums[i][j][half * 2]), __float_as_uint(sums[i][j][half * 2 + 1])};
    __syncthreads();
    write_tile<T, TILE, TILE>(c, staged, row0, column0, m, n, end);
}

// c (m, n) = a b. a is (m, k), or (k, m) if TA; b is (k, n), or (n, k) if TB.
template <bool TA, bool TB, typename T>
DEVICE void multiply(T *c, const bf16 *a, const bf16 *b, int m, int n, int k, const Epilogue &end) {
    extern __shared__ __align__(128) u8 memory[];
    u32 tiles = shared_address(memory);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, wm = warp / 4 * 64, wn = warp % 4 * 32;
    int row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE, steps = (k + DEPTH - 1) / DEPTH;
    auto load = [&](int step) {
        u32 at = tiles + step % STAGES * (2 * TILE_BYTES);
        if (step < steps) {
            load_tile<TA>(at, a, row0, step * DEPTH, m, k);
            load_tile<!TB>(at + TILE_BYTES, b, column0, step * DEPTH, n, k);
        }
        copy_async_commit();
    };
    float sums[4][4][4] = {};
    for (int step = 0; step < STAGES - 1; step++) load(step);
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // tile `step` is there, and nobody reads any more the one that `load` overwrites
        load(step + STAGES - 1);
        u32 ta = tiles + step % STAGES * (2 * TILE_BYTES), tb = ta + TILE_BYTES;
#pragma unroll
        for (int s = 0; s < DEPTH / 16; s++) {
            u32 fa[4][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (TA)
                    load_matrices_transposed(fa[i], place<true>(ta, s * 16 + (lane & 7) + lane / 16 * 8, (wm + i * 16) / 8 + lane / 8 % 2));
                else
                    load_matrices(fa[i], place<false>(ta, wm + i * 16 + lane % 16, s * 2 + lane / 16));
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (TB)
                    load_matrices(fb[j], place<false>(tb, wn + j * 16 + (lane & 7) + lane / 16 * 8, s * 2 + lane / 8 % 2));
                else
                    load_matrices_transposed(fb[j], place<true>(tb, s * 16 + lane % 16, (wn + j * 16) / 8 + lane / 16));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) mma_bf16(sums[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    finish_tile<T>(c, (float *)memory, sums, row0, column0, m, n, end);
}

PRODUCTS(matmul)
