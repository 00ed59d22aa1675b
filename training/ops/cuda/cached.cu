// Attention of new rows of one sequence over cached keys and values, for generation.
//
// qkv: (rows, 3 * heads * depth) bf16, as in attention.cu; keys, values: (heads, context, depth) bf16, of which `known`
// positions are filled. bias: (heads, context) float32 by the key's distance from the query.
#include "device.cuh"

#define WARPS 4
#define PER_LANE 8  // features of a lane: heads of up to 256
#define MASKED -1e30f

// One block a row: its keys and values go to position known + row.
KERNEL cache_rows(bf16 *keys, bf16 *values, const bf16 *qkv, int heads, int depth, int context, int known) {
    const bf16 *row = qkv + (u64)blockIdx.x * 3 * heads * depth;
    for (int i = threadIdx.x; i < heads * depth; i += blockDim.x) {
        u64 at = ((u64)(i / depth) * context + known + blockIdx.x) * depth + i % depth;
        keys[at] = row[heads * depth + i], values[at] = row[2 * heads * depth + i];
    }
}

// Block (row, head). Each warp has every fourth key, with a running maximum; their sums are joined in the warps' order.
KERNEL attention_cached(bf16 *y, const bf16 *qkv, const bf16 *keys, const bf16 *values, const float *bias, int heads,
                        int depth, int context, int known) {
    __shared__ float tops[WARPS], totals[WARPS], sums[WARPS][PER_LANE * WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x, head = blockIdx.y, last = known + row;
    const bf16 *query = qkv + ((u64)row * 3 * heads + head) * depth;
    keys += (u64)head * context * depth, values += (u64)head * context * depth;
    float q[PER_LANE], sum[PER_LANE], top = MASKED, total = 0.0f, scale = rsqrtf((float)depth);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int at = i * WARP + lane;
        q[i] = at < depth ? to_float(query[at]) * scale : 0.0f, sum[i] = 0.0f;
    }
    for (int key = warp; key <= last; key += WARPS) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int at = i * WARP + lane;
            if (at < depth) dot += q[i] * to_float(keys[(u64)key * depth + at]);
        }
        dot = warp_sum(dot) + bias[(u64)head * context + last - key];
        float most = larger(dot, top), fade = fast_exp(top - most), weight = fast_exp(dot - most);
        total = total * fade + weight, top = most;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int at = i * WARP + lane;
            if (at < depth) sum[i] = sum[i] * fade + weight * to_float(values[(u64)key * depth + at]);
        }
    }
    if (lane == 0) tops[warp] = top, totals[warp] = total;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sums[warp][i * WARP + lane] = sum[i];
    __syncthreads();
    float most = MASKED, whole = 0.0f;
    for (int w = 0; w < WARPS; w++) most = larger(tops[w], most);
    for (int w = 0; w < WARPS; w++) whole += totals[w] * fast_exp(tops[w] - most);
    for (int at = threadIdx.x; at < depth; at += blockDim.x) {
        float mixed = 0.0f;
        for (int w = 0; w < WARPS; w++) mixed += sums[w][at] * fast_exp(tops[w] - most);
        y[((u64)row * heads + head) * depth + at] = from_float<bf16>(mixed / whole);
    }
}
