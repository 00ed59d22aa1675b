"""A rank of an `ElasticJob`: it runs one operation after the other, dies in some, and reports how each ended.

The job gives each rank its plan by the environment (PLAN_VARIABLE).
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

import zbmd
from zbmd.collectives.elastic.group import ElasticGroup
from zbmd.collectives.elastic.operations import Result

PLAN_VARIABLE = "ZBMD_TEST_PLAN"
AT_END = -1
"""The point at the end of a barrier, which commits an operation: all members have the result by then."""
Kill = tuple[int, int, int] | None
"""In an operation: the rank that dies, in which run of it, at which point.

It waits until all are done with the operation before, so that they lose it in this one, unless there is
another view meanwhile: what a death at an operation's end began may be repaired in the next, so have a calm
one follow.
"""
Operate = Callable[[ElasticGroup, int, int], Awaitable[tuple[Result, Any]]]
"""Called with the group, the rank and k: runs operation k, returns its result and what to report of it."""


class Plan(msgspec.Struct):
    """The program of a job's ranks. mode: arguments of operations; board: by rank, the operation reached."""

    kills: list[Kill]
    mode: dict[str, Any]
    board: str


PLAN = msgspec.json.decode(os.environ[PLAN_VARIABLE], type=Plan) if PLAN_VARIABLE in os.environ else None
MODE: dict[str, Any] = PLAN.mode if PLAN else {}
INCARNATION = int(os.environ.get("ZBMD_INCARNATION", "1"))


def run_operations(operate: Operate) -> None:
    """Run the plan's operations, as the whole program of a rank."""
    assert PLAN is not None, f"{PLAN_VARIABLE} is not set: an ElasticJob starts this program"
    with open(PLAN.board, "r+b") as file:
        reached = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
    zbmd.run(_run(operate, PLAN.kills, reached))


async def _run(operate: Operate, kills: list[Kill], reached: np.ndarray) -> None:
    async with zbmd.join() as worker:
        group = await zbmd.elastic_group(worker, timeout=60)
        new = worker.incarnation > 1  # a replacement may be asked for the operation in which it died
        while group.sequence <= len(kills):
            k = group.sequence
            kill = kills[k - 1]
            reached[worker.rank] = k
            dies = kill is not None and kill[0] == worker.rank and not new
            if kill is not None and dies:
                await _arm(worker, group, reached, k, *kill[1:])
            told: dict[str, Any] = {"k": k, "rank": worker.rank, "incarnation": worker.incarnation}
            try:
                done, found = await operate(group, worker.rank, k)
                told |= {"value": found, "of": done.contributors, "repairs": done.repairs}
            except zbmd.ZbmdError as error:
                told |= {"error": type(error).__name__, "why": str(error)}
            if dies:
                told["survived"] = True
                group.group.communicator.kill_at(0, 0)
            new = False
            worker.report(told)
        await group.close()


async def _arm(
    worker: zbmd.Worker, group: ElasticGroup, reached: np.ndarray, k: int, run: int, point: int
) -> None:
    while (reached < k).any() and worker.latest.epoch == group.epoch:  # noqa: ASYNC110 (another process writes it)
        await asyncio.sleep(0)
    communicator, n = group.group.communicator, group.size
    if point == AT_END:
        point = n + 2 * (n - 1).bit_length()  # the descriptors are read, then so many rounds
    communicator.kill_at(communicator.sequence + run, point)
