"""A job of ranks of which the last is killed, by SIGKILL, once all have said that they are ready."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes.kept_lines import Lines
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.rank_processes import PRELOAD
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport, RunResult
from zbmd.actors.rank.environment import ARENA_BYTES_DEFAULT
from zbmd.actors.view import OnLoss

MODULES = (*PRELOAD, "zbmd.actors.core.system", "zbmd.collectives.group.group", "numpy.random")
"""Imports of these jobs' ranks: once, in the template, not in each of them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the job. said: by what they said, the ranks that reported `{what: rank}`."""

    result: RunResult
    said: defaultdict[str, set[int]]
    lines: list[str]


async def run_and_kill_the_last(
    script: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int,
    links: str,
    arena_bytes: int = ARENA_BYTES_DEFAULT,
    more_modules: tuple[str, ...] = (),
) -> Ended:
    """Run `script`, whose ranks report `{"ready": rank}`, and more in that form; the job shrinks."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(directory / "cookie"))
    monkeypatch.setenv("ZBMD_LINKS", links)
    output, said = Lines(), defaultdict[str, set[int]](set)

    async def observe(event: HostEvent) -> None:
        if not isinstance(event, RankReport) or "kind" in event.payload:
            return
        ((what, rank),) = event.payload.items()
        said[what].add(rank)
        if what == "ready" and len(said[what]) == ranks:
            os.kill(host.ranks[ranks - 1].pid, signal.SIGKILL)

    config = HostConfig(
        target=str(script),
        world_size=ranks,
        on_loss=OnLoss.SHRINK,
        arena_bytes=arena_bytes,
        preload=(*MODULES, *more_modules),
    )
    host = Host(config, output=output, observer=observe)
    return Ended(await host.run(), said, output.lines)
