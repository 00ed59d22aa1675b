"""A broadcast from rank 2, which is absent then, between all-reduces."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    x = zbmd.from_array(np.full(300, 10.0**rank * k))
    done = await (group.broadcast(x, 2, timeout=60) if k == 2 else group.all_reduce(x, timeout=60, **MODE))
    return done, [float(done.value.min()), float(done.value.max())]


if __name__ == "__main__":
    run_operations(operate)
