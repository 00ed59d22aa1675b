"""What every peer is timed at, so that each is timed alike.

p2p: a ping and its answer of the same size, half the round trip a sample. As in osu_latency, what is sent
     never changes and what has arrived is not looked at, so both stay in the caches where they are.
echo: the same, but each side sends back what it has received: every byte crosses from core to core.
put: a window of messages one way and one small answer, the window's time over its length a sample (osu_bw).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

WINDOW_MAX: Final = 64
WINDOW_BYTES: Final = 64 << 20
WARMUP_MAX: Final = 100


def window_of(nbytes: int) -> int:
    """Messages in flight before one is waited for: up to 64, of 64 MiB together, at least one."""
    return max(1, min(WINDOW_MAX, WINDOW_BYTES // nbytes))


def warmups(iterations: int) -> int:
    """How many operations go before those that count."""
    return min(WARMUP_MAX, 1 + iterations // 10)


def busy(iterations: int, operation: Callable[[], object]) -> list[float]:
    """Nanoseconds of CPU that this process spends on a call of `operation`, all its threads, on average."""
    for _ in range(warmups(iterations)):
        operation()
    began = time.process_time_ns()
    for _ in range(iterations):
        operation()
    return [(time.process_time_ns() - began) / iterations]


def timed(iterations: int, operation: Callable[[], object], parts: int) -> list[float]:
    """Nanoseconds of each call of `operation`, divided by `parts`; the first ones do not count."""
    clock = time.perf_counter_ns
    for _ in range(warmups(iterations)):
        operation()
    samples: list[float] = []
    for _ in range(iterations):
        began = clock()
        operation()
        samples.append((clock() - began) / parts)
    return samples


async def timed_on_loop(
    iterations: int, operation: Callable[[], Awaitable[object]], parts: int
) -> list[float]:
    """As `timed`, of what is awaited."""
    clock = time.perf_counter_ns
    samples: list[float] = []
    for number in range(warmups(iterations) + iterations):
        began = clock()
        await operation()
        if number >= warmups(iterations):
            samples.append((clock() - began) / parts)
    return samples


def windows(iterations: int, nbytes: int) -> int:
    """How many windows make `iterations` messages, at least two."""
    return max(2, iterations // window_of(nbytes))
