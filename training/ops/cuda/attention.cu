// Causal attention with a bias by distance, in tiles of 64 queries and 64 keys, forward and backward; nothing of size
// (T, T) is stored, and no atomics: the same inputs give the same bits.
//
// qkv, dqkv: (batch * T, (heads + 2 kv_heads) * D) bf16, each row holding the queries of all heads, then keys, then
// values; head h uses keys and values of head h * kv_heads / heads. y, dy: (batch * T, heads * D). logs, delta: (batch,
// heads, T) float32. bias: (heads, bias_length) float32 by the key's distance from the query; bias_length >= T.
#include "attention.cuh"

#define TILE 64
#define THREADS 128

// Piece `chunk` of 8 elements of a row of a tile, swizzled so that 8 rows are in different banks.
template <int D> DEVICE u32 place(u32 tile, int row, int chunk) { return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4); }

// Brings rows first to first + 63 of a head; those from `rows` on are zeros.
template <int D, int THREADS_OF_BLOCK> DEVICE void load_rows(u32 tile, const bf16 *head, int stride, int first, int rows) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE * D / 8; i += THREADS_OF_BLOCK) {
        int row = i / (D / 8), chunk = i % (D / 8);
        bool wanted = first + row < rows;
        copy_async_16(place<D>(tile, row, chunk), head + (wanted ? (u64)(first + row) * stride + chunk * 8 : 0), wanted);
    }
}

