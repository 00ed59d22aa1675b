"""A resilient loop of three ranks, one of which is killed in the last vote.

Arguments: a directory that the ranks share; whether the last vote ends a pass, or one of steps: pass, steps.
Rank 1 is killed (ZBMD_FAULT) once rank 2, which has seen all votes, is at the end of its script. Rank 0 has
voted, and sees no vote before that.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from support.processes.polling import until

import zbmd.torch
from zbmd.collectives.errors import MembersLost
from zbmd.training.torch import points
from zbmd.training.torch.exchange import Exchange
from zbmd.transport import kill_points
from zbmd.transport.kill_points import Point

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
parallel: Any = importlib.import_module("torch.nn.parallel")
data: Any = importlib.import_module("torch.utils.data")
world: Any = importlib.import_module("zbmd.collectives.torch.world").world

LEFT, WAY, RANK = Path(sys.argv[1]) / "left", sys.argv[2], int(os.environ["RANK"])
STEPS = 2
VOTES = STEPS + (WAY == "pass")  # the end of a pass is voted for, too
hit_alone, kill_at_once, gather_at_once, prepared = kill_points.hit, kill_points.die, Exchange.gather, 0


def hit(point: Point) -> None:
    """Pass a point."""
    global prepared
    prepared += point == points.PREPARED
    hit_alone(point)


def kill_late() -> NoReturn:
    """Kill this process when rank 2 has left."""
    asyncio.run(until(LEFT.exists))
    kill_at_once()


def gather(self: Exchange, row: bytes, called: str = "run.step()") -> tuple[bytes, ...]:
    """On rank 0: vote for the last time, and see nothing but that rank 1 is lost."""
    global prepared
    rows = gather_at_once(self, row, called)
    if prepared == VOTES:
        prepared = 0
        asyncio.run(until(lambda: world().worker.segment.lost_mask() >> 1 & 1))
        raise MembersLost((1,), "in the last vote")
    return rows


kill_points.hit, kill_points.die = hit, kill_late
if RANK == 0:
    Exchange.gather = gather  # type: ignore[method-assign]


def main() -> None:
    """Train."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("zbmd")
    torch.manual_seed(1)
    model = parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    run = zbmd.torch.resilient(model, optimizer)

    def step(x: Any) -> None:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        run.mean(loss=loss)
        optimizer.step()

    if WAY == "steps":
        while run.steps < STEPS:
            run.call(step, torch.ones(2, 4))
    else:
        for x in run.batches(data.DataLoader(torch.ones(2 * STEPS, 4), 2)):
            with run.step():
                step(x)
    weights = [round(each, 9) for each in model.module.weight.flatten().tolist()]
    print(f"ends with {run.steps} {weights}", flush=True)
    if dist.get_rank() == 2:
        LEFT.touch()


main()
