"""Asks of an actor in another process, by another actor library, in the way that its own guide shows.

    python -m zbmd.tools.peers.actor_asks {xoscar,ray,monarch} --seconds S --in-flight N

Prints a JSON list of `{what, p50_us, p99_us, per_second}`; exits with 3 if the library is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from zbmd.tools.bench_row import Row, percentile

EXIT_MISSING = 3
WARM_UP = 200
LARGE_BYTES = 1_000_000
"""As much as one message may hold, roughly: a frame takes 1 MiB with its headers."""
SIZES = (("ask 1 B", 1), (f"ask {LARGE_BYTES:,} B", LARGE_BYTES))
WHERE = "other process"

Echo = Callable[[bytes], Awaitable[Any]]


async def measure(echo: Echo, seconds: float, in_flight: int) -> list[Row]:
    """Round trips one by one, by size; and how many a second with so many under way."""
    rows: list[Row] = []
    for what, nbytes in SIZES:
        payload, times_us = bytes(nbytes), list[float]()
        for _ in range(WARM_UP):
            await echo(payload)
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            began_ns = time.perf_counter_ns()
            await echo(payload)
            times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        p50_us, p99_us = percentile(times_us, 0.5), percentile(times_us, 0.99)
        rate = len(times_us) / seconds
        rows.append(Row(what=what, where=WHERE, p50_us=p50_us, p99_us=p99_us, per_second=rate))
    count, began_s = 0, time.perf_counter()

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < began_s + seconds:
            await echo(b"x")
            count += 1

    await asyncio.gather(*(work() for _ in range(in_flight)))
    rate = count / (time.perf_counter() - began_s)
    rows.append(Row(what=f"asks, {in_flight} in flight", where=WHERE, per_second=rate))
    return rows


async def _xoscar(library: Any, seconds: float, in_flight: int) -> list[Row]:
    from zbmd.tools.peers.xoscar_pair import Echo as XoscarEcho

    pool = await library.create_actor_pool("127.0.0.1:0", n_process=2)
    async with pool:
        place = library.allocate_strategy.ProcessIndex(1)
        address = pool.external_address
        actor = await library.create_actor(XoscarEcho, address=address, uid="echo", allocate_strategy=place)
        return await measure(actor.echo, seconds, in_flight)


class _Echo:
    """What Ray makes an actor of."""

    def echo(self, payload: bytes) -> bytes:
        """Answer."""
        return payload


async def _ray(library: Any, seconds: float, in_flight: int) -> list[Row]:
    library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        actor = library.remote(_Echo).options(max_concurrency=1).remote()
        return await measure(actor.echo.remote, seconds, in_flight)
    finally:
        library.shutdown()


async def _monarch(library: Any, seconds: float, in_flight: int) -> list[Row]:
    echo_class = type(
        "MonarchEcho", (library.Actor,), {"echo": library.endpoint(_monarch_echo), "__module__": __name__}
    )
    processes = library.this_host().spawn_procs(per_host={"procs": 1})
    actor = processes.spawn("echo", echo_class)
    return await measure(actor.echo.call_one, seconds, in_flight)


async def _monarch_echo(_: Any, payload: bytes) -> bytes:
    return payload


LIBRARIES: dict[str, tuple[str, Callable[[Any, float, int], Awaitable[list[Row]]]]] = {
    "xoscar": ("xoscar", _xoscar),
    "ray": ("ray", _ray),
    "monarch": ("monarch.actor", _monarch),
}


def main() -> int:
    """Measure one library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    arguments = parser.parse_args()
    module, run = LIBRARIES[arguments.library]
    try:
        library = importlib.import_module(module)
    except ImportError:
        return EXIT_MISSING

    async def all_rows() -> list[Row]:
        return await run(library, arguments.seconds, arguments.in_flight)

    print(json.dumps([asdict(row) for row in asyncio.run(all_rows())]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