// sums (16 rows of this warp, 64) = rows of `left` times 64 rows of `right`, over D.
template <int D> DEVICE void rows_by_rows(float (&sums)[8][4], u32 left, u32 right) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[n][e] = 0.0f;
#pragma unroll
    for (int s = 0; s < D / 16; s++) {
        u32 a[4];
        load_matrices(a, place<D>(left, warp * 16 + lane % 16, s * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 b[4];
            load_matrices(b, place<D>(right, n * 16 + (lane & 7) + lane / 16 * 8, s * 2 + lane / 8 % 2));
            mma_bf16(sums[2 * n], a, b[0], b[1]);
            mma_bf16(sums[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// sums (16 rows of this warp, C) += weights (16, 64), rounded to bf16, times C columns, from piece `chunk` on, of 64
// rows of `right`.
template <int D, int C>
DEVICE void add_weighted_rows(float (&sums)[C / 8][4], const float (&weights)[8][4], u32 right, int chunk) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        u32 a[4] = {pack_bf16(weights[2 * s][0], weights[2 * s][1]), pack_bf16(weights[2 * s][2], weights[2 * s][3]),
                    pack_bf16(weights[2 * s + 1][0], weights[2 * s + 1][1]),
                    pack_bf16(weights[2 * s + 1][2], weights[2 * s + 1][3])};
#pragma unroll
        for (int n = 0; n < C / 16; n++) {
            u32 b[4];
            load_matrices_transposed(b, place<D>(right, s * 16 + lane % 16, chunk + n * 2 + lane / 16));
            mma_bf16(sums[2 * n], a, b[0], b[1]);
            mma_bf16(sums[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Writes 16 rows a warp, C columns of them from piece `column` on, through the part of `tile` that only this warp uses.
template <int D, int C>
DEVICE void store_rows(bf16 *head, int stride, int first, int rows, u32 tile, const float (&sums)[C / 8][4], float low,
                       float high, int column) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    __syncwarp();  // the tile may still be read, by lanes of this warp
#pragma unroll
    for (int n = 0; n < C / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor = half ? high : low;
            store_shared(place<D>(tile, warp * 16 + half * 8 + lane / 4, column + n) + lane % 4 * 4,
                         pack_bf16(sums[n][half * 2] * factor, sums[n][half * 2 + 1] * factor));
        }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * C / 8; i += WARP) {
        int row = warp * 16 + i / (C / 8), chunk = column + i % (C / 8);
        Words4 words = load_shared_16(place<D>(tile, row, chunk));
        if (first + row < rows) *(Words4 *)(head + (u64)(first + row) * stride + chunk * 8) = words;
    }
}

// The block of a tile of queries: block (i, b * heads + h) has tile gridDim.x - 1 - i, the longest first. It brings the
// tiles of keys and values up to its own into two stages, one after the other.
template <int D> struct QueryBlock {
    static const int BYTES = TILE * D * 2;
    int length, stride, tile, head;
    u64 first, out;  // where the sequence begins in qkv, and the head of the sequence in y
    const bf16 *keys, *values, *queries;
    u32 stages;

    __device__ __forceinline__ QueryBlock(const bf16 *qkv, const Shape &shape, u32 stages)
        : length(shape.length), stride(shape.width(D)), tile(gridDim.x - 1 - blockIdx.x), head(blockIdx.y % shape.heads),
          first((u64)(blockIdx.y / shape.heads) * length * stride),
          out(((u64)(blockIdx.y / shape.heads) * length * shape.heads + head) * D),
          keys(qkv + first + (shape.heads + head * shape.kv_heads / shape.heads) * D),
          values(keys + shape.kv_heads * D), queries(qkv + first + head * D), stages(stages) {}

    __device__ __forceinline__ void load(int j) const {
        if (j <= tile) {
            load_rows<D, THREADS>(stages + j % 2 * 2 * BYTES, keys, stride, j * TILE, length);
            load_rows<D, THREADS>(stages + (j % 2 * 2 + 1) * BYTES, values, stride, j * TILE, length);
        }
        copy_async_commit();
    }
};

// Block (i, b * heads + h): the queries of tile gridDim.x - 1 - i, the longest first.
template <int D>
DEVICE void forward(bf16 *y, float *logs, const bf16 *qkv, const float *bias, const Shape &shape) {
    extern __shared__ __align__(128) u8 memory[];
    const int BYTES = TILE * D * 2;
    u32 queries = shared_address(memory), stages = queries + BYTES;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    QueryBlock<D> block(qkv, shape, stages);
    int length = block.length, tile = block.tile, head = block.head;
    load_rows<D, THREADS>(queries, block.queries, block.stride, tile * TILE, length);
    block.load(0);
    float sums[D / 8][4] = {}, top[2] = {MASKED, MASKED}, total[2] = {};
    float scale = rsqrtf((float)D) * LOG2E;
    int row0 = tile * TILE + warp * 16 + lane / 4;
    for (int j = 0; j <= tile; j++) {
        block.load(j + 1);
        copy_async_wait<1>();
        __syncthreads();
        float p[8][4], most[2] = {MASKED, MASKED};
        rows_by_rows<D>(p, queries, stages + j % 2 * 2 * BYTES);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = row0 + e / 2 * 8, key = j * TILE + n * 8 + lane % 4 * 2 + e % 2;
                bool seen = key <= row && row < length;
                p[n][e] = seen ? p[n][e] * scale + bias[(u64)head * shape.bias_length + row - key] * LOG2E : MASKED;
                most[e / 2] = larger(p[n][e], most[e / 2]);
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float now = larger(quad_max(most[half]), top[half]), factor = exp2_approx(top[half] - now);
            top[half] = now;
            total[half] *= factor;
#pragma unroll
            for (int n = 0; n < D / 8; n++) sums[n][half * 2] *= factor, sums[n][half * 2 + 1] *= factor;
        }
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[n][e] = exp2_approx(p[n][e] - top[e / 2]);
                total[e / 2] += p[n][e];
            }
        add_weighted_rows<D, D>(sums, p, stages + (j % 2 * 2 + 1) * BYTES, 0);
        __syncthreads();
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = quad_sum(total[half]);
        inverse[half] = 1.0f / sum;
        int row = row0 + half * 8;
        if (lane % 4 == 0 && row < length)
            logs[(u64)blockIdx.y * length + row] = top[half] / LOG2E + logf(sum);
    }
    store_rows<D, D>(y + block.out, shape.heads * D, tile * TILE, length, queries,
                     sums, inverse[0], inverse[1], 0);
}

// One warp a row and head: delta = the sum of dy * y.
template <int D> DEVICE void products_along(float *delta, const bf16 *dy, const bf16 *y, const Shape &shape, int rows) {
    int lane = threadIdx.x % WARP, number = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    int row = number / shape.heads, head = number % shape.heads;
    if (row >= rows) return;
    u64 at = (u64)row * shape.heads * D + head * D;
    float sum = 0.0f;
#pragma unroll
    for (int i = lane * 2; i < D; i += 2 * WARP) {
        u32 a = *(const u32 *)(dy + at + i), b = *(const u32 *)(y + at + i);
        sum += to_float((bf16)a) * to_float((bf16)b) + to_float((bf16)(a >> 16)) * to_float((bf16)(b >> 16));
    }
    sum = warp_sum(sum);
    if (lane == 0)
        delta[((u64)(row / shape.length) * shape.heads + head) * shape.length + row % shape.length] = sum;
}

// Block (i, b * kv_heads + kv): dk and dv of tile i of keys, over all queries from it on, of each head of the group. Four
// warps have the 64 keys, and each further four of them another 64 columns of dk and dv, so that all fits registers.
template <int D>
DEVICE void backward_keys(bf16 *dqkv, const bf16 *dy, const float *logs, const float *delta, const bf16 *qkv,
                          const float *bias, const Shape &shape) {
    extern __shared__ __align__(128) u8 memory[];
    const int BYTES = TILE * D * 2;
    u32 keys = shared_address(memory), values = keys + BYTES, stages = values + BYTES;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, length = shape.length, stride = shape.width(D);
    int tile = blockIdx.x, kv = blockIdx.y % shape.kv_heads, sequence = blockIdx.y / shape.kv_heads;
    int group = shape.heads / shape.kv_heads, tiles = (length + TILE - 1) / TILE, each = tiles - tile;
    u64 first = (u64)sequence * length * stride + (shape.heads + kv) * D;
    auto load = [&](int step) {
        if (step < each * group) {
            int head = kv * group + step / each, query = (tile + step % each) * TILE;
            load_rows<D, 2 * D>(stages + step % 2 * 2 * BYTES, qkv + (u64)sequence * length * stride + head * D, stride, query, length);
            load_rows<D, 2 * D>(stages + (step % 2 * 2 + 1) * BYTES, dy + ((u64)sequence * length * shape.heads + head) * D,
                         shape.heads * D, query, length);
        }
        copy_async_commit();
    };
    load_rows<D, 2 * D>(keys, qkv + first, stride, tile * TILE, length);
    load_rows<D, 2 * D>(values, qkv + first + shape.kv_heads * D, stride, tile * TILE, length);
    load(0);
    float dk[8][4] = {}, dv[8][4] = {};
    int column = threadIdx.x / THREADS * 8;
    float root = rsqrtf((float)D);
    for (int step = 0; step < each * group; step++) {
        load(step + 1);
        copy_async_wait<1>();
        __syncthreads();
        u32 queries = stages + step % 2 * 2 * BYTES, slopes = queries + BYTES;
        int head = kv * group + step / each, query0 = (tile + step % each) * TILE;
        u64 at = ((u64)sequence * shape.heads + head) * length;
        float p[8][4], dp[8][4];
        rows_by_rows<D>(p, keys, queries);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int key = tile * TILE + warp * 16 + lane / 4 + e / 2 * 8;
                int query = query0 + n * 8 + lane % 4 * 2 + e % 2;
                bool seen = key <= query && query < length;
                float above = seen ? bias[(u64)head * shape.bias_length + query - key] - logs[at + query] : 0.0f;
                p[n][e] = seen ? fast_exp(p[n][e] * root + above) : 0.0f;
            }
        add_weighted_rows<D, 64>(dv, p, slopes, column);
        rows_by_rows<D>(dp, values, slopes);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int query = query0 + n * 8 + lane % 4 * 2 + e % 2;
                dp[n][e] = p[n][e] * (dp[n][e] - (query < length ? delta[at + query] : 0.0f));
            }
        add_weighted_rows<D, 64>(dk, dp, queries, column);
        __syncthreads();
    }
    store_rows<D, 64>(dqkv + first, stride, tile * TILE, length, keys, dk, root, root, column);
    store_rows<D, 64>(dqkv + first + shape.kv_heads * D, stride, tile * TILE, length, values, dv, 1.0f,
                      1.0f, column);
}

// Block (i, b * heads + h): dq of the queries of tile gridDim.x - 1 - i.
template <int D>
DEVICE void backward_queries(bf16 *dqkv, const bf16 *dy, const float *logs, const float *delta, const bf16 *qkv,
                             const float *bias, const Shape &shape) {
    extern __shared__ __align__(128) u8 memory[];
    const int BYTES = TILE * D * 2;
    u32 queries = shared_address(memory), slopes = queries + BYTES, stages = slopes + BYTES;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    QueryBlock<D> block(qkv, shape, stages);
    int length = block.length, tile = block.tile, head = block.head;
    load_rows<D, THREADS>(queries, block.queries, block.stride, tile * TILE, length);
    load_rows<D, THREADS>(slopes, dy + block.out, shape.heads * D, tile * TILE, length);
    block.load(0);
    float dq[D / 8][4] = {}, log[2], along[2], root = rsqrtf((float)D);
    int row0 = tile * TILE + warp * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row0 + half * 8;
        log[half] = row < length ? logs[(u64)blockIdx.y * length + row] : 0.0f;
        along[half] = row < length ? delta[(u64)blockIdx.y * length + row] : 0.0f;
    }
    for (int j = 0; j <= tile; j++) {
        block.load(j + 1);
        copy_async_wait<1>();
        __syncthreads();
        u32 tk = stages + j % 2 * 2 * BYTES, tv = tk + BYTES;
        float p[8][4], dp[8][4];
        rows_by_rows<D>(p, queries, tk);
        rows_by_rows<D>(dp, slopes, tv);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = row0 + e / 2 * 8, key = j * TILE + n * 8 + lane % 4 * 2 + e % 2;
                bool seen = key <= row && row < length;
                float weight = seen ? fast_exp(p[n][e] * root + bias[(u64)head * shape.bias_length + row - key] - log[e / 2]) : 0.0f;
                dp[n][e] = weight * (dp[n][e] - along[e / 2]);
            }
        add_weighted_rows<D, D>(dq, dp, tk, 0);
        __syncthreads();
    }
    store_rows<D, D>(dqkv + block.first + head * D, block.stride, tile * TILE, length, queries, dq,
                     root, root, 0);
}

