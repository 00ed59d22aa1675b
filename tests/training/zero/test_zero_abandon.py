"""A step that is abandoned gives its memory back at once: the next one needs it, and no collection is due."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import PROGRAMS
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.training.data.corpus import prepare_corpus


@pytest.mark.parametrize("point", ["gather", "reduce", "norm"])
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2", 2), ("dp=2,pp=2", 4), ("dp=2,tp=2", 4)])
async def test_an_abandoned_step_leaves_nothing_in_the_arena(
    mesh: str, ranks: int, point: str, tmp_path: Path
) -> None:
    corpus = prepare_corpus(str(write_text(tmp_path / "text")), tmp_path, context=8)
    output = Lines()
    config = HostConfig(
        target=str(PROGRAMS / "training/zero_abandons.py"),
        arguments=(str(corpus), mesh, point),
        world_size=ranks,
        on_loss=OnLoss.SHRINK,
        preload=("zbmd.training.sharded.zero_trainer",),
    )
    ended = await Host(config, output=output).run()
    assert ended.exit_code == 0, output.lines
    left = [line for line in output.lines if "leaves" in line]
    assert len(left) == 2 * ranks and all(line.endswith("leaves 0 bytes") for line in left), output.lines
