"""`--recompute on`: the bits of a run that keeps its activations, on every kind of mesh."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.tools.chaos.small_job import small_recipe, write_text
from zbmd.training.model.weights import load_weights


async def trained(out: Path, data: Path, mesh: str, *, ranks: int, zero: int, recompute: bool) -> str:
    """Train on a mesh; return the digest of the weights."""
    recipe = small_recipe(out, data, mesh, zero=zero)
    recipe = msgspec.structs.replace(recipe, recompute=recompute, evaluate_every=0, checkpoint_every=0)
    output = Lines()
    config = HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(recipe.encode(),),
        world_size=ranks,
        preload=("zbmd.training.sharded.run",),
    )
    ended = await Host(config, output=output).run()
    assert ended.exit_code == 0, output.lines
    return hashlib.sha256(load_weights(out / "weights.safetensors")[0].data).hexdigest()


@pytest.mark.parametrize(
    ("mesh", "ranks", "zero"),
    [
        ("dp=1", 1, 0),
        ("dp=2", 2, 0),
        ("dp=2", 2, 1),
        ("dp=2", 2, 2),
        ("dp=2", 2, 3),
        ("tp=2", 2, 0),
        ("pp=2", 2, 0),
        ("dp=2,pp=2,tp=2", 8, 0),
    ],
)
async def test_recomputed_activations_are_those_that_are_not_kept(
    mesh: str, ranks: int, zero: int, tmp_path: Path
) -> None:
    data = write_text(tmp_path / "text")
    found = [
        await trained(tmp_path / str(again), data, mesh, ranks=ranks, zero=zero, recompute=again)
        for again in (False, True)
    ]
    assert found[0] == found[1]
    profiles = [list((tmp_path / str(again) / "profile").glob("*.jsonl")) for again in (False, True)]
    assert len(profiles[0]) == len(profiles[1]) == ranks
    computed_again = [{b'"recompute"' in path.read_bytes() for path in each} for each in profiles]
    assert computed_again == [{False}, {True}]
