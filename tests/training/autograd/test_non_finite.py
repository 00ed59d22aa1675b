"""A value that is not finite is seen where it arises; the first of all ranks' sightings is reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from programs import PROGRAMS
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.tools.chaos.small_job import SHAPE, write_text
from zbmd.training.autograd.non_finite_probe import (
    NonFiniteProbe,
    NonFiniteValues,
    ProbePoint,
    active_probe,
    probe_received,
    probe_sent,
)
from zbmd.training.step.non_finite import earliest

NAN = np.array([1.0, np.nan])
FINE = np.ones(2)


def seen(where: ProbePoint, place: int, *, received: bool = False) -> NonFiniteValues:
    return NonFiniteValues(where=where, place=place, is_nan=True, bad=1, size=2, received=received)


@pytest.mark.parametrize(
    ("sightings", "rank"),
    [
        ([seen(ProbePoint.FORWARD, 1, received=True), seen(ProbePoint.FORWARD, 1)], 1),
        ([seen(ProbePoint.FORWARD, 2), seen(ProbePoint.FORWARD, 1)], 1),
        ([seen(ProbePoint.BACKWARD, 1), seen(ProbePoint.BACKWARD, 2)], 1),
        ([seen(ProbePoint.GRADIENT, 0), None, seen(ProbePoint.BACKWARD, 0)], 2),
        ([seen(ProbePoint.FORWARD, 0), seen(ProbePoint.WEIGHTS, 9)], 1),
        ([seen(ProbePoint.FORWARD, 1), seen(ProbePoint.FORWARD, 1)], 0),
        ([None, seen(ProbePoint.FORWARD, 1, received=True)], 1),
        ([None, None], -1),
    ],
)
def test_the_first_is_made_and_not_come_and_early_in_the_step(
    sightings: Sequence[NonFiniteValues | None], rank: int
) -> None:
    assert earliest(list(enumerate(sightings)))[0] == rank


def test_a_probe_keeps_what_it_finds_first_and_whether_it_was_received() -> None:
    probe_received(NAN)  # nobody looks
    watching = NonFiniteProbe()
    with watching.on():
        watching.at(ProbePoint.BACKWARD, 3)
        probe_sent(FINE)
        assert active_probe() is watching and watching.first is None
        probe_received(NAN)
        probe_sent(NAN)
    assert active_probe() is None
    assert watching.first == seen(ProbePoint.BACKWARD, 3, received=True)


async def test_the_job_names_layer_rank_and_step(tmp_path: Path) -> None:
    script, output = PROGRAMS / "training/poisoned_rank.py", Lines()
    data = write_text(tmp_path / "text")
    config = HostConfig(
        target=str(script),
        arguments=(*SHAPE, "--steps", "2", "--data", str(data), "--out", str(tmp_path / "run")),
        world_size=2,
        preload=("zbmd.training.sharded.run",),
    )
    ended = await Host(config, output=output).run()
    assert ended.exit_code != 0
    told = f"{ended.reason}\n" + "\n".join(output.lines)
    assert "step 0: " in told and "It began on rank 1, in the forward pass of blocks.0: NaN" in told, told
