"""Sub-groups of an elastic group under real kills: rows and columns of a mesh, each repaired alone.

The mesh is on one host, on as many as it has ranks, or on two. Ranks of different hosts have but TCP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import PROGRAMS

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import OnLoss, Outcome

TIMEOUT_S = 180.0
LINES_MAX = 60


class Job:
    """A host that runs a script, and what its ranks report and print."""

    def __init__(
        self, script: Path, arguments: Sequence[Any], *, ranks: int, on_loss: OnLoss = OnLoss.REPLACE
    ) -> None:
        self._config = HostConfig(
            target=str(script),
            arguments=tuple(map(json.dumps, arguments)),
            arena_bytes=1 << 20,
            preload=("zbmd.collectives.elastic.group",),
            world_size=ranks,
            on_loss=on_loss,
            max_restarts=1000,
        )
        self.told: list[dict[str, Any]] = []
        self.lines: list[str] = []

    async def write_line(self, line: OutputLine) -> None:
        """The output of a rank."""
        self.lines.append(f"{line.rank}: {line.text.decode()}")

    async def _observe(self, event: HostEvent) -> None:
        if isinstance(event, RankReport):
            self.told.append(event.payload)

    async def run(self) -> None:
        """Run it to its end, which must be a success."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await Host(self._config, output=self, observer=self._observe).run()
        except TimeoutError:
            raise AssertionError("\n".join(["no end; its ranks said:", *self.lines[-LINES_MAX:]])) from None
        assert result.outcome is Outcome.SUCCEEDED, "\n".join([str(result), *self.lines[-LINES_MAX:]])


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


RANKS = {"row0": (0, 1), "row1": (2, 3), "column0": (0, 2), "column1": (1, 3), "all": (0, 1, 2, 3)}
ROUNDS = 6
ONE_HOST, OWN_HOSTS, ROWS_SHARE, COLUMNS_SHARE = (0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1)
SURVIVORS = {"inputs": "preserve"}
WAIT = SURVIVORS | {"on_loss": "wait_for_replacement"}
ADOPT = {"inputs": "adopt"}
MODES = {"survivors": SURVIVORS, "wait": WAIT, "adopt": ADOPT}
RING = {"algorithm": "ring"}  # which asks other hosts for what it reads


@pytest.mark.parametrize(
    ("hosts", "mode", "points"),
    [
        *(pytest.param(ONE_HOST, mode, (4, 2), id=f"one host-{name}") for name, mode in MODES.items()),
        *(pytest.param(OWN_HOSTS, mode, (1, 2), id=f"TCP-{name}") for name, mode in MODES.items()),
        pytest.param(OWN_HOSTS, SURVIVORS | RING, (4, 3), id="TCP-survivors of a ring"),
        pytest.param(ROWS_SHARE, ADOPT, (4, 2), id="columns over TCP-adopt"),
        pytest.param(COLUMNS_SHARE, ADOPT, (2, 4), id="rows over TCP-adopt"),
    ],
)
async def test_ranks_of_a_mesh_die_in_rows_and_columns(
    hosts: tuple[int, ...], mode: dict[str, Any], points: tuple[int, int]
) -> None:
    in_row, in_column = points
    kills = (("row0", 2, 1, in_row), ("column1", 4, 3, in_column))
    arguments = (ROUNDS, kills, mode, hosts)
    job = Job(PROGRAMS / "elastic/split.py", arguments, ranks=4)
    await job.run()
    ends: dict[tuple[str, int], set[tuple[Any, ...]]] = {}
    for told in job.told:
        of, value = tuple(told["of"]), tuple(told["value"])
        total = told["k"] * sum(10.0**rank for rank in of)
        assert value == (total, total) and set(of) <= set(RANKS[told["group"]]), told
        ends.setdefault((told["group"], told["k"]), set()).add(of)
    assert all(len(each) == 1 for each in ends.values()), ends
    assert {name for name, _ in ends} == set(RANKS)
    whole = {key: each == {RANKS[key[0]]} for key, each in ends.items()}
    struck = {("row0", 2), ("column1", 2), ("column1", 4), ("row1", 4), ("row1", 5)}
    if "on_loss" in mode:
        assert all(whole.values()), ends
    assert all(whole[key] for key in whole.keys() - struck), ends
    assert {(t["rank"], t["life"]) for t in job.told} == {(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2)}
    # The other row has neither waited for the first death nor been cut short by it.
    calm = [t for t in job.told if t["group"] in ("row1", "column0") and t["k"] <= 3]
    assert calm and {(t["repairs"], t["epoch"]) for t in calm} == {(0, 1)}, calm
    last = [t for t in job.told if t["group"] == "all"]
    assert {(t["rank"], tuple(t["hosts"])) for t in last} == {(rank, hosts) for rank in range(4)}, last
