"""Refresh a group that its follower has brought to the latest view, then all-reduce."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.jobs.elastic_rank import run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    # As refresh does when its turn comes, and the group has been brought to that view by its follower.
    await group._follow(group.epoch, 30)
    assert await group.refresh(timeout=30) == group.epoch
    return await group.all_reduce(np.ones(3), timeout=30), []


if __name__ == "__main__":
    run_operations(operate)
