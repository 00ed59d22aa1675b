// Tensor cores of sm_90a: `wgmma`, its descriptors, mbarriers and copies by the tensor memory accelerator.
#pragma once
#include "device.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// A wait names no registers: without this the compiler may read sums above it.
template <int N> DEVICE void wgmma_done(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
// What this thread has stored becomes visible to wgmma and to bulk copies.
DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of a tile with the 128-byte swizzle, from byte `at` on: 8 rows every 1,024 bytes; `leading` bytes lie
// between blocks of 64 columns of a tile whose outer index is contiguous, and mean nothing for other tiles.
DEVICE u64 describe(u32 at, u32 leading) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#define NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 NAMES_32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_128 NAMES_64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_32(d) SUMS_16(d, 0), SUMS_16(d, 16)
#define SUMS_64(d) SUMS_32(d), SUMS_16(d, 32), SUMS_16(d, 48)
#define SUMS_128(d) SUMS_64(d), SUMS_16(d, 64), SUMS_16(d, 80), SUMS_16(d, 96), SUMS_16(d, 112)

// Adds a product of (64, 2 * COUNT) to `sums`; `rest` has the operands that follow them, by number, and __VA_ARGS__ these.
#define WGMMA(sums, shape, types, COUNT, rest, ...)                                                \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types " {" NAMES_##COUNT "}, " rest \
                 : SUMS_##COUNT(sums)                                                              \
                 : __VA_ARGS__)

// ---- mbarriers, and tiles that the tensor memory accelerator brings

// What the host encodes by cuTensorMapEncodeTiled; an argument that is __grid_constant__.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// The barriers that this thread has made become visible to bulk copies.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase wait for so many bytes of bulk copies.
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity is complete.
DEVICE void barrier_wait(u32 barrier, int parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
}
// Brings the box of a matrix that begins at (row, column); what is outside the matrix is zeros.
DEVICE void copy_box(u32 to, const TensorMap &map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
