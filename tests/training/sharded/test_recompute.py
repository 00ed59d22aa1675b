"""`--recompute on`: the bits of a run that keeps its activations, on every kind of mesh."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from support.jobs.small_jobs import TRAINS, SmallJobs

from zbmd.tools.chaos.small_job import small_recipe, write_text
from zbmd.training.model.weights import load_weights


def trained(
    small_jobs: SmallJobs, out: Path, data: Path, mesh: str, *, ranks: int, zero: int, recompute: bool
) -> str:
    """Train on a mesh; return the digest of the weights."""
    recipe = small_recipe(out, data, mesh, zero=zero)
    recipe = msgspec.structs.replace(recipe, recompute=recompute, evaluate_every=0, checkpoint_every=0)
    assert small_jobs.program(TRAINS, recipe.encode(), ranks=ranks).deaths == 0
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
def test_recomputed_activations_are_those_that_are_not_kept(
    small_jobs: SmallJobs, mesh: str, ranks: int, zero: int, tmp_path: Path
) -> None:
    data = write_text(tmp_path / "text")
    found = [
        trained(small_jobs, tmp_path / str(again), data, mesh, ranks=ranks, zero=zero, recompute=again)
        for again in (False, True)
    ]
    assert found[0] == found[1]
    profiles = [list((tmp_path / str(again) / "profile").glob("*.jsonl")) for again in (False, True)]
    assert len(profiles[0]) == len(profiles[1]) == ranks
    computed_again = [{b'"recompute"' in path.read_bytes() for path in each} for each in profiles]
    assert computed_again == [{False}, {True}]
