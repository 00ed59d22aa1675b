"""A job of an elastic group whose ranks are killed in its operations, and how each of these ended."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbmd.actors.host.events import HostEvent, RankReport, RunResult
from zbmd.actors.host.output import OutputLine
from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.view import OnLoss

TIMEOUT_S = 60.0
LINES_MAX = 60
PRELOAD = ("zbmd.collectives.elastic.group",)

Kill = tuple[int, int, int] | None
"""In an operation: the rank that dies, in which run of it, at which point.

It waits until all are done with the operation before, so that they lose it in this one, unless there is
another view meanwhile: what a death at an operation's end began may be repaired in the next, so have a calm
one follow.
"""
AT_END = -1
"""The point at the end of a barrier, which commits an operation: all members have the result by then."""

SCRIPT = """
import asyncio
import json
import mmap
import numpy as np
import zbmd

KILLS = json.loads({kills!r})
MODE = json.loads({mode!r})
AT_END = {at_end}
{operation}

with open({board!r}, "r+b") as file:
    # By rank: the operation that it has come to.
    REACHED = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)

async def arm(worker, group, k, run, point):
    while (REACHED < k).any() and worker.latest.epoch == group.epoch:
        await asyncio.sleep(0)
    communicator, n = group.group.communicator, group.size
    if point == AT_END:
        point = n + 2 * (n - 1).bit_length()  # the descriptors are read, then so many rounds
    communicator.kill_at(communicator.sequence + run, point)

async def main():
    global LIFE
    async with zbmd.join() as worker:
        LIFE = worker.incarnation
        group = await zbmd.elastic_group(worker, timeout=60)
        new = worker.incarnation > 1  # a replacement may be asked for the operation in which it died
        while group.sequence <= len(KILLS):
            k = group.sequence
            kill = KILLS[k - 1]
            REACHED[worker.rank] = k
            if kill and kill[0] == worker.rank and not new:
                await arm(worker, group, k, *kill[1:])
            told = {{"k": k, "rank": worker.rank, "incarnation": worker.incarnation}}
            try:
                done, found = await operate(group, worker.rank, k)
                told |= {{"value": found, "of": done.contributors, "repairs": done.repairs}}
            except zbmd.ZbmdError as error:
                told |= {{"error": type(error).__name__, "why": str(error)}}
            if kill and kill[0] == worker.rank and not new:
                told["survived"] = True
                group.group.communicator.kill_at(0, 0)
            new = False
            worker.report(told)
        await group.close()

zbmd.run(main())
"""


@dataclass
class ElasticJob:
    """A host that runs operations; what its ranks report, by operation and rank.

    operation: source of `async def operate(group, rank, k)`, which brings about operation k and returns the
    result and what is to be told of it; it may use `MODE`, and `LIFE`, the incarnation.
    """

    folder: Path
    operation: str
    kills: Sequence[Kill]
    mode: dict[str, Any] = field(default_factory=dict[str, Any])
    world_size: int = 3
    on_loss: OnLoss = OnLoss.REPLACE
    told: dict[int, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    lines: list[str] = field(default_factory=list[str])

    async def write_line(self, line: OutputLine) -> None:
        """What a rank has printed."""
        self.lines.append(f"{line.rank}: {line.text.decode()}")

    async def run(self) -> RunResult:
        """Run it to its end."""
        script = self.folder / "job.py"
        board = self.folder / "reached"
        board.write_bytes(bytes(8 * self.world_size))
        script.write_text(
            SCRIPT.format(
                kills=json.dumps(self.kills),
                mode=json.dumps(self.mode),
                operation=self.operation,
                board=str(board),
                at_end=AT_END,
            )
        )
        config = HostConfig(
            target=str(script),
            arena_bytes=1 << 20,
            preload=PRELOAD,
            world_size=self.world_size,
            on_loss=self.on_loss,
            max_restarts=1000,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await Host(config, output=self, observer=self._observe).run()
        except TimeoutError:
            raise AssertionError("\n".join(["no end; its ranks said:", *self.lines[-LINES_MAX:]])) from None

    async def _observe(self, event: HostEvent) -> None:
        if isinstance(event, RankReport):
            self.told[event.payload["k"]][event.payload["rank"]] = event.payload

    def end_of(self, k: int) -> tuple[tuple[int, ...], str]:
        """The contributors to operation k and its error, which are the same for all who saw its end."""
        ends = {(tuple(t.get("of", ())), t.get("error", "")) for t in self.told[k].values()}
        assert len(ends) == 1, f"operation {k} ended differently: {self.told[k]}"
        ((of, error),) = ends
        return of, error

    def died_in(self, k: int) -> bool:
        """Whether the kill of operation k has struck: a point that there is not kills nobody."""
        kill = self.kills[k - 1]
        return kill is not None and not self.told[k].get(kill[0], {}).get("survived")
