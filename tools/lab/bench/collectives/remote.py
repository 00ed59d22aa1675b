"""All-reduce between hosts: ranks of this host, linked by TCP over loopback as if each were on its own.

    python -m zbmd.tools.lab.bench.collectives.remote [-n RANKS] [--links tcp|auto] [--repeats N]

Through the public API: every rank awaits `group.all_reduce` on an array of the arena. A line for each size:
bytes, the median and the 99th percentile of rank 0 in us, and the bus bandwidth as nccl-tests have it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import uvloop

from zbmd.actors.host.events import HostEvent, RankReport
from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.environment import LINKS_VARIABLE, RankEnvironment
from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.group import group as group_module
from zbmd.collectives.group.group import Group, group

MODULE: Final = "zbmd.tools.lab.bench.collectives.remote"
SIZES: Final = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
WARM_UP: Final = 3
ARENA_BYTES: Final = 64 << 20


async def _time_all_reduce(members: Group, x: np.ndarray, repeats: int) -> list[float]:
    """The times of `repeats` operations, in us, each begun by all ranks together."""
    times_us: list[float] = []
    for _ in range(WARM_UP + repeats):
        await members.barrier()
        begin_s = time.perf_counter()
        await members.all_reduce(x)
        times_us.append((time.perf_counter() - begin_s) * 1e6)
    return times_us[WARM_UP:]


async def _rank(repeats: int) -> None:
    async with join(arena=ARENA_BYTES) as worker:
        members = await group(worker)
        try:
            for nbytes in SIZES:
                x = worker.segment.arena.empty(nbytes // 4, np.float32)
                x[:] = 0.0
                _report(worker, nbytes, await _time_all_reduce(members, x, repeats))
        finally:
            await members.close()


def _report(worker: Worker, nbytes: int, times_us: Sequence[float]) -> None:
    if worker.rank:
        return
    median_us = float(np.median(times_us))
    worker.report(
        {
            "bytes": nbytes,
            "median_us": median_us,
            "p99_us": float(np.percentile(times_us, 99)),
            "busbw_gbps": 2 * (worker.world_size - 1) / worker.world_size * nbytes / median_us / 1e3,
        }
    )


class _Table:
    """Prints what rank 0 reports, and whatever a rank writes."""

    async def write_line(self, line: OutputLine) -> None:
        """A rank has written a line."""
        print(f"[rank{line.rank}]: {line.text.decode(errors='replace')}", flush=True)

    async def __call__(self, event: HostEvent) -> None:
        """Something has happened."""
        if isinstance(event, RankReport) and "median_us" in event.payload:
            row = event.payload
            print(
                f"{row['bytes']:>10,} B  {row['median_us']:>10,.1f} us  p99 {row['p99_us']:>10,.1f} us  "
                f"busbw {row['busbw_gbps']:.2f} GB/s"
            )


async def launch(ranks: int, links: str, repeats: int) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    table = _Table()
    config = HostConfig(
        target=MODULE,
        is_module=True,
        arguments=("--repeats", str(repeats)),
        world_size=ranks,
        environment={LINKS_VARIABLE: links},
        preload=(group_module.__name__,),
    )
    ended = await Host(config, output=table, observer=table).run()
    if ended.exit_code:
        print(ended.reason)
    return ended.exit_code


def main() -> None:
    """Launch the ranks, or be one."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="All-reduce between hosts.")
    parser.add_argument("-n", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--links", choices=("tcp", "auto"), default="tcp", help="auto: shared memory")
    parser.add_argument("--repeats", type=int, default=50, help="operations of each size (default 50)")
    options = parser.parse_args()
    if RankEnvironment.read(os.environ) is not None:
        uvloop.run(_rank(options.repeats))
    else:
        raise SystemExit(uvloop.run(launch(options.n, options.links, options.repeats)))


if __name__ == "__main__":
    main()
