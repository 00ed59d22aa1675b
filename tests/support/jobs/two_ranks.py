"""Runs of `zbmd train` on two ranks, of a model that takes no time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from support.processes.kept_lines import Lines
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.train.command import recipe_of
from zbmd.transport import kill_points as faults

MODEL = ("--context", "8", "--width", "16", "--heads", "2", "--layers", "1")
SIZES = (*MODEL, "--shards", "4", "--sequences-per-shard", "2", "--warmup", "2", "--steps", "6")

SAMPLED = ("--profile-ops", "every=2", "--sample-every", "3")


async def run(arguments: Sequence[str], *, fault: str = "", on_loss: OnLoss = OnLoss.STOP) -> None:
    lines = Lines()
    config = HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(recipe_of(arguments, ranks=2).encode(),),
        world_size=2,
        on_loss=on_loss,
        environment={faults.FAULT_VARIABLE: fault},
        preload=("zbmd.training.sharded.run",),
    )
    assert (await Host(config, output=lines).run()).exit_code == 0, "\n".join(lines.lines)


def killed_run(directory: Path) -> Path:
    """The directory of a run of which rank 1 was killed in step 3, of six, and ops of even ones sampled."""
    data = write_text(directory / "text")
    arguments = ("--data", str(data), *SIZES, "--out", str(directory / "run"), *SAMPLED)
    asyncio.run(run(arguments, fault="rank1#1:mirror.prepared:3", on_loss=OnLoss.REPLACE))
    return directory / "run"
