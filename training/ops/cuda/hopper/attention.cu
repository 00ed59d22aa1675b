// Causal attention forward by `wgmma` (sm_90a): as `forward` of attention.cu, with the same arguments and results, in tiles
// of 128 queries, 64 for each of two warpgroups, and 64 keys. The weights stay in registers between the two products.
#include "attention.cuh"
#include "wgmma.cuh"

#define QUERIES 128
#define KEYS 64
#define THREADS 256

// Tiles have the 128-byte swizzle, in blocks of 64 columns and ROWS rows.
template <int ROWS> DEVICE u32 place(u32 tile, int row, int chunk) {
    return tile + chunk / 8 * (ROWS * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

// Brings rows first to first + ROWS - 1 of a head; those from `rows` on are zeros.
template <int D, int ROWS> DEVICE void load_rows(u32 tile, const bf16 *head, int stride, int first, int rows) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * D / 8; i += THREADS) {
        int row = i / (D / 8), chunk = i % (D / 8);
        bool wanted = first + row < rows;
        copy_async_16(place<ROWS>(tile, row, chunk), head + (wanted ? (u64)(first + row) * stride + chunk * 8 : 0), wanted);
    }
}

// scores (64, 64) = queries times keys, both K-major, over D.
template <int D> DEVICE void score(float (&scores)[32], u32 queries, u32 keys) {
#pragma unroll
    for (int s = 0; s < D / 16; s++) {
        u64 a = describe(queries + s / 4 * (QUERIES * 128) + s % 4 * 32, 16), b = describe(keys + s / 4 * (KEYS * 128) + s % 4 * 32, 16);
        if (s == 0)
            WGMMA(scores, "m64n64k16", "bf16.bf16", 32, "%32, %33, 0, 1, 1, 0, 0;", "l"(a), "l"(b));
        else
            WGMMA(scores, "m64n64k16", "bf16.bf16", 32, "%32, %33, 1, 1, 1, 0, 0;", "l"(a), "l"(b));
    }
}

// sums (64, D) += 16 columns of weights, in registers, times 16 rows of values.
DEVICE void weigh(float (&sums)[32], const u32 (&a)[4], u64 values) {
    WGMMA(sums, "m64n64k16", "bf16.bf16", 32, "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values));
}
DEVICE void weigh(float (&sums)[64], const u32 (&a)[4], u64 values) {
    WGMMA(sums, "m64n128k16", "bf16.bf16", 64, "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values));
}

// Block (i, b * heads + h): the queries of tile gridDim.x - 1 - i, the longest first.
template <int D> DEVICE void forward(bf16 *y, float *logs, const bf16 *qkv, const float *bias, const Shape &shape) {
    extern __shared__ __align__(1024) u8 memory[];
    const int BYTES = KEYS * D * 2;
    u32 queries = shared_address(memory), stages = queries + QUERIES * D * 2;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = threadIdx.x / 128;
    int length = shape.length, stride = shape.width(D), tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y % shape.heads;
    u64 first = (u64)(blockIdx.y / shape.heads) * length * stride;
    const bf16 *keys = qkv + first + (shape.heads + head * shape.kv_heads / shape.heads) * D, *values = keys + shape.kv_heads * D;
    int last = tile * QUERIES + QUERIES < length ? tile * QUERIES + QUERIES : length, tiles = (last + KEYS - 1) / KEYS;
    auto load = [&](int j) {
        if (j < tiles) {
            load_rows<D, KEYS>(stages + j % 2 * 2 * BYTES, keys, stride, j * KEYS, length);
            load_rows<D, KEYS>(stages + (j % 2 * 2 + 1) * BYTES, values, stride, j * KEYS, length);
        }
        copy_async_commit();
    };
    load_rows<D, QUERIES>(queries, qkv + first + head * D, stride, tile * QUERIES, length);
    load(0);
    float sums[D / 2] = {}, p[32] = {}, top[2] = {MASKED, MASKED}, total[2] = {}, scale = rsqrtf((float)D) * LOG2E;
    int row0 = tile * QUERIES + warp * 16 + lane / 4;
    for (int j = 0; j < tiles; j++) {
        load(j + 1);
        copy_async_wait<1>();
        fence_for_wgmma();
        __syncthreads();  // tile j is there
        u32 tk = stages + j % 2 * 2 * BYTES, tv = tk + BYTES;
        wgmma_fence();
        score<D>(p, queries + group * 64 * 128, tk);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(p);
        float most[2] = {MASKED, MASKED};
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int row = row0 + i / 2 % 2 * 8, key = j * KEYS + i / 4 * 8 + lane % 4 * 2 + i % 2;
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
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) weights[s][i] = pack_bf16(p[s * 8 + i * 2], p[s * 8 + i * 2 + 1]);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) weigh(sums, weights[s], describe(tv + s * 2048, KEYS * 128));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_done(sums);
        __syncthreads();  // both warpgroups are done with tile j
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = quad_sum(total[half]), inverse = 1.0f / sum;
        int row = row0 + half * 8;
        if (lane % 4 == 0 && row < length) logs[(u64)blockIdx.y * length + row] = top[half] / LOG2E + logf(sum);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            store_shared(place<QUERIES>(queries, warp * 16 + half * 8 + lane / 4, n) + lane % 4 * 4,
                         pack_bf16(sums[n * 4 + half * 2] * inverse, sums[n * 4 + half * 2 + 1] * inverse));
    }
    __syncwarp();
    bf16 *out = y + ((u64)(blockIdx.y / shape.heads) * length * shape.heads + head) * D;
#pragma unroll
    for (int i = lane; i < 16 * D / 8; i += WARP) {
        int row = warp * 16 + i / (D / 8), chunk = i % (D / 8), at = tile * QUERIES + row;
        Words4 words = load_shared_16(place<QUERIES>(queries, row, chunk));
        if (at < length) *(Words4 *)(out + (u64)at * shape.heads * D + chunk * 8) = words;
    }
}

#define ATTENTION(D)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_wgmma_##D(                                            \
        bf16 *y, float *logs, const bf16 *qkv, const float *bias, int length, int heads, int kv_heads, int bias_length) { \
        forward<D>(y, logs, qkv, bias, {length, heads, kv_heads, bias_length});                                           \
    }

ATTENTION(64)
ATTENTION(128)
