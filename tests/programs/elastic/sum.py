"""All-reduce: rank r brings 10^r * k, so a sum tells whose inputs it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    x = np.full(300, 10.0**rank * k)
    if k // 2 % 2:  # else peers read it where it lies
        x = zbmd.from_array(x)
    done = await group.all_reduce(x, timeout=60, **MODE)
    return done, [float(done.value.min()), float(done.value.max())]


if __name__ == "__main__":
    run_operations(operate)
