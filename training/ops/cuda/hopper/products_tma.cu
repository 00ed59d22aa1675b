// Matrix products of bf16 by `wgmma` (sm_90a), with float32 sums and tiles that the tensor memory accelerator brings: a
// producer warp asks for them, and two warpgroups multiply. Each stage has a barrier that is full when its bytes have come,
// and one that is empty when all consumers are done with it.
#include "product_tiles.cuh"

#define ROWS 128
#define COLUMNS 256
#define DEPTH 64
#define STAGES 4
#define STAGE_BYTES ((ROWS + COLUMNS) * DEPTH * 2)
#define CONSUMER_WARPS 8

// OUTER rows of a or columns of b, in one box of DEPTH columns, or TRANSPOSED in boxes of 64 columns and DEPTH rows.
template <int OUTER, bool TRANSPOSED> DEVICE void bring_tile(u32 tile, const TensorMap &map, int outer, int inner, u32 full) {
    if (TRANSPOSED)
#pragma unroll
        for (int i = 0; i < OUTER / 64; i++) copy_box(tile + i * (DEPTH * 128), map, outer + i * 64, inner, full);
    else
        copy_box(tile, map, inner, outer, full);
}

// c (m, n) = a b. a is (m, k), or (k, m) if TA; b is (k, n), or (n, k) if TB.
template <bool TA, bool TB, typename T>
DEVICE void multiply(T *c, const TensorMap &a, const TensorMap &b, int m, int n, int k, const Epilogue &end) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 tiles = shared_address(memory), full = tiles + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = threadIdx.x / 128;
    int row0 = blockIdx.y * ROWS, column0 = blockIdx.x * COLUMNS, steps = (k + DEPTH - 1) / DEPTH;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, CONSUMER_WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    float sums[128] = {};
    if (warp == CONSUMER_WARPS) {
        for (int step = 0; step < steps; step++) {
            int stage = step % STAGES;
            if (step >= STAGES) barrier_wait(empty + stage * 8, step / STAGES - 1 & 1);
            if (lane == 0) {
                u32 at = tiles + stage * STAGE_BYTES;
                barrier_expect(full + stage * 8, STAGE_BYTES);
                bring_tile<ROWS, TA>(at, a, row0, step * DEPTH, full + stage * 8);
                bring_tile<COLUMNS, !TB>(at + ROWS * DEPTH * 2, b, column0, step * DEPTH, full + stage * 8);
            }
            __syncwarp();
        }
    } else {
        for (int step = 0; step < steps; step++) {
            int stage = step % STAGES;
            barrier_wait(full + stage * 8, step / STAGES & 1);
            u32 ta = tiles + stage * STAGE_BYTES, tb = ta + ROWS * DEPTH * 2;
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < DEPTH / 16; s++)
                wgmma_256<TA, TB>(sums, describe(ta + group * 64 * 128 + s * (TA ? 2048 : 32), DEPTH * 128),
                                  describe(tb + s * (TB ? 32 : 2048), DEPTH * 128));
            wgmma_commit();
            wgmma_wait<1>();  // the products of step - 1 have ended
            __syncwarp();
            if (step && lane == 0) barrier_arrive(empty + (step - 1) % STAGES * 8);
        }
        wgmma_wait<0>();
        wgmma_done(sums);
    }
    __syncthreads();
    float *staged = (float *)memory;
    if (warp < CONSUMER_WARPS) stage_sums(staged, sums);
    __syncthreads();
    write_tile<T, ROWS, COLUMNS>(c, staged, row0, column0, m, n, end);
}

#define PRODUCT_TMA(name, T, TA, TB)                                                                                 \
    extern "C" __global__ void __launch_bounds__((CONSUMER_WARPS + 1) * WARP) name(                                  \
        T *c, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int m, int n, int k,         \
        const float *bias, const bf16 *residual, bf16 *before, float scale, int activation) {                        \
        multiply<TA, TB, T>(c, a, b, m, n, k, {bias, residual, before, scale, activation});                          \
    }

PRODUCT_TMA(tma_nn_bf16, bf16, false, false)
PRODUCT_TMA(tma_nt_bf16, bf16, false, true)
PRODUCT_TMA(tma_tn_bf16, bf16, true, false)
PRODUCT_TMA(tma_nn_f32, float, false, false)
PRODUCT_TMA(tma_nt_f32, float, false, true)
PRODUCT_TMA(tma_tn_f32, float, true, false)
