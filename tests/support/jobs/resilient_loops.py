"""Runs of scripts with a resilient loop, and what their ranks print of steps and of their final state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from support.processes.kept_lines import Lines
from zbmd.actors.cluster.jobs.host import Host, HostConfig, RunResult
from zbmd.actors.view import OnLoss


async def train(
    program: Path, mode: str, fault: str = "", ranks: int = 3, more: Mapping[str, str] | None = None
) -> tuple[RunResult, list[str]]:
    """Return how the run ended, and what its ranks printed. fault: of `ZBMD_FAULT`. more: variables."""
    variables = {"MODE": mode, **({"ZBMD_FAULT": fault} if fault else {}), **(more or {})}
    output = Lines()
    config = HostConfig(
        target=str(program),
        world_size=ranks,
        on_loss=OnLoss.REPLACE,
        arena_bytes=32 << 20,
        environment=variables,
    )
    return await Host(config, output=output).run(), output.lines


def steps_in(lines: list[str]) -> list[str]:
    """Return the reports of ranks about steps and their final state."""
    return [found[0] for line in lines if (found := re.findall(r"(?:step|final) \d*.*rank.*", line))]


def check_as_undisturbed(told: Collection[str], wanted: Collection[str], fault: str) -> None:
    """Check the reports of a run with kills beside those of one without.

    Each is there once, and none is another; those of ranks that live are all there, and so are the last ones.
    """
    assert set(told) <= set(wanted)
    assert max(Counter(told).values()) == 1
    killed = {int(entry[4]) for entry in fault.split(",")}
    whole = {line for line in wanted if int(line.rpartition("rank ")[2][0]) not in killed}
    assert whole | {line for line in wanted if "final" in line} <= set(told)
