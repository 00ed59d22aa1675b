// The gradient of causal attention by `wgmma` (sm_90a): as `backward_keys` and `backward_queries` of attention.cu, with the
// same arguments, results and order of sums, so no atomics. Blocks have 128 keys or queries, 64 for each of two warpgroups;
// weights and their slopes stay in registers between products.
#include "attention_tiles.cuh"

// Block (i, b * kv_heads + kv): dk and dv of tile i of keys, over all queries from it on, of each head of the group.
template <int D>
DEVICE void backward_keys(bf16 *dqkv, const bf16 *dy, const float *logs, const float *delta, const bf16 *qkv, const float *bias,
                          const Shape &shape) {
    extern __shared__ __align__(1024) u8 memory[];
    const int BYTES = OTHER * D * 2;
    u32 keys = shared_address(memory), values = keys + OWN * D * 2, stages = values + OWN * D * 2;
    int length = shape.length, stride = shape.width(D), tile = blockIdx.x;
    int kv = blockIdx.y % shape.kv_heads, sequence = blockIdx.y / shape.kv_heads, group = shape.heads / shape.kv_heads;
    int before = tile * (OWN / OTHER), each = (length + OTHER - 1) / OTHER - before, steps = each * group;
    u64 first = (u64)sequence * length * stride, own = first + (shape.heads + kv) * D;
    auto load = [&](int step) {
        if (step < steps) {
            int head = kv * group + step / each, query = (before + step % each) * OTHER;
            load_rows<D, OTHER>(stages + step % 2 * 2 * BYTES, qkv + first + head * D, stride, query, length);
            load_rows<D, OTHER>(stages + (step % 2 * 2 + 1) * BYTES, dy + ((u64)sequence * length * shape.heads + head) * D, shape.heads * D,
                                query, length);
        }
        copy_async_commit();
    };
    load_rows<D, OWN>(keys, qkv + own, stride, tile * OWN, length);
    load_rows<D, OWN>(values, qkv + own + shape.kv_heads * D, stride, tile * OWN, length);
    load(0);
    float dk[D / 2] = {}, dv[D / 2] = {}, p[32] = {}, dp[32] = {}, root = rsqrtf((float)D);
    for (int step = 0; step < steps; step++) {
        load(step + 1);
        copy_async_wait<1>();
        fence_for_wgmma();
        __syncthreads();  // the queries and slopes of this step are there
        u32 queries = stages + step % 2 * 2 * BYTES, slopes = queries + BYTES;
        int head = kv * group + step / each, query0 = (before + step % each) * OTHER;
        const float *log = logs + ((u64)sequence * shape.heads + head) * length, *along = delta + (log - logs);
        wgmma_fence();
        rows_by_rows<D>(p, keys, queries);
        rows_by_rows<D>(dp, values, slopes);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(p);
        wgmma_done(dp);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int key = tile * OWN + row_of(i), query = query0 + column_of(i);
            bool seen = key <= query && query < length;
            float above = seen ? bias[(u64)head * shape.bias_length + query - key] - log[query] : 0.0f;
            p[i] = seen ? fast_exp(p[i] * root + above) : 0.0f;
            dp[i] = p[i] * (dp[i] - (query < length ? along[query] : 0.0f));
        }
        u32 weights[4][4], weight_slopes[4][4];
        round_weights(weights, p);
        round_weights(weight_slopes, dp);
        wgmma_fence();
        add_weighted_rows(dv, weights, slopes);
        add_weighted_rows(dk, weight_slopes, queries);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(dv);
        wgmma_done(dk);
        __syncthreads();  // both warpgroups are done with the stage
    }
    store_rows<D>(dqkv + own, stride, tile * OWN, length, keys, dk, root, root);
    store_rows<D>(dqkv + own + shape.kv_heads * D, stride, tile * OWN, length, values, dv, 1.0f, 1.0f);
}

// Block (i, b * heads + h): dq of the queries of tile gridDim.x - 1 - i, the longest first.
template <int D>
DEVICE void backward_queries(bf16 *dqkv, const bf16 *dy, const float *logs, const float *delta, const bf16 *qkv, const float *bias,
                             const Shape &shape) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 queries = shared_address(memory), slopes = queries + OWN * D * 2;
    int length = shape.length, stride = shape.width(D), tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y % shape.heads;
    u64 first = (u64)(blockIdx.y / shape.heads) * length * stride;
    SeenTiles<D> seen_tiles(qkv + first, shape, head, tile, slopes + OWN * D * 2);
    load_rows<D, OWN>(queries, qkv + first + head * D, stride, tile * OWN, length);
    load_rows<D, OWN>(slopes, dy + ((u64)(blockIdx.y / shape.heads) * length * shape.heads + head) * D, shape.heads * D, tile * OWN, length);
    seen_tiles.load(0);
    float dq[D / 2] = {}, p[32] = {}, dp[32] = {}, log[2], along[2], root = rsqrtf((float)D);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = tile * OWN + row_of(half * 2);
        log[half] = row < length ? logs[(u64)blockIdx.y * length + row] : 0.0f;
        along[half] = row < length ? delta[(u64)blockIdx.y * length + row] : 0.0f;
    }
    for (int j = 0; j < seen_tiles.count; j++) {
        seen_tiles.load(j + 1);
        copy_async_wait<1>();
        fence_for_wgmma();
        __syncthreads();  // tile j is there
        u32 tk = seen_tiles.at(j), tv = tk + seen_tiles.BYTES;
        wgmma_fence();
        rows_by_rows<D>(p, queries, tk);
        rows_by_rows<D>(dp, slopes, tv);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(p);
        wgmma_done(dp);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int row = tile * OWN + row_of(i), key = j * OTHER + column_of(i);
            bool seen = key <= row && row < length;
            float weight = seen ? fast_exp(p[i] * root + bias[(u64)head * shape.bias_length + row - key] - log[i / 2 % 2]) : 0.0f;
            dp[i] = weight * (dp[i] - along[i / 2 % 2]);
        }
        u32 weight_slopes[4][4];
        round_weights(weight_slopes, dp);
        wgmma_fence();
        add_weighted_rows(dq, weight_slopes, tk);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(dq);
        __syncthreads();  // both warpgroups are done with tile j
    }
    store_rows<D>(dqkv + first + head * D, stride, tile * OWN, length, queries, dq, root, root);
}

#define ATTENTION_GRAD(name, D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_wgmma_##name##_grad_##D(                                \
        bf16 *dqkv, const bf16 *dy, const float *logs, const float *delta, const bf16 *qkv, const float *bias, int length,  \
        int heads, int kv_heads, int bias_length) {                                                                         \
        backward_##name<D>(dqkv, dy, logs, delta, qkv, bias, {length, heads, kv_heads, bias_length});                       \
    }

ATTENTION_GRAD(keys, 64)
ATTENTION_GRAD(queries, 64)
ATTENTION_GRAD(keys, 128)
ATTENTION_GRAD(queries, 128)
