"""A job of very many ranks, for tests and for finding out what grows with them.

    ZBMD_ARENA=1MiB zbmd-node run -n 100 -m zbmd.tools.chaos.many_ranks

Every rank is in a group of all and in a sub-group of `ROW` neighbours, and each checks what they compute. The
last but one is killed in the midst of an operation; all others name it, a replacement comes, and all do the
same again with it. Rank 0 prints how long each part took, and the descriptors, threads and memory of a rank.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

import zbmd

ROW: Final = 8
ROUNDS: Final = 20
VIEW_S: Final = 120.0
"""Limit for a view on a machine with many more ranks than cores."""


async def check(worker: zbmd.Worker, group: zbmd.Group, told: dict[str, float]) -> None:
    """Operations of all, and of a few: an exact result each time."""
    size = group.size
    mark_s = time.perf_counter()
    await group.barrier(timeout=VIEW_S)
    told["first barrier ms"] = (time.perf_counter() - mark_s) * 1e3
    took_s: list[float] = []
    for _ in range(ROUNDS):
        mark_s = time.perf_counter()
        total = await group.all_reduce(np.array([worker.rank], np.float32), timeout=VIEW_S)
        took_s.append(time.perf_counter() - mark_s)
        assert total[0] == size * (size - 1) // 2, (total, size)
    told["all_reduce 4 B ms"] = statistics.median(took_s) * 1e3
    rooted = await group.broadcast(np.array([worker.rank]), root=size - 1, timeout=VIEW_S)
    assert rooted[0] == size - 1, rooted
    row = await group.split(worker.rank // ROW, timeout=VIEW_S)
    assert row is not None
    first = worker.rank // ROW * ROW
    took_s.clear()
    for _ in range(ROUNDS):
        mark_s = time.perf_counter()
        total = await row.all_reduce(np.array([worker.rank], np.int64), timeout=VIEW_S)
        took_s.append(time.perf_counter() - mark_s)
        assert total[0] == sum(range(first, min(first + ROW, size))), total
    told[f"all_reduce 8 B of {row.size} ms"] = statistics.median(took_s) * 1e3
    await row.close()


def footprint() -> str:
    """Describe the resources of this process."""
    status = Path("/proc/self/status").read_text()
    resident = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    maps = Path("/proc/self/maps").read_text().count("\n")
    natives = len(os.listdir("/proc/self/task"))
    return (
        f"descriptors {len(os.listdir('/proc/self/fd'))}, threads {natives} "
        f"({threading.active_count()} of Python), mappings {maps}, private {int(resident) >> 10} MiB"
    )


def tell(epoch: int, told: dict[str, float]) -> None:
    """A line for whoever started the job."""
    print(f"view {epoch}: " + ", ".join(f"{name} {number:.3g}" for name, number in told.items()), flush=True)


async def main() -> None:
    """One rank of it."""
    began_s = time.perf_counter()
    async with zbmd.join(inbox_bytes=1 << 16) as worker:
        victim = worker.world_size - 2
        group = await zbmd.group(worker)
        told = {"to the group s": time.perf_counter() - began_s}
        await check(worker, group, told)
        if worker.rank == 0:
            tell(group.epoch, told)
        if worker.incarnation == 1 and group.epoch == 1:
            try:
                if worker.rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                await group.all_reduce(np.zeros(1), timeout=VIEW_S)
                raise AssertionError(f"rank {worker.rank} has finished an operation without rank {victim}")
            except zbmd.PeerLost as error:
                assert f"rank{victim}" in str(error) or f"rank {victim}" in str(error), error
            except zbmd.OperationAborted:
                pass  # another has noticed first, and has ended the operation
            lost = worker.segment.lost_mask()
            mark_s = time.perf_counter()
            await group.close()
            group = await zbmd.group(worker, after=group.epoch)
            again = {"to the next group s": time.perf_counter() - mark_s}
            assert worker.segment.lost_mask() == 0, (worker.rank, hex(worker.segment.lost_mask()))
            assert lost in (0, 1 << victim), (worker.rank, hex(lost))
            await check(worker, group, again)
            if worker.rank == 0:
                tell(group.epoch, again)
                print(f"rank 0: {footprint()}", flush=True)
        await group.barrier(timeout=VIEW_S)
        await group.close()
    if worker.rank == 0:
        print(f"all {worker.world_size} ranks are done", flush=True)


if __name__ == "__main__":
    zbmd.run(main())
