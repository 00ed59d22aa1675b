"""The operations of uneven rows: rank r gives rank d none, one or two rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result

NAMES = ("all_gather_v", "reduce_scatter_v", "all_to_all_v")
ROWS = [3, 0, 2]  # of reduce_scatter_v, by rank


def rows_for(r: int, d: int, k: int) -> np.ndarray:
    """Return what rank r gives rank d."""
    return np.full(((r + 2 * d + k) % 3, 2), (10 * r + d) * 100 + k)


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    name, everybody = NAMES[(k - 1) % len(NAMES)], range(3)
    given = {r: [rows_for(r, d, k) for d in everybody] for r in everybody}
    sums = {r: np.arange(10).reshape(5, 2) * 10**r + k for r in everybody}
    mine = np.concatenate(given[rank])
    match name:
        case "all_gather_v":
            done = await group.all_gather_v(zbmd.from_array(mine), timeout=60, **MODE)
            blocks = [np.concatenate(given[r]) for r in done.contributors]
        case "reduce_scatter_v":
            done = await group.reduce_scatter_v(sums[rank], ROWS, timeout=60, **MODE)
            begin = sum(ROWS[:rank])
            blocks = [np.sum([sums[r] for r in done.contributors], axis=0)[begin : begin + ROWS[rank]]]
        case _:
            sends, receives = [len(rows) for rows in given[rank]], [len(given[s][rank]) for s in everybody]
            out = np.full((sum(receives), 2), -1) if k % 2 else None
            done = await group.all_to_all_v(mine, sends, receives, out=out, timeout=60, **MODE)
            blocks = [given[s][rank] for s in done.contributors]
            n = sum(map(len, blocks))
            assert out is None or (np.array_equal(out[:n], done.value) and (out[n:] == -1).all())
    counted = not done.rows or done.rows == tuple(len(block) for block in blocks)
    return done, [name, bool(counted and np.array_equal(done.value, np.concatenate(blocks)))]


if __name__ == "__main__":
    run_operations(operate)
