// Matrix products of bf16 by `wgmma` (sm_90a), with float32 sums. Tiles of 128 x 256 x 64, two warpgroups of 64 x 256, 4
// stages of cp.async. Leading dimensions are multiples of 8 elements; edges are filled with zeros.
#include "epilogue.cuh"

#define ROWS 128
#define COLUMNS 256
#define DEPTH 64
#define STAGES 4
#define STAGE_BYTES ((ROWS + COLUMNS) * DEPTH * 2)

// d (64, 256) += a b, for the tiles of 16 columns and rows that the descriptors name. TA, TB: a is (k, m), b is (n, k).
template <bool TA, bool TB> DEVICE void wgmma_256(float (&d)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
                 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
                 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
                 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
                 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
                 "%128, %129, 1, 1, 1, %130, %131;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
                   "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                   "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
                   "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
                   "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                   "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
                   "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
                   "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                   "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
                 : "l"(a), "l"(b), "n"(TA), "n"(!TB));
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// What this thread has stored becomes visible to wgmma.
DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Tiles have the 128-byte swizzle. TRANSPOSED: the outer index is contiguous, in blocks of 64 columns and DEPTH rows.
template <bool TRANSPOSED> DEVICE u32 place(u32 tile, int row, int chunk) {
    if (TRANSPOSED) tile += chunk / 8 * (DEPTH * 128);
    return tile + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}
// The descriptor of a tile's part that begins at byte `at`: 8 rows every 1,024 bytes, blocks of columns every DEPTH * 128.
DEVICE u64 describe(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(DEPTH * 128 >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// As in matmul.cu, for OUTER rows of a or columns of b.
template <int OUTER, bool TRANSPOSED>
DEVICE void load_tile(u32 tile, const bf16 *matrix, int outer, int inner, int outers, int inners) {
#pragma unroll
    for (int i = threadIdx.x; i < OUTER * DEPTH / 8; i += 256) {
        int row = TRANSPOSED ? i / (OUTER / 8) : i / (DEPTH / 8), chunk = TRANSPOSED ? i % (OUTER / 8) : i % (DEPTH / 8);
        int y = (TRANSPOSED ? inner : outer) + row, x = (TRANSPOSED ? outer : inner) + chunk * 8;
        int rows = TRANSPOSED ? inners : outers, columns = TRANSPOSED ? outers : inners;
        bool wanted = y < rows && x < columns;
        copy_async_16(place<TRANSPOSED>(tile, row, chunk), matrix + (wanted ? (u64)y * columns + x : 0), wanted);
    }
}

// c (m, n) = a b. a is (m, k), or (k, m) if TA; b is (k, n), or (n, k) if TB.
template <bool TA, bool TB, typename T>
DEVICE void multiply(T *c, const bf16 *a, const bf16 *b, int m, int n, int k, const Epilogue &end) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 tiles = shared_address(memory);
    int group = threadIdx.x / 128, row0 = blockIdx.y * ROWS, column0 = blockIdx.x * COLUMNS;
    int steps = (k + DEPTH - 1) / DEPTH;
    auto load = [&](int step) {
        u32 at = tiles + step % STAGES * STAGE_BYTES;
        if (step < steps) {
            load_tile<ROWS, TA>(at, a, row0, step * DEPTH, m, k);
            load_tile<COLUMNS, !TB>(at + ROWS * DEPTH * 2, b, column0, step * DEPTH, n, k);
        }
        copy_async_commit();
    };
    float sums[128] = {};
    for (int step = 0; step < STAGES - 2; step++) load(step);
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 3>();
        fence_for_wgmma();
        __syncthreads();  // tile `step` is there, and both warpgroups have ended the products of step - 2
        u32 ta = tiles + step % STAGES * STAGE_BYTES, tb = ta + ROWS * DEPTH * 2;
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < DEPTH / 16; s++)
            wgmma_256<TA, TB>(sums, describe(ta + group * 64 * 128 + s * (TA ? 2048 : 32)), describe(tb + s * (TB ? 32 : 2048)));
        wgmma_commit();
        load(step + STAGES - 2);  // where the tile of step - 2 was
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    // A wait names no registers: without this the compiler may read sums above it.
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+f"(sums[i])::"memory");
    copy_async_wait<0>();
    __syncthreads();
    float *staged = (float *)memory;
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 128; i += 2)
        *(Words2 *)staged_pair<COLUMNS>(staged, row + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2) = {__float_as_uint(sums[i]),
                                                                                              __float_as_uint(sums[i + 1])};
    __syncthreads();
    write_tile<T, ROWS, COLUMNS>(c, staged, row0, column0, m, n, end);
}

PRODUCTS(wgmma)
