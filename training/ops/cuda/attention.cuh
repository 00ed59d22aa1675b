// What the kernels of attention share: the shape, and reductions over the four lanes that have a row of a fragment.
#pragma once
#include "device.cuh"

#define LOG2E 1.4426950408889634f

struct Shape {
    int length, heads, kv_heads, bias_length;
    __device__ int width(int depth) const { return (heads + 2 * kv_heads) * depth; }
};

DEVICE float quad_max(float x) {
    x = larger(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return larger(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

#define MASKED -1e30f  // finite: a tile in which a row sees no key leaves its sums as they are
