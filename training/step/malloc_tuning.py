"""Keeping freed memory for the next step, which allocates the same arrays again."""

from __future__ import annotations

import ctypes

# From malloc.h of glibc.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

FREED_BYTES_KEPT_MAX = 1 << 29
# Larger arrays are mapped and unmapped one by one; glibc takes no higher threshold.
HEAP_ARRAY_BYTES_MAX = 1 << 25


def keep_freed_memory() -> None:
    """Let this process keep up to `FREED_BYTES_KEPT_MAX` of freed memory instead of returning it at once.

    A step frees all its activations at its end. glibc gives such memory back to the kernel, and the next
    step pays for it by 800 page faults, an eighth of its time. All threads share one heap, since a thread's
    own one is made of 64 MiB parts that are given back whatever the thresholds say. Call it before the
    threads are made. A C library without `mallopt` is left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, HEAP_ARRAY_BYTES_MAX)
        mallopt(M_TRIM_THRESHOLD, FREED_BYTES_KEPT_MAX)
        mallopt(M_ARENA_MAX, 1)
