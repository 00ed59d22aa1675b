"""A job of an elastic group whose ranks are killed in its operations, and how each of these ended."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from programs import PROGRAMS

from support.jobs.elastic_rank import PLAN_VARIABLE, Kill, Plan
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport, RunResult
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import OnLoss

TIMEOUT_S = 180.0
LINES_MAX = 60
PRELOAD = ("zbmd.collectives.elastic.group",)


@dataclass
class ElasticJob:
    """A host that runs operations; what its ranks report, by operation and rank.

    program: a file in `programs/elastic`, whose `operate` runs operation k; mode: the arguments of its
    operations; arguments: those of the program.
    """

    folder: Path
    program: str
    kills: Sequence[Kill]
    mode: dict[str, Any] = field(default_factory=dict[str, Any])
    world_size: int = 3
    on_loss: OnLoss = OnLoss.REPLACE
    arguments: Sequence[object] = ()
    told: dict[int, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    lines: list[str] = field(default_factory=list[str])

    async def write_line(self, line: OutputLine) -> None:
        """The output of a rank."""
        self.lines.append(f"{line.rank}: {line.text.decode()}")

    async def run(self) -> RunResult:
        """Run it to its end."""
        board = self.folder / "reached"
        board.write_bytes(bytes(8 * self.world_size))
        plan = Plan(list(self.kills), self.mode, str(board))
        config = HostConfig(
            target=str(PROGRAMS / "elastic" / self.program),
            arguments=tuple(map(str, self.arguments)),
            environment={PLAN_VARIABLE: msgspec.json.encode(plan).decode()},
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
