// What products by `wgmma` share, however their tiles come: a step of bf16, and the way of sums to their place in memory.
#pragma once
#include "epilogue.cuh"
#include "wgmma.cuh"

// d (64, 256) += a b. TA, TB: a is (k, m), b is (n, k).
template <bool TA, bool TB> DEVICE void wgmma_256(float (&d)[128], u64 a, u64 b) {
    WGMMA(d, "m64n256k16", "bf16.bf16", 128, "%128, %129, 1, 1, 1, %130, %131;", "l"(a), "l"(b), "n"(TA), "n"(!TB));
}

// Stages the sums of this warpgroup's 64 rows of a tile, 2 * N columns, for `write_tile`.
template <int N> DEVICE void stage_sums(float *staged, const float (&sums)[N]) {
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < N; i += 2)
        *(Words2 *)staged_pair<2 * N>(staged, row + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2) = {__float_as_uint(sums[i]),
                                                                                            __float_as_uint(sums[i + 1])};
}
