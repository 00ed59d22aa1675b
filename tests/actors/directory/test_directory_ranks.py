"""Names and groups of the ranks of a job, which are real processes: one is killed, and another comes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.actors.view import OnLoss, Outcome


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


async def test_names_and_groups_of_a_job_go_with_a_rank_and_come_with_the_next(tmp_path: Path) -> None:
    output, first, second = Lines(), set[int](), set[int]()

    async def observe(event: HostEvent) -> None:
        match event:
            case RankReport(payload={"first": rank}):
                first.add(rank)
                if first == {0, 1, 2} and len(second) == 0:
                    os.kill(host.ranks[2].pid, signal.SIGKILL)
            case RankReport(payload={"second": rank}):
                second.add(rank)
            case _:
                pass

    config = HostConfig(
        target=str(PROGRAMS / "actors/directory.py"),
        arguments=(str(tmp_path / "lived"),),
        world_size=3,
        on_loss=OnLoss.REPLACE,
        arena_bytes=1 << 20,
        preload=("zbmd.actors.rank.member",),
    )
    host = Host(config, output=output, observer=observe)
    async with asyncio.timeout(60):
        result = await host.run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert (first, second, result.restarts) == ({0, 1, 2}, {0, 1, 2}, 1)
