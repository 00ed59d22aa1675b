// Matrix products by `mma.sync`, with float32 sums: of bf16, and of float32 whose fractions are rounded to 10 bits (tf32).
// Tiles of 128 x 128 x 64 bytes, 8 warps of 64 x 32, 4 stages of cp.async. Leading dimensions are multiples of 16 bytes, for
// copies of so many; edges are filled with zeros.
#include "epilogue.cuh"

#define TILE 128
#define DEPTH_BYTES 64
#define STAGES 4
#define TILE_BYTES (TILE * DEPTH_BYTES)

template <typename E> struct Elements {
    static const int DEPTH = DEPTH_BYTES / sizeof(E), PIECE = 16 / sizeof(E);
};

// Where piece `chunk` of 16 bytes of row `row` is in a tile: swizzled, so that the 8 rows of a matrix that ldmatrix reads, 8
// pieces of a row that are written, and the 4 rows of a fragment of float32 are in different banks.
template <typename E, bool TRANSPOSED> DEVICE u32 place(u32 tile, int row, int chunk) {
    if (!TRANSPOSED) return tile + row * DEPTH_BYTES + ((chunk ^ ((row >> 1) & 3)) << 4);  // TILE rows
    return tile + row * (TILE * (int)sizeof(E)) + ((chunk ^ (sizeof(E) == 2 ? row & 7 : (row & 3) << 1)) << 4);
}

// Brings the tile of an operand whose outer index (rows of a, columns of b) begins at `outer` and inner one at `inner`.
// The matrix is (outers, inners), or (inners, outers) if TRANSPOSED.
template <bool TRANSPOSED, typename E>
DEVICE void load_tile(u32 tile, const E *matrix, int outer, int inner, int outers, int inners) {
    const int PIECE = Elements<E>::PIECE, PIECES = (TRANSPOSED ? TILE : Elements<E>::DEPTH) / PIECE;
#pragma unroll
    for (int i = threadIdx.x; i < TILE_BYTES / 16; i += 256) {
        int row = i / PIECES, chunk = i % PIECES;
        int y = (TRANSPOSED ? inner : outer) + row, x = (TRANSPOSED ? outer : inner) + chunk * PIECE;
        int rows = TRANSPOSED ? inners : outers, columns = TRANSPOSED ? outers : inners;
        bool wanted = y < rows && x < columns;
        copy_async_16(place<E, TRANSPOSED>(tile, row, chunk), matrix + (wanted ? (u64)y * columns + x : 0), wanted);
    }
}

// A fragment (16 outer, 32 bytes of inner) from step `s` of a tile, as the four matrices of ldmatrix: by outer halves first
// if BY_OUTER, as `a` needs them, else by inner ones, as two fragments of `b`. There is no ldmatrix.trans of float32.
template <bool TRANSPOSED, bool BY_OUTER, typename E> DEVICE void load_fragment(u32 (&r)[4], u32 tile, int outer, int s) {
    int lane = threadIdx.x % WARP;
    int high_outer = BY_OUTER ? lane / 8 % 2 : lane / 16, high_inner = BY_OUTER ? lane / 16 : lane / 8 % 2;
    if (!TRANSPOSED)
        load_matrices(r, place<E, false>(tile, outer + (lane & 7) + high_outer * 8, s * 2 + high_inner));
    else if (sizeof(E) == 2)
        load_matrices_transposed(r, place<E, true>(tile, s * 16 + (lane & 7) + high_inner * 8, outer / 8 + high_outer));
    else
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = outer + lane / 4 + (BY_OUTER ? i % 2 : i / 2) * 8, inner = s * 8 + lane % 4 + (BY_OUTER ? i / 2 : i % 2) * 4;
            r[i] = load_shared(place<E, true>(tile, inner, at / 4) + at % 4 * 4);
        }
    if (sizeof(E) == 4)
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = round_tf32(r[i]);
}

// Stages the sums of a tile, and writes it.
template <typename T, typename E>
DEVICE void finish_tile(T *c, float *staged, const float (&sums)[4][4][4], int row0, int column0, int m, int n,
                        const EpilogueOf<E> &end) {
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
template <bool TA, bool TB, typename T, typename E>
DEVICE void multiply(T *c, const E *a, const E *b, int m, int n, int k, const EpilogueOf<E> &end) {
    extern __shared__ __align__(128) u8 memory[];
    const int DEPTH = Elements<E>::DEPTH;
    u32 tiles = shared_address(memory);
    int warp = threadIdx.x / WARP, wm = warp / 4 * 64, wn = warp % 4 * 32;
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
        for (int s = 0; s < DEPTH_BYTES / 32; s++) {
            u32 fa[4][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) load_fragment<TA, true, E>(fa[i], ta, wm + i * 16, s);
#pragma unroll
            for (int j = 0; j < 2; j++) load_fragment<!TB, false, E>(fb[j], tb, wn + j * 16, s);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (sizeof(E) == 2)
                        mma_bf16(sums[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
                    else
                        mma_tf32(sums[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    finish_tile<T>(c, (float *)memory, sums, row0, column0, m, n, end);
}

PRODUCTS(matmul)
PRODUCT_OF(float, tf32_nn_f32, float, false, false)
PRODUCT_OF(float, tf32_nt_f32, float, false, true)
PRODUCT_OF(float, tf32_tn_f32, float, true, false)
