// Tiles of attention by `wgmma`, forward and backward: 128 rows of a block, 64 for each of two warpgroups, against 64 rows
// that change. All have the 128-byte swizzle, in blocks of 64 columns.
#pragma once
#include "attention.cuh"
#include "wgmma.cuh"

#define OWN 128
#define OTHER 64
#define THREADS 256

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

// The tiles of keys and values that a tile of queries sees, in two stages of shared memory. sequence: its packed rows.
template <int D> struct SeenTiles {
    enum { BYTES = OTHER * D * 2 };
    const bf16 *keys, *values;
    u32 stages;
    int stride, length, count;

    __device__ SeenTiles(const bf16 *sequence, const Shape &shape, int head, int tile, u32 stages)
        : keys(sequence + (shape.heads + head * shape.kv_heads / shape.heads) * D), values(keys + shape.kv_heads * D), stages(stages),
          stride(shape.width(D)), length(shape.length) {
        int last = tile * OWN + OWN < length ? tile * OWN + OWN : length;
        count = (last + OTHER - 1) / OTHER;
    }
    // Where the keys of tile j lie; its values are BYTES behind them.
    __device__ u32 at(int j) const { return stages + j % 2 * 2 * BYTES; }
    // Begins to bring tile j, if there is one.
    __device__ void load(int j) const {
        if (j < count) {
            load_rows<D, OTHER>(at(j), keys, stride, j * OTHER, length);
            load_rows<D, OTHER>(at(j) + BYTES, values, stride, j * OTHER, length);
        }
        copy_async_commit();
    }
};

// Where the 64 rows of this warpgroup begin in a tile of OWN rows.
DEVICE u32 own_rows(u32 tile) { return tile + threadIdx.x / 128 * 64 * 128; }

// sums (64, 64) = the rows of this warpgroup, of a tile of OWN, times those of a tile of OTHER, over D.
template <int D> DEVICE void rows_by_rows(float (&sums)[32], u32 own, u32 other) {
#pragma unroll
    for (int s = 0; s < D / 16; s++) {
        u64 a = describe(own_rows(own) + s / 4 * (OWN * 128) + s % 4 * 32, 16), b = describe(other + s / 4 * (OTHER * 128) + s % 4 * 32, 16);
        if (s == 0)
            WGMMA(sums, "m64n64k16", "bf16.bf16", 32, "%32, %33, 0, 1, 1, 0, 0;", "l"(a), "l"(b));
        else
            WGMMA(sums, "m64n64k16", "bf16.bf16", 32, "%32, %33, 1, 1, 1, 0, 0;", "l"(a), "l"(b));
    }
}

// sums (64, D) += 16 columns of weights, in registers, times 16 rows.
DEVICE void weigh(float (&sums)[32], const u32 (&a)[4], u64 rows) {
    WGMMA(sums, "m64n64k16", "bf16.bf16", 32, "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
DEVICE void weigh(float (&sums)[64], const u32 (&a)[4], u64 rows) {
    WGMMA(sums, "m64n128k16", "bf16.bf16", 64, "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
// Weights (64, 64) as operands of a product: rounded to bf16, where the sums of a product left them.
DEVICE void round_weights(u32 (&rounded)[4][4], const float (&weights)[32]) {
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) rounded[s][i] = pack_bf16(weights[s * 8 + i * 2], weights[s * 8 + i * 2 + 1]);
}
// sums (64, D) += weights (64, 64) times a tile of OTHER rows.
template <int N> DEVICE void add_weighted_rows(float (&sums)[N], const u32 (&weights)[4][4], u32 other) {
#pragma unroll
    for (int s = 0; s < 4; s++) weigh(sums, weights[s], describe(other + s * 2048, OTHER * 128));
}

// Of element i of sums (64, 64): its row in a tile of OWN rows, and its column.
DEVICE int row_of(int i) { return threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + i / 2 % 2 * 8; }
DEVICE int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Writes 16 rows a warp, times low and high in halves of 8, through those of a tile of OWN rows that only this warp uses.
template <int D>
DEVICE void store_rows(bf16 *head, int stride, int first, int rows, u32 tile, const float (&sums)[D / 2], float low, float high) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float factor = half ? high : low;
            store_shared(place<OWN>(tile, warp * 16 + half * 8 + lane / 4, n) + lane % 4 * 4,
                         pack_bf16(sums[n * 4 + half * 2] * factor, sums[n * 4 + half * 2 + 1] * factor));
        }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * D / 8; i += WARP) {
        int row = warp * 16 + i / (D / 8), chunk = i % (D / 8);
        Words4 words = load_shared_16(place<OWN>(tile, row, chunk));
        if (first + row < rows) *(Words4 *)(head + (u64)(first + row) * stride + chunk * 8) = words;
    }
}
