"""Elastic groups under real kills: at the instructions of an operation and of its commit, in every mode.

Rank r brings 10^r * k to operation k, so a sum tells whose inputs it holds.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from zbmd.actors.host import Host, HostConfig
from zbmd.actors.host_events import HostEvent, RankReport, RunResult
from zbmd.actors.host_output import OutputLine
from zbmd.actors.view import OnLoss, Outcome

TIMEOUT_S = 60.0
COUNT = 300
LINES_MAX = 60
PRELOAD = ("zbmd.collectives.elastic",)

JOB = """
import json, os, signal
import numpy as np
import zbmd

KILLS = json.loads({kills!r})  # of each operation: the rank that dies in it, in which run, at which point
MODE = json.loads({mode!r})

async def main():
    async with zbmd.join() as node:
        group = await zbmd.elastic_group(node, timeout=60)
        new = node.incarnation > 1  # a replacement may be asked for the operation in which it died
        while group.sequence <= len(KILLS):
            k = group.sequence
            kill = KILLS[k - 1]
            x = zbmd.from_array(np.full({count}, 10.0**node.rank * k))
            if kill and kill[0] == node.rank and not new:
                communicator = group.group.communicator
                communicator.kill_at(communicator.sequence + kill[1], kill[2])
            told = {{"k": k, "rank": node.rank, "incarnation": node.incarnation}}
            try:
                done = await group.all_reduce(x, timeout=60, **MODE)
                least, most = float(done.value.min()), float(done.value.max())
                told |= {{"value": [least, most], "of": done.contributors, "repairs": done.repairs}}
            except zbmd.ZbmdError as error:
                told |= {{"error": type(error).__name__, "why": str(error)}}
            if kill and kill[0] == node.rank and not new:
                told["survived"] = True
                group.group.communicator.kill_at(0, 0)
            new = False
            node.report(told)
        await group.close()

zbmd.run(main())
"""


@dataclass
class Job:
    """A host that runs the script; what its ranks report, by operation and rank."""

    folder: Path
    kills: Sequence[tuple[int, int, int] | None]
    mode: dict[str, Any]
    world_size: int = 3
    on_loss: OnLoss = OnLoss.REPLACE
    told: dict[int, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    lines: list[str] = field(default_factory=list[str])

    async def write_line(self, line: OutputLine) -> None:
        self.lines.append(f"{line.rank}: {line.text.decode()}")

    async def run(self) -> RunResult:
        script = self.folder / "job.py"
        kills, mode = json.dumps(self.kills), json.dumps(self.mode)
        script.write_text(JOB.format(kills=kills, mode=mode, count=COUNT))
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

    def check(self, k: int) -> dict[str, Any]:
        """That all who saw the end of operation k saw the same, and that a sum is of its contributors."""
        told = self.told[k]
        ends = {(tuple(t.get("of", ())), t.get("error", "")) for t in told.values()}
        assert len(ends) == 1, f"operation {k} ended differently: {told}"
        ((of, error),) = ends
        for found in told.values():
            if not error:
                total = k * sum(10.0**rank for rank in of)
                assert found["value"] == [total, total], found
        return {"of": of, "error": error, "ranks": sorted(told)}


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


async def test_operations_without_a_death(tmp_path: Path) -> None:
    job = Job(tmp_path, [None] * 5, {"inputs": "preserve"})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines)
    for k in range(1, 6):
        assert job.check(k) == {"of": (0, 1, 2), "error": "", "ranks": [0, 1, 2]}


NOTHING: set[str] = set()
MODES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "preserve": ({"inputs": "preserve"}, {"all", "survivors"}, NOTHING),
    "recompute": ({"inputs": "recompute"}, {"all", "survivors", "InputsOverwritten"}, NOTHING),
    "adopt": ({"inputs": "adopt"}, {"all"}, {"survivors"}),
    "wait": ({"inputs": "preserve", "on_loss": "wait_for_replacement"}, {"all"}, NOTHING),
    "abort": ({"inputs": "preserve", "on_loss": "abort"}, {"all", "MembersLost"}, NOTHING),
}
"""Of each mode: the arguments, how operations end, all of which is to be seen, and how they may end besides:
who dies just behind an operation has published nothing for the next one, or has."""

ALGORITHM = "direct"
POINTS_MAX = 16
"""More than the program of three ranks, and its commit, have."""


STRIDE = 2
"""Every so many-th point is for a mode, so two modes together have all of them."""


def plan(world_size: int, first: int) -> list[tuple[int, int, int] | None]:
    """One kill an operation: at points of its program, and of its commit; a calm one at the end.

    A point that there is not kills nobody.
    """
    places = [(run, point) for run in (1, 2) for point in range(first, POINTS_MAX, STRIDE)]
    return [(k % world_size, run, point) for k, (run, point) in enumerate(places)] + [None]


@pytest.mark.parametrize("mode", MODES)
async def test_a_kill_at_every_other_instruction(tmp_path: Path, mode: str) -> None:
    arguments, expected, besides = MODES[mode]
    kills = plan(3, first=list(MODES).index(mode) % STRIDE)
    job = Job(tmp_path, kills, {"algorithm": ALGORITHM, **arguments})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines[-LINES_MAX:])
    seen: set[str] = set()
    deaths: set[int] = set()
    for k, kill in enumerate(kills, 1):
        end = job.check(k)
        # Who dies once all have the result is missing in the next operation.
        earlier = kills[k - 2] if k - 1 in deaths else None
        struck = {victim[0] for victim in (earlier, kill) if victim}
        if kill and not job.told[k].get(kill[0], {}).get("survived"):
            deaths.add(k)
        absent = set(range(3)) - set(end["ranks"])
        assert absent <= struck, (k, kill, end)
        how = "all" if len(end["of"]) == 3 else "survivors"
        seen.add(end["error"] or how)
        if mode == "adopt" and not deaths & {k - 1}:
            # What the dead had published counts: without it only who died after the operation before is.
            assert how == "all", (k, end)
        assert deaths & {k - 1, k} or (how == "all" and not end["error"]), (k, end)
    assert len(deaths) > 4 and expected <= seen <= expected | besides, (deaths, seen)
