"""A rank of three: the last is killed twice; the others report which segments they map after each loss."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import Any

import numpy as np
from support.processes.mapped_segments import mapped_segments, segment_descriptors, segment_inodes
from support.processes.polling import until

import zbmd

KILLED, LIVES = 2, 3


async def report(worker: zbmd.Worker, when: str) -> None:
    worker.report(
        {"when": when, "rank": worker.rank, "maps": mapped_segments(), "descriptors": segment_descriptors()}
    )
    assert await worker.reported()


def die_if_chosen(worker: zbmd.Worker) -> None:
    if worker.rank == KILLED and worker.incarnation < LIVES:
        os.kill(os.getpid(), signal.SIGKILL)


async def plain(worker: zbmd.Worker) -> None:
    kept: list[Any] = []  # as by one who looks at a group that has ended
    view: memoryview | None = None
    mine = zbmd.from_array(np.full(100, worker.rank + 1.0))
    group = await zbmd.group(worker)
    while worker.epoch < LIVES:
        part = await group.split(0)
        assert part is not None
        places = await part.all_gather(np.array([worker.segment.arena.offset_of(mine)]))
        if view is None and worker.rank != KILLED:
            memory: Any = worker.peers[KILLED].memory
            view = memory.arena_view(int(places[KILLED, 0]), mine.nbytes)
        with contextlib.suppress(zbmd.PeerLost, zbmd.OperationAborted):
            await group.barrier()
            die_if_chosen(worker)
            await part.all_reduce(np.ones(100))
        kept += [group, part]
        group = await zbmd.group(worker, after=group.epoch)
        for old in kept:
            await old.close()
        await report(worker, f"epoch {worker.epoch}")
    if view is not None:
        assert (np.frombuffer(view) == KILLED + 1).all(), "memory that is looked at stays"
        view = None
        await report(worker, "view gone")
    await group.barrier()
    await group.close()


async def early(worker: zbmd.Worker) -> None:
    """As a job of training does: the memory of the dead goes before the next view is entered."""
    worker.keeps_lost_memory = False
    group = await zbmd.group(worker)
    while worker.epoch < LIVES:
        (dead,) = segment_inodes()[str(KILLED)]
        with contextlib.suppress(zbmd.PeerLost, zbmd.OperationAborted):
            await group.barrier()
            die_if_chosen(worker)
            await group.all_reduce(np.ones(100))
        group.give_up()
        await until(lambda gone=dead: gone not in segment_inodes().get(str(KILLED), ()))
        group = await zbmd.group(worker, after=group.epoch)
    await report(worker, "end")
    await group.barrier()
    await group.close()


async def elastic(worker: zbmd.Worker) -> None:
    group = await zbmd.elastic_group(worker)
    die_if_chosen(worker)
    await group.all_reduce(np.ones(1 << 16), inputs="adopt", on_loss="wait_for_replacement")
    await report(worker, f"epoch {worker.epoch}")
    await group.barrier()
    await group.close()


async def main() -> None:
    gc.disable()
    async with zbmd.join() as worker:
        await {"plain": plain, "early": early, "elastic": elastic}[sys.argv[1]](worker)


zbmd.run(main())
