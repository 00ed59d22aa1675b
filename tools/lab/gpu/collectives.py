"""The collectives of `lab.gpu`: two ranks that run `ranks`, and what rank 0 tells."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Final

from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import OnLoss, Outcome

RANKS: Final = 2
ARENA_BYTES: Final = 256 << 20
LINES_KEPT: Final = 20


class RanksFailed(Exception):
    """The ranks ended otherwise than they should; with their last lines."""


class _Told:
    """Takes the lines of the ranks: the one of JSON, and the last others."""

    def __init__(self) -> None:
        self.told = ""
        self.lines: list[str] = []

    async def write_line(self, line: OutputLine) -> None:
        text = line.text.decode(errors="replace")
        if line.rank == 0 and text.startswith('{"told"'):
            self.told = json.loads(text)["told"]
        else:
            self.lines = [*self.lines[1 - LINES_KEPT :], f"{line.rank}: {text}"]


def run_ranks(what: str, gpus: int) -> str:
    """Run `what` on so many GPUs; raises `RanksFailed`."""
    return asyncio.run(_run(what, gpus))


async def _run(what: str, gpus: int) -> str:
    told = _Told()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    config = HostConfig(
        target=str(Path(__file__).with_name("ranks.py")),
        arguments=(what,),
        world_size=RANKS,
        on_loss=OnLoss.STOP,
        arena_bytes=ARENA_BYTES,
        environment={"CUDA_VISIBLE_DEVICES": first} if gpus == 1 else {},
    )
    result = await Host(config, output=told).run()
    if result.outcome is not Outcome.SUCCEEDED or not told.told:
        raise RanksFailed("; ".join([f"the ranks failed: {result.reason}", *told.lines]))
    return told.told
