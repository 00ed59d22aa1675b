// What kernels use beyond plain C++: types, conversions, reductions, asynchronous copies and tensor cores.
// NVRTC has no headers built in, and none of NVIDIA's is needed.
#pragma once

typedef unsigned char u8;
typedef unsigned short bf16;  // the bits; arithmetic is done in float
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__
#define WARP 32
#define ALL_LANES 0xffffffffu

struct alignas(8) Words2 {
    u32 x, y;
};
struct alignas(16) Words4 {
    u32 x, y, z, w;
};

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x << 16); }

DEVICE u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <typename T> DEVICE T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return (bf16)pack_bf16(x, 0.0f); }

// 2**x, up to 2 units in the last place off.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float fast_exp(float x) { return exp2_approx(x * 1.4426950408889634f); }

// The tanh form of GELU is x times the logistic function of 2 sqrt(2 / pi) (x + 0.044715 x**3).
#define GELU_SCALE 1.59576912160573081145f
#define GELU_CUBIC 0.044715f
DEVICE float gelu_odds(float x) {
    float inner = x * GELU_SCALE * (x * x * GELU_CUBIC + 1.0f);
    return 1.0f / (fast_exp(-inner) + 1.0f);
}
DEVICE float gelu_slope(float x) {
    float odds = gelu_odds(x);
    return odds + x * odds * (1.0f - odds) * ((x * x * (3.0f * GELU_CUBIC) + 1.0f) * GELU_SCALE);
}
DEVICE float positive(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays NaN

DEVICE void store_shared(u32 at, u32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory"); }
DEVICE Words4 load_shared_16(u32 at) {
    Words4 w;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(at) : "memory");
    return w;
}

DEVICE u32 load_shared(u32 at) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}

// Sums and maxima over a warp: every lane gets the result, by the same additions in the same order.
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = WARP / 2; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// NaN wins: a row that has one must not look finite.
DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = WARP / 2; step; step >>= 1) x = larger(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Sum over a block of up to 32 warps; `partial` has 32 floats. All threads call it and get the result.
DEVICE float block_sum(float x, float *partial) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads();  // `partial` may still be read, from the call before
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

DEVICE float block_max(float x, float *partial) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_max(partial[lane < warps ? lane : 0]);
}

// ---- asynchronous copies (sm_80)

// Copies 16 bytes to shared memory, or zeros if `wanted` is false: then `src` is not read.
DEVICE void copy_async_16(u32 dst, const void *src, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(wanted ? 16 : 0) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- tensor cores (sm_80)

DEVICE void load_matrices(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
// d += a b for a (16, 16), b (16, 8), d (16, 8).
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same for float32 whose fractions have 10 bits: a (16, 8), b (8, 8).
DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The bits of a float32, with its fraction rounded to 10 bits, to nearest: tensor cores would cut it.
DEVICE u32 round_tf32(u32 bits) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}
