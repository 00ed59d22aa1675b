"""All-reduce many arrays at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result


def arrays(rank: int, k: int) -> list[np.ndarray]:
    """Return two that travel together, one of another dtype, and one that goes alone."""
    return [np.full(n, 10**rank * k, t) for n, t in ((3, "f4"), (5, "f8"), (70, "f4"), (1 << 16, "f4"))]


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    given = arrays(rank, k)
    done = await group.all_reduce_many(given, op="avg" if k % 2 else "sum", timeout=60, **MODE)
    total = k * sum(10**r for r in done.contributors)
    wanted = total / len(done.contributors) if k % 2 else total
    right = all(np.allclose(x, wanted) for x in done.value)
    kept = MODE["inputs"] == "recompute" or all(map(np.array_equal, given, arrays(rank, k)))
    return done, [bool(right), kept]


if __name__ == "__main__":
    run_operations(operate)
