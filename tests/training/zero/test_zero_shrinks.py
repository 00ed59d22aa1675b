"""ZeRO under a host that does not replace the dead: the state is recut, and the bits stay."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs.small_jobs import SmallJobs
from support.processes.captures import Captures

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.config import GPTConfig
from zbmd.training.job.mesh import Mesh
from zbmd.training.optim import OPTIMIZERS, gather_alone
from zbmd.training.optim.mixed_precision import Precision, storage_dtype
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.sharded.stages import ONE_EACH, models_along_tp
from zbmd.training.step.reduction import ShardSum
from zbmd.training.zero.layout import ShardLayout, shards_of
from zbmd.training.zero.rank import PartOfModel, ZeroRank, slot_elements
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

CASES: tuple[tuple[int, str, Precision, str], ...] = (
    (3, "dp=3", "float32", "rank1:job.begin:3"),
    (1, "dp=3", "float32", "rank0:mirror.commit:3"),
    (2, "dp=3", "float16", "rank2:zero.updated:2"),
    (3, "dp=4", "float32", "rank1:zero.update:3,rank3:mirror.divide"),
    (2, "dp=4", "float32", "rank0:job.begin:4,rank2:mirror.reshard_middle"),
    (1, "dp=4", "float32", "rank3:mirror.commit:2,rank1:mirror.resharded"),
    (3, "dp=4", "float32", "rank2:job.begin:4,rank0:mirror.forget"),
    (3, "dp=2", "float32", "rank0:job.begin:3"),
)
MESH_CASES: tuple[tuple[int, str, Precision, str], ...] = (
    (3, "dp=2,tp=2", "float32", "rank3:job.begin:3"),  # rank 2 waits, whose part has its copy at rank 3
    (1, "dp=2,pp=2", "float32", "rank1:zero.update:3"),
    (2, "pp=2,dp=2", "float16", "rank3:mirror.commit:3"),
    (3, "dp=3,pp=2", "float32", "rank2:pipeline.compute:20,rank5:mirror.reshard_middle"),
    (2, "dp=3,tp=2", "float32", "rank0:zero.norm:3,rank3:mirror.forget"),
    (1, "dp=2,pp=2,tp=2", "float32", "rank5:zero.updated:2"),
)


@pytest.mark.parametrize("cases", [CASES, MESH_CASES])
def test_a_run_that_shrinks_ends_with_the_same_bits(
    small_jobs: SmallJobs,
    tmp_path: Path,
    captures: Captures,
    cases: tuple[tuple[int, str, Precision, str], ...],
) -> None:
    """On a mesh, the other ranks of a replica that lost one wait, and what they hold is read there."""
    data = write_text(tmp_path / "text")
    kinds: tuple[tuple[str, Precision], ...] = (("dp=1", "float32"), ("dp=1", "float16"), ("tp=2", "float32"))
    calm = small_jobs.undisturbed(tmp_path, data, kinds)  # dp, pp and the stage change no bit
    for number, (stage, mesh, precision, fault) in enumerate(cases):
        captured = captures.into(tmp_path / f"{number}.zlog")
        found = small_jobs.run(
            tmp_path / str(number),
            data,
            fault=fault,
            zero=stage,
            mesh=mesh,
            world_size=math.prod(int(axis[-1]) for axis in mesh.split(",")),
            precision=precision,
            on_loss=OnLoss.SHRINK,
        )
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm["tp" in mesh, precision], (mesh, fault)
        exit_code, played = captures.played(captured)
        assert (exit_code, played >= {"zero-step", "resizing-mirror"}) == (0, True), (fault, played)


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=9),
    ranks=st.integers(1, 6),
    parts=st.integers(1, 6),
)
def test_a_part_is_made_up_of_those_of_another_cut(sizes: list[int], ranks: int, parts: int) -> None:
    """Every element comes from one place, and the rest is padding."""
    layout = ParameterLayout.of({str(number): (size,) for number, size in enumerate(sizes)})
    middle = (len(sizes) + 1) // 2
    groups = [slice(0, middle), slice(middle, len(sizes))] if middle < len(sizes) else [slice(0, middle)]
    new = ShardLayout.of(layout, tuple(groups), ranks=ranks)
    old, flat = new.recut(parts), np.arange(1, layout.size + 1, dtype=np.float32)
    whole = np.zeros_like(flat)
    for slot in layout.slots:
        whole[slot.span] = flat[slot.span]
    shards = [old.shard_of(whole, part) for part in range(parts)]
    for rank in range(ranks):
        made = np.zeros(new.shard_size, np.float32)
        for part, start, length, into in new.spans_from(old, rank):
            assert not made[into : into + length].any()
            made[into : into + length] = shards[part][start : start + length]
        assert np.array_equal(made, new.shard_of(whole, rank))


@given(
    axes=st.permutations(["dp", "pp", "tp"]),
    pipeline=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 2]),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    stage=st.sampled_from([1, 2, 3]),
    storage=st.sampled_from(["float32", "float16"]),
)
def test_a_mesh_is_recut_part_by_part(
    axes: list[str],
    pipeline: int,
    tensor: int,
    before: int,
    after: int,
    stage: int,
    storage: Precision,
) -> None:
    """Each rank reads its shard from ranks of the old mesh that hold the same stage and slice."""
    config, optimizer = GPTConfig(context=4, width=8, heads=2, layers=2, vocabulary=16), OPTIMIZERS["adamw"]
    sizes = {"dp": before, "pp": pipeline, "tp": tensor}
    old = Mesh(tuple(axes), tuple(sizes[axis] for axis in axes))
    new, luck = old.along_data(after), np.random.default_rng(before)
    assert storage != "float64"
    models, dtype = models_along_tp(config, old), storage_dtype(storage)
    wholes: dict[int, list[np.ndarray]] = {}

    def slot(mesh: Mesh, rank: int, shards: ShardLayout) -> np.ndarray:
        """Masters, moments and loss scale of a rank, cut out of those of its stage and slice."""
        at, key = mesh.coordinates(rank), mesh.state_keys()[rank]
        if key not in wholes:
            flats = [luck.random(shards.layout.size, np.float32) for _ in range(3)]
            masks = [np.zeros_like(flat) for flat in flats]
            for mask, flat in zip(masks, flats, strict=True):
                for one in shards.layout.slots:
                    mask[one.span] = flat[one.span]
            wholes[key] = masks
        made = [shards.shard_of(flat, at["dp"]) for flat in wholes[key]]
        scale = slot_elements(shards, optimizer, dtype) - 3 * shards.shard_size
        return np.concatenate([*made, np.full(scale, 8.0, np.float32)])

    def shards_at(mesh: Mesh, rank: int) -> ShardLayout:
        at = mesh.coordinates(rank)
        own = OwnParts(models[at["tp"]], ONE_EACH.cuts_of(config, pipeline), stages=pipeline, stage=at["pp"])
        return shards_of(own, mesh.size("dp"))

    slots = [slot(old, rank, shards_at(old, rank)) for rank in range(old.world_size)]
    for rank in range(new.world_size):
        shards, at = shards_at(new, rank), new.coordinates(rank)
        part = PartOfModel(
            initial=lambda: np.zeros(0),
            cuts=[],
            matrices={},
            gather=gather_alone,
            walk=None,
            places=lambda ranks, rank=rank: new.alike(rank, ranks),  # type: ignore[misc]
        )
        held = ZeroRank(
            *(models[at["tp"]], shards, ShardSum.of(4, after)),
            rank=at["dp"],
            stage=stage,
            storage=storage,
            optimizer=optimizer,
            seed=1,
            keep_previous=True,
            part=part,
        )
        elements, spans = held.reshard(old.world_size)
        made = np.zeros_like(held.slots[0])
        for place, start, length, into in spans:
            assert len(slots[place]) == elements
            made[into : into + length] = slots[place][start : start + length]
        assert np.array_equal(made, slot(new, rank, shards))


def test_a_part_and_its_copy_lost_at_once_are_told_in_words(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data, fault = write_text(tmp_path / "text"), "rank0:job.begin:3+rank1:job.begin:3"
    with pytest.raises(UserError, match="neither originals nor copies are left: a rank and its buddy"):
        small_jobs.run(
            tmp_path / "run", data, fault=fault, zero=3, mesh="dp=3", world_size=3, on_loss=OnLoss.SHRINK
        )
