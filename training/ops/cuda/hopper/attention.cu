// Causal attention forward by `wgmma` (sm_90a): as `forward` of attention.cu, with the same arguments and results, in tiles
// of 128 queries, 64 for each of two warpgroups, and 64 keys. The weights stay in registers between the two products.
#include "attention_tiles.cuh"

// Block (i, b * heads + h): the queries of tile gridDim.x - 1 - i, the longest first.
template <int D> DEVICE void forward(bf16 *y, float *logs, const bf16 *qkv, const float *bias, const Shape &shape) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 queries = shared_address(memory);
    int length = shape.length, stride = shape.width(D), tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y % shape.heads;
    u64 first = (u64)(blockIdx.y / shape.heads) * length * stride;
    SeenTiles<D> seen_tiles(qkv + first, shape, head, tile, queries + OWN * D * 2);
    load_rows<D, OWN>(queries, qkv + first + head * D, stride, tile * OWN, length);
    seen_tiles.load(0);
    float sums[D / 2] = {}, p[32] = {}, top[2] = {MASKED, MASKED}, total[2] = {}, scale = rsqrtf((float)D) * LOG2E;
    for (int j = 0; j < seen_tiles.count; j++) {
        seen_tiles.load(j + 1);
        copy_async_wait<1>();
        fence_for_wgmma();
        __syncthreads();  // tile j is there
        u32 tk = seen_tiles.at(j), tv = tk + seen_tiles.BYTES;
        wgmma_fence();
        rows_by_rows<D>(p, queries, tk);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(p);
        float most[2] = {MASKED, MASKED};
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int row = tile * OWN + row_of(i), key = j * OTHER + column_of(i);
            bool seen = key <= row && row < length;
            p[i] = seen ? p[i] * scale + bias[(u64)head * shape.bias_length + row - key] * LOG2E : MASKED;
            most[i / 2 % 2] = larger(p[i], most[i / 2 % 2]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float now = larger(quad_max(most[half]), top[half]), factor = exp2_approx(top[half] - now);
            top[half] = now;
            total[half] *= factor;
#pragma unroll
            for (int i = half * 2; i < D / 2; i += 4) sums[i] *= factor, sums[i + 1] *= factor;
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            p[i] = exp2_approx(p[i] - top[i / 2 % 2]);
            total[i / 2 % 2] += p[i];
        }
        u32 weights[4][4];
        round_weights(weights, p);
        wgmma_fence();
        add_weighted_rows(sums, weights, tv);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(sums);
        __syncthreads();  // both warpgroups are done with tile j
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = quad_sum(total[half]);
        int row = tile * OWN + row_of(half * 2);
        inverse[half] = 1.0f / sum;
        if (threadIdx.x % 4 == 0 && row < length) logs[(u64)blockIdx.y * length + row] = top[half] / LOG2E + logf(sum);
    }
    store_rows<D>(y + ((u64)(blockIdx.y / shape.heads) * length * shape.heads + head) * D, shape.heads * D, tile * OWN, length, queries, sums,
                  inverse[0], inverse[1]);
}

#define ATTENTION(D)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_wgmma_##D(                                            \
        bf16 *y, float *logs, const bf16 *qkv, const float *bias, int length, int heads, int kv_heads, int bias_length) { \
        forward<D>(y, logs, qkv, bias, {length, heads, kv_heads, bias_length});                                           \
    }

ATTENTION(64)
ATTENTION(128)
