"""After a loss, no rank of a job has the memory of a dead one mapped, nor has the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.kept_lines import Lines
from support.processes.mapped_segments import mapped_segments

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.tools.chaos.small_job import small_recipe, write_text
from zbmd.transport import kill_points as faults

RANKS = 2
ONCE = {"0": 1, "1": 1, "1023": 1}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("dp", "rank1:mirror.prepared:2"), ("zero", "rank1:zero.norm:2"), ("pp", "rank1:job.begin:2")],
)
async def test_ranks_of_a_job_unmap_the_dead(kind: str, fault: str, tmp_path: Path) -> None:
    data, out = write_text(tmp_path / "text"), tmp_path / "run"
    recipe = small_recipe(out, data, "pp=2" if kind == "pp" else "", zero=3 if kind == "zero" else 0)
    found: list[dict[str, int]] = []

    async def observe(event: HostEvent) -> None:
        if (
            isinstance(event, RankReport)
            and event.payload.get("kind") == "step"
            and event.payload["epoch"] > 1
        ):
            found.extend(mapped_segments(rank.pid) for rank in host.ranks.values())

    output = Lines()
    config = HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(recipe.encode(),),
        world_size=RANKS,
        environment={faults.FAULT_VARIABLE: fault},
        preload=("zbmd.training.sharded.run",),
    )
    host = Host(config, output=output, observer=observe)
    ended = await host.run()
    assert ended.exit_code == 0 and len(ended.failures) == 1, output.lines
    assert ONCE in found and all(each.items() <= ONCE.items() for each in found), found
