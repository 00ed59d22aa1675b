"""What is not finite is seen where it arises, and the first of all ranks' sightings is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.tools.chaos.small_job import SHAPE, write_text
from zbmd.training.autograd.first_non_finite import Lookout, Sighting, Where, given, lookout, taken
from zbmd.training.step.non_finite import first_of

NAN = np.array([1.0, np.nan])
FINE = np.ones(2)


def seen(where: Where, place: int, *, came: bool = False) -> Sighting:
    return Sighting(where=where, place=place, is_nan=True, bad=1, size=2, came=came)


@pytest.mark.parametrize(
    ("sightings", "rank"),
    [
        ([seen(Where.FORWARD, 1, came=True), seen(Where.FORWARD, 1)], 1),
        ([seen(Where.FORWARD, 2), seen(Where.FORWARD, 1)], 1),
        ([seen(Where.BACKWARD, 1), seen(Where.BACKWARD, 2)], 1),
        ([seen(Where.GRADIENT, 0), None, seen(Where.BACKWARD, 0)], 2),
        ([seen(Where.FORWARD, 0), seen(Where.WEIGHTS, 9)], 1),
        ([seen(Where.FORWARD, 1), seen(Where.FORWARD, 1)], 0),
        ([None, seen(Where.FORWARD, 1, came=True)], 1),
        ([None, None], -1),
    ],
)
def test_the_first_is_made_and_not_come_and_early_in_the_step(
    sightings: Sequence[Sighting | None], rank: int
) -> None:
    assert first_of(list(enumerate(sightings)))[0] == rank


def test_a_lookout_keeps_what_it_sees_first_and_whether_it_came() -> None:
    taken(NAN)  # nobody looks
    watching = Lookout()
    with watching.on():
        watching.at(Where.BACKWARD, 3)
        given(FINE)
        assert lookout() is watching and watching.first is None
        taken(NAN)
        given(NAN)
    assert lookout() is None
    assert watching.first == seen(Where.BACKWARD, 3, came=True)


POISONED_RANK = """
import os, sys
import numpy as np
from zbmd.training import __main__ as training, ops

def poisoned(tape, x):
    y = original(tape, x)
    y.data[0, 0] = np.nan
    return y

original = ops.squared_relu
if os.environ["RANK"] == "1":
    ops.squared_relu = poisoned
sys.exit(training.main())
"""


async def test_the_job_names_layer_rank_and_step(tmp_path: Path) -> None:
    script, output = tmp_path / "job.py", Lines()
    script.write_text(POISONED_RANK)
    data = write_text(tmp_path / "text")
    config = HostConfig(
        target=str(script),
        arguments=(*SHAPE, "--steps", "2", "--data", str(data), "--out", str(tmp_path / "run")),
        world_size=2,
        preload=("zbmd.training.replicated.job",),
    )
    ended = await Host(config, output=output).run()
    assert ended.exit_code != 0
    told = f"{ended.reason}\n" + "\n".join(output.lines)
    assert "step 0: " in told and "It began on rank 1, in the forward pass of blocks.0: NaN" in told, told