#define ATTENTION_KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define ATTENTION(D)                                                                                                   \
    ATTENTION_KERNEL attention_##D(bf16 *y, float *logs, const bf16 *qkv, const float *bias, int length, int heads,    \
                                   int kv_heads, int bias_length) {                                                    \
        forward<D>(y, logs, qkv, bias, {length, heads, kv_heads, bias_length});                                        \
    }                                                                                                                  \
    ATTENTION_KERNEL attention_delta_##D(float *delta, const bf16 *dy, const bf16 *y, int length, int heads,           \
                                         int rows) {                                                                   \
        products_along<D>(delta, dy, y, {length, heads, 0, 0}, rows);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(2 * D) attention_keys_grad_##D(bf16 *dqkv, const bf16 *dy, const float *logs, const float *delta,        \
                                             const bf16 *qkv, const float *bias, int length, int heads, int kv_heads,  \
                                             int bias_length) {                                                        \
        backward_keys<D>(dqkv, dy, logs, delta, qkv, bias, {length, heads, kv_heads, bias_length});                    \
    }                                                                                                                  \
    ATTENTION_KERNEL attention_queries_grad_##D(bf16 *dqkv, const bf16 *dy, const float *logs, const float *delta,     \
                                                const bf16 *qkv, const float *bias, int length, int heads,             \
                                                int kv_heads, int bias_length) {                                       \
        backward_queries<D>(dqkv, dy, logs, delta, qkv, bias, {length, heads, kv_heads, bias_length});                 \
    }

ATTENTION(64)
ATTENTION(128)
