"""Faults that are planted in small kernels are found, and the same kernels without them pass."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices.ptx_programs import compiled

from zbmd.tools.lab import ptx

RING = """
__device__ void init(u64 *b, u32 n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(n) : "memory");
}
__device__ void expect(u64 *b, u32 n) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(b)), "r"(n) : "memory");
}
__device__ void arrive(u64 *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ void wait(u64 *b, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2;"
                     "selp.u32 %0, 1, 0, q; }"
                     : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
}
__device__ void bulk(void *to, const void *from, u32 n, u64 *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(n), "r"(shared_address(b)) : "memory");
}
KERNEL k(float *y, const float *x, int n) {  // 32 threads bring tiles of 64 floats, 64 threads add them up
    __shared__ alignas(128) float ring[2][64];
    __shared__ u64 full[2], empty[2];
    int tid = threadIdx.x;
    if (tid == 0)
        for (int s = 0; s < 2; s++) init(&full[s], 1), init(&empty[s], 2);
    if (FAULT != 5) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (FAULT != 6) __syncthreads();
    x += blockIdx.x * n, y += blockIdx.x * 64;
    if (tid >= 64) {
        if (tid == 64)
            for (int t = 0; t < n / 64; t++) {
                if (t >= 2 && FAULT != 2) wait(&empty[t & 1], (t / 2 - 1) & 1);
                expect(&full[t & 1], FAULT == 3 ? 512 : 256);
                bulk(ring[t & 1], x + t * 64, 256, &full[t & 1]);
            }
        return;
    }
    float sum = 0;
    for (int t = 0; t < n / 64; t++) {
        wait(&full[t & 1], t / 2 & 1);
        if (FAULT == 1) { __syncwarp(); if (tid % 32 == 0) arrive(&empty[t & 1]); }
        sum += ring[t & 1][tid];
        if (FAULT != 1) { __syncwarp(); if (tid % 32 == 0 && FAULT != 4) arrive(&empty[t & 1]); }
    }
    y[tid] = sum;
}
"""
TILES = """
KERNEL k(float *y, const float *x, int n) {  // two stages of copies, each thread's element seen by another
    __shared__ alignas(16) float tile[2][256];
    int tid = threadIdx.x;
    auto load = [&](int t) {
        const float *from = x + blockIdx.x * n + t * 256 + tid * 4;
        if (t < n / 256) copy_async_16(shared_address(&tile[t & 1][tid * 4]), from, true);
        copy_async_commit();
    };
    float sum = 0;
    load(0);
    for (int t = 0; t < n / 256; t++) {
        load(t + 1);
        copy_async_wait<FAULT == 1 ? 2 : 1>();
        if (FAULT != 2) __syncthreads();
        sum += tile[t & 1][255 - tid];
        if (FAULT != 3) __syncthreads();
    }
    y[blockIdx.x * 64 + tid] = sum;
}
"""
REVERSED = """
KERNEL k(float *y, const float *x, int n) {
    __shared__ float tile[64];
    int tid = threadIdx.x, i = blockIdx.x * n + tid;
    tile[tid] = x[FAULT == 6 ? i + 64 : i];
    if (FAULT != 3) __syncthreads();
    if (FAULT == 4) tile[0] = 1;
    y[FAULT == 5 ? tid : FAULT == 8 ? i + 1 : i] = tile[63 - tid];
    if (FAULT == 2 && tid < 32) __syncthreads();
}
"""
WARPS = """
KERNEL k(float *y, const float *x, int n) {
    __shared__ float tile[64];
    int tid = threadIdx.x, i = blockIdx.x * n + tid;
    tile[tid] = x[i];
    if (FAULT != 1) __syncwarp();
    float z = tile[tid ^ (FAULT == 2 ? 32 : 1)];
    if (FAULT == 3) { if (tid % 32 < 16) z = warp_sum(z); }
    y[i] = z;
}
"""
GLOBAL = """
KERNEL k(float *y, float *x, int n) {
    int tid = threadIdx.x, i = blockIdx.x * n + tid;
    y[i] = x[i];
    if (FAULT == 1) y[(i + 64) % 128] = 1;
    if (FAULT == 2) x[(i + 64) % 128] = 1;
    __syncthreads();
    y[i] = FAULT == 3 ? y[i ^ 1] : x[i];
}
"""
NAMED = """
KERNEL k(float *y, const float *x, int n) {  // the second warp waits for the first, which goes on
    __shared__ float tile[64];
    int tid = threadIdx.x, i = blockIdx.x * n + tid;
    tile[tid] = x[i];
    if (tid < 32) {
        if (FAULT == 2) tile[tid] = 0;
        asm volatile("bar.arrive 1, 64;" ::: "memory");
        y[i] = FAULT == 1 ? tile[tid + 32] : tile[tid];
    } else {
        if (FAULT != 3) asm volatile("bar.sync 1, 64;" ::: "memory");
        y[i] = tile[tid - 32] + tile[tid];
    }
}
"""


CASES: dict[str, tuple[str, dict[int, tuple[type[ptx.PtxError], str]], int, int]] = {
    "reversed": (
        REVERSED,
        {
            3: (
                ptx.RaceFound,
                "the read by thread 0 of block 0 and an earlier write by thread 63 have no order",
            ),
            2: (ptx.Deadlock, "wait for what no thread does"),
            4: (ptx.RaceFound, "two threads write one place of shared memory at once"),
            5: (ptx.RaceFound, "two threads write one place of k_param_0 at once"),
            6: (ptx.MemoryFault, r"thread 0 of block 1: byte 512 is outside k_param_1, of 512 bytes"),
            8: (ptx.MemoryFault, "byte 512 is outside k_param_0"),
        },
        64,
        64,
    ),
    "tiles": (
        TILES,
        {
            1: (ptx.RaceFound, "reads shared memory that an asynchronous copy is still writing"),
            2: (ptx.RaceFound, "asynchronous copy is still writing|have no order"),
            3: (ptx.RaceFound, "the write by .* and an earlier read by .* have no order"),
        },
        64,
        1024,
    ),
    "ring": (
        RING,
        {
            1: (ptx.RaceFound, "no order|still writing"),
            2: (ptx.RaceFound, "no order|still writing"),
            3: (ptx.Deadlock, "wait for what no thread does"),
            4: (ptx.Deadlock, "wait for what no thread does"),
            5: (ptx.RaceFound, "has executed no fence.mbarrier_init"),
            6: (ptx.RaceFound, "its making by thread 0 has no order"),
        },
        96,
        448,
    ),
    "warps": (
        WARPS,
        {
            1: (ptx.RaceFound, "no order"),
            2: (ptx.RaceFound, "no order|two threads"),
            3: (ptx.DivergentThreads, r"the mask is 0xffffffff, and the lanes 0xffff execute it"),
        },
        64,
        64,
    ),
    "global": (
        GLOBAL,
        {
            1: (ptx.RaceFound, "k_param_0: the write by .* and an earlier write by .* have no order"),
            2: (ptx.RaceFound, "k_param_1: a write and another thread's earlier read have no order"),
            3: (ptx.RaceFound, "k_param_0"),
        },
        64,
        64,
    ),
    "named": (
        NAMED,
        {
            1: (ptx.RaceFound, "the read by thread 0 .* earlier write by thread 32|earlier read by thread 0"),
            3: (ptx.RaceFound, "no order"),
        },
        64,
        64,
    ),
}


def _run(name: str, fault: int) -> None:
    source, _, block, n = CASES[name]
    architecture = "sm_90a" if name == "ring" else "sm_80"
    kernel = compiled(f'#include "device.cuh"\n#define FAULT {fault}\n{source}', "k", architecture)
    x = np.random.default_rng(1).standard_normal((2, n)).astype(np.float32)
    y = np.zeros((2, 64), np.float32)
    expected = {
        "reversed": lambda: x[:, ::-1],
        "tiles": lambda: x.reshape(2, -1, 256)[:, :, ::-1][:, :, :64].sum(1),
        "ring": lambda: x.reshape(2, -1, 64).sum(1),
        "warps": lambda: x.reshape(2, -1, 2)[:, :, ::-1].reshape(2, -1),
        "global": lambda: x.copy(),
        "named": lambda: np.concatenate([x[:, :32], x[:, :32] + x[:, 32:]], axis=1),
    }[name]()
    arguments: list[ptx.Buffer | int] = [ptx.Buffer(y, initialised=False), ptx.Buffer(x), n]
    ptx.launch(kernel, grid=2, block=block, arguments=arguments)  # type: ignore[arg-type]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found(name: str) -> None:
    _run(name, 0)
    for fault, (error, message) in CASES[name][1].items():
        with pytest.raises(error, match=message) as found:
            _run(name, fault)
        assert ", line " in str(found.value), "the message names the source line"


def test_memory_that_nothing_wrote_is_not_read() -> None:
    source = "KERNEL k(float *y, const float *x, int n) { y[threadIdx.x] = x[threadIdx.x]; }"
    kernel = compiled('#include "device.cuh"\n' + source, "k")
    y, x = np.zeros(32, np.float32), np.zeros(32, np.float32)
    with pytest.raises(ptx.UninitialisedRead, match="thread 0 of block 0 reads memory of k_param_1"):
        ptx.launch(kernel, grid=1, block=32, arguments=[ptx.Buffer(y), ptx.Buffer(x, initialised=False), 0])
    with pytest.raises(ptx.MemoryFault, match="writes to k_param_0, which is read-only"):
        ptx.launch(kernel, grid=1, block=32, arguments=[ptx.Buffer(y, writable=False), ptx.Buffer(x), 0])
    shared = (
        "KERNEL k(float *y, int n) { __shared__ float t[32]; if (n) t[threadIdx.x] = 1;"
        "__syncthreads(); y[threadIdx.x] = t[31 - threadIdx.x]; }"
    )
    with pytest.raises(ptx.UninitialisedRead, match="reads shared memory that nothing has written"):
        ptx.launch(
            compiled('#include "device.cuh"\n' + shared, "k"), grid=1, block=32, arguments=[ptx.Buffer(y), 0]
        )


def test_a_register_that_nothing_wrote_is_not_read() -> None:
    kernel = ptx.parse(
        ".version 9.0\n.target sm_80\n.visible .entry k(.param .u64 y)\n{ .reg .b32 %a<2>; .reg .b64 %at;"
        "ld.param.u64 %at, [y]; add.s32 %a1, %a0, 1; st.global.u32 [%at], %a1; ret; }"
    )["k"]
    with pytest.raises(ptx.UninitialisedRead, match="%a0 is read, and nothing has written it"):
        ptx.launch(kernel, grid=1, block=32, arguments=[ptx.Buffer(np.zeros(1, np.uint32))])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frobnicate.u32 %a, %a;", "does not know this form of frobnicate"),
        ("add.ftz.f32 %a, %a, %a;", "does not know this form of add"),
        ("add.u32 %a, %z, 1;", "unknown operand '%z'"),
        (".wondrous 3;", "unknown directive"),
        ("add.u32 %a, [%a, 3;", "unknown operand|unknown address"),
    ],
)
def test_what_is_unknown_is_an_error(body: str, message: str) -> None:
    text = f".version 9.0\n.target sm_80\n.visible .entry k(.param .u32 n)\n{{ .reg .b32 %a; {body} ret; }}"
    with pytest.raises(ptx.PtxSyntaxError, match=message):
        ptx.launch(ptx.parse(text)["k"], grid=1, block=32, arguments=[1])
