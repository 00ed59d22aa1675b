"""The deadline wheel: nothing fires early, everything fires, and the number of buckets is bounded."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from zbmd.actors.core.timers import DeadlineWheel, Expired

HOUR_NS = 3600 * 1_000_000_000


async def test_every_deadline_fires_and_none_early() -> None:
    loop = asyncio.get_running_loop()
    wheel = DeadlineWheel(loop)
    early: list[int] = []
    futures: list[asyncio.Future[Any]] = []
    for timeout_ns in (40_000_000, 0, 1, 900_000, 5_000_000, 20_000_000, 5_000_001):
        future: asyncio.Future[Any] = loop.create_future()
        deadline_ns = time.monotonic_ns() + timeout_ns

        def check(_: asyncio.Future[Any], deadline_ns: int = deadline_ns) -> None:
            if time.monotonic_ns() < deadline_ns:
                early.append(deadline_ns)

        future.add_done_callback(check)
        wheel.add(future, deadline_ns, timeout_ns)
        futures.append(future)
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(o, Expired) for o in outcomes)
    assert not early and not wheel._buckets and wheel._timer is None


async def test_what_is_removed_does_not_fire() -> None:
    loop = asyncio.get_running_loop()
    wheel = DeadlineWheel(loop)
    kept: asyncio.Future[Any] = loop.create_future()
    removed: asyncio.Future[Any] = loop.create_future()
    now_ns = time.monotonic_ns()
    bucket = wheel.add(removed, now_ns, 0)
    wheel.add(kept, now_ns + 3_000_000, 3_000_000)
    wheel.remove(removed, bucket)
    assert wheel.pending == 1
    outcome = await asyncio.gather(kept, return_exceptions=True)
    assert isinstance(outcome[0], Expired) and not removed.done()


async def test_the_number_of_buckets_does_not_grow_with_the_number_of_deadlines(seed: int) -> None:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    wheel = DeadlineWheel(loop)
    future: asyncio.Future[Any] = loop.create_future()
    now_ns = time.monotonic_ns()
    for _ in range(20_000):
        timeout_ns = int(HOUR_NS ** rng.random())
        # As if asks had come in, evenly, for as long as their timeouts are.
        deadline_ns = now_ns + rng.randint(HOUR_NS, HOUR_NS + timeout_ns)
        wheel.add(future, deadline_ns, timeout_ns)
    assert len(wheel._buckets) < 40 * 64
    wheel.close()
