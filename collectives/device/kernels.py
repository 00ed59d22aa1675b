"""The kernel that packs arrays of devices with strides.

The source is C that NVRTC compiles on a GPU's machine, and any C compiler elsewhere, where a test runs it.
Every argument is 64 bits wide, a pointer or a number.
"""

from __future__ import annotations

from typing import Final

from zbmd.transport.cuda.api import DeviceKernels

STRIDED_DIMENSIONS_MAX: Final = 8
"""Dimensions that `strided_copy` takes."""
_SOURCE: Final = r"""
#ifdef __CUDACC_RTC__
#define ZBMD_ENTRY(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define ZBMD_EACH(i, n) for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; \
                             i += (u64)gridDim.x * blockDim.x)
#else
#define ZBMD_ENTRY(name, ...) void name(__VA_ARGS__)
#define ZBMD_EACH(i, n) for (u64 i = 0; i < n; i++)
#endif
typedef unsigned char u8;
typedef unsigned long long u64;

/* Elements of `item` bytes between a flat array and one with strides, 8 dimensions, the last the fastest.
 * `inwards`: into the flat one. `at`: where the first element of the other lies in `strided`. */
ZBMD_ENTRY(zbmd_strided_copy, u8 *flat, u8 *strided, u64 n, u64 item, u64 inwards, u64 at,
           u64 e0, u64 e1, u64 e2, u64 e3, u64 e4, u64 e5, u64 e6, u64 e7,
           u64 s0, u64 s1, u64 s2, u64 s3, u64 s4, u64 s5, u64 s6, u64 s7) {
    u64 extents[8] = {e0, e1, e2, e3, e4, e5, e6, e7}, strides[8] = {s0, s1, s2, s3, s4, s5, s6, s7};
    ZBMD_EACH(i, n) {
        u64 left = i, place = at;
        for (int d = 7; d >= 0; d--) {
            place += left % extents[d] * strides[d];
            left /= extents[d];
        }
        u8 *into = inwards ? flat + i * item : strided + place;
        const u8 *from = inwards ? strided + place : flat + i * item;
        for (u64 k = 0; k < item; k++) into[k] = from[k];
    }
}
"""
KERNELS: Final = DeviceKernels(source=_SOURCE, options=("-std=c++17",))
STRIDED_COPY: Final = "zbmd_strided_copy"
