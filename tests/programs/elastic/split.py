"""A rank of a 2 x 2 mesh of elastic sub-groups under kills; argv: rounds, kills, mode, hosts (JSON)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

import zbmd
from zbmd.actors.rank.environment import HOST_VARIABLE, LISTEN_LOCAL, LISTEN_VARIABLE

ROUNDS: int = json.loads(sys.argv[1])
KILLS = {(name, k): (rank, point) for name, k, rank, point in json.loads(sys.argv[2])}
MODE: dict[str, Any] = json.loads(sys.argv[3])
HOSTS: list[int] = json.loads(sys.argv[4])
COLUMNS = ((0, 2), (3, 1))


async def total(worker: zbmd.Worker, name: str, group: zbmd.ElasticGroup) -> None:
    k = group.sequence
    rank, point = KILLS.get((name, k), (None, 0))
    if rank == worker.rank and worker.incarnation == 1:
        c = group.group.communicator
        c.kill_at(c.sequence + 1, point)
    done = await group.all_reduce(zbmd.from_array(np.full(300, 10.0**worker.rank * k)), timeout=60, **MODE)
    value = float(done.value.min()), float(done.value.max())
    told: dict[str, Any] = {
        **{
            "k": k,
            "rank": worker.rank,
            "of": done.contributors,
            "repairs": done.repairs,
            "epoch": done.epoch,
        },
        **{"group": name, "value": value, "life": worker.incarnation},
    }
    worker.report(told | {"hosts": group.group.communicator.hosts})


async def main() -> None:
    if len(set(HOSTS)) > 1:  # as the nodes of several hosts tell it to their ranks
        os.environ |= {HOST_VARIABLE: str(HOSTS[int(os.environ["RANK"])]), LISTEN_VARIABLE: LISTEN_LOCAL}
    async with zbmd.join() as worker:
        me = worker.rank
        group = await zbmd.elastic_group(worker, timeout=60)
        row = await group.split(me // 2, timeout=60)
        made = [await group.subgroup(ranks, timeout=60) for ranks in COLUMNS]
        column = made[me % 2]
        assert made[1 - me % 2] is None and row is not None and column is not None
        assert row.ranks == (me // 2 * 2, me // 2 * 2 + 1) and column.ranks == COLUMNS[me % 2], (row, column)
        while row.sequence <= ROUNDS or column.sequence <= ROUNDS:
            if row.sequence <= min(column.sequence, ROUNDS):
                await total(worker, f"row{me // 2}", row)
            else:
                await total(worker, f"column{me % 2}", column)
        await total(worker, "all", group)
        for each in (row, column, group):
            await each.close()


zbmd.run(main())
