"""ZeRO beside tensor and pipeline parallelism: the bits of the mesh without it, and the formulas' bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs.mesh_ranks import Case
from support.jobs.mesh_cases import on_ranks, told
from support.jobs.small_jobs import SmallJobs

from zbmd.tools.chaos.small_job import write_text
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import prepare_corpus
from zbmd.training.job.mesh import Mesh
from zbmd.training.model.gpt import GPT
from zbmd.training.model.tensor_parallel import PartOfGPT, cut_of
from zbmd.training.optim import LionConfig, MuonConfig
from zbmd.training.optim import clip as clipping
from zbmd.training.optim.clip import global_norm, norm_from, squares_of
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.sharded.stages import Stages
from zbmd.training.zero.layout import shards_of
from zbmd.training.zero.reduction import ShardedNorm
from zbmd.transport.errors import UserError

OURS = GPTConfig(context=8, width=24, heads=4, layers=2, dropout=0.1)
"""A width at which parameters have padding between them."""
GPT2 = GPTConfig(family="gpt2", activation="gelu", vocabulary=259, context=8, width=16, heads=4, layers=1)
TRAINING = TrainingConfig(
    steps=4, shards=5, sequences_per_shard=2, learning_rate=3e-4, warmup_steps=2, clip_norm=0.1
)
NORM_BLOCK = 100


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(str(write_text(directory / "text")), directory, context=OURS.context)


MUON = replace(TRAINING, optimizer=MuonConfig())
LION = replace(TRAINING, optimizer=LionConfig())
WITHOUT_STAGES = (
    Case(name="tp", mesh="dp=2,tp=2", model=OURS, training=TRAINING, corpus=""),
    Case(
        name="half", mesh="dp=2,tp=2", model=OURS, training=LION, corpus="", dtype="bfloat16", recompute=True
    ),
    Case(name="muon", mesh="dp=2,tp=2", model=OURS, training=MUON, corpus=""),
    Case(name="tied", mesh="dp=4", model=GPT2, training=TRAINING, corpus=""),
    Case(name="tied-cut", mesh="dp=2,tp=2", model=GPT2, training=TRAINING, corpus=""),
)
STAGED: tuple[tuple[int, tuple[int, ...], Case], ...] = (
    (4, (1, 2, 3), Case(name="pp", mesh="dp=2,pp=2", model=OURS, training=TRAINING, corpus="")),
    (
        4,
        (2,),
        Case(
            name="half",
            mesh="dp=2,pp=2",
            model=OURS,
            training=TRAINING,
            corpus="",
            dtype="float16",
            loss_scale=2.0**24,
            schedule="zb-h1",
        ),
    ),
    (
        4,
        (3,),
        Case(
            name="chunks",
            mesh="dp=2,pp=2",
            model=replace(OURS, layers=4),
            training=LION,
            corpus="",
            chunks=2,
        ),
    ),
    (8, (1, 3), Case(name="cube", mesh="dp=2,pp=2,tp=2", model=OURS, training=MUON, corpus="")),
)
"""Ranks, stages of ZeRO, and the case without it."""
MOVES = {1: (1, 4), 3: (4, 1)}
"""Shards of each of two pipelines, from these steps on: as `--on-straggler rebalance` moves them."""


def test_every_stage_has_the_bits_of_the_mesh_without_it(
    small_jobs: SmallJobs, corpus: Path, tmp_path: Path
) -> None:
    """Weights, losses and norms."""
    plain = [msgspec.structs.replace(case, corpus=str(corpus)) for case in WITHOUT_STAGES]
    sharded = [of_stage(case, stage) for case in plain for stage in (1, 2, 3)]
    found = on_ranks(small_jobs, tmp_path, 4, *plain, *sharded)
    for case in plain:
        norms = told(tmp_path, 4, case.name)[0]["norms"].tolist()
        for stage in (1, 2, 3):
            name = of_stage(case, stage).name
            assert found[name][0].tobytes() == found[case.name][0].tobytes(), name
            assert found[name][1] == found[case.name][1], name
            assert told(tmp_path, 4, name)[0]["norms"].tolist() == norms, name


@pytest.mark.parametrize(("ranks", "stages", "case"), STAGED, ids=[case.name for _, _, case in STAGED])
def test_so_it_is_along_pp(
    small_jobs: SmallJobs, ranks: int, stages: tuple[int, ...], case: Case, corpus: Path, tmp_path: Path
) -> None:
    """Also where shards move between pipelines."""
    plain = msgspec.structs.replace(case, corpus=str(corpus))
    wanted = on_ranks(small_jobs, tmp_path, ranks, plain)[plain.name]
    norms = told(tmp_path, ranks, plain.name)[0]["norms"].tolist()
    for stage in stages:
        sharded = msgspec.structs.replace(of_stage(plain, stage), moves=MOVES)
        weights, losses = on_ranks(small_jobs, tmp_path, ranks, sharded)[sharded.name]
        assert (weights.tobytes(), losses) == (wanted[0].tobytes(), wanted[1]), sharded.name
        assert told(tmp_path, ranks, sharded.name)[0]["norms"].tolist() == norms, sharded.name


def of_stage(case: Case, stage: int) -> Case:
    return msgspec.structs.replace(case, name=f"{case.name}-{stage}", zero=stage)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,pp=2"])
def test_bytes_of_model_state_are_those_of_the_paper_for_a_part(
    small_jobs: SmallJobs, mesh: str, corpus: Path, tmp_path: Path
) -> None:
    """A rank holds 4 + 12 / N, 2 + 14 / N or 16 / N bytes of each parameter of its stage and slice."""
    config, few = GPTConfig(context=8, width=64, heads=2, layers=6), replace(TRAINING, steps=1, shards=2)
    cases = [
        Case(
            name=f"{mesh}-{stage}",
            mesh=mesh,
            model=config,
            training=few,
            corpus=str(corpus),
            dtype="bfloat16",
            zero=stage,
        )
        for stage in (1, 2, 3)
    ]
    for case in cases:
        on_ranks(small_jobs, tmp_path, 4, case)
    goals = {1: 4 + 12 / 2, 2: 2 + 14 / 2, 3: 16 / 2}
    for case in cases:
        ranks = told(tmp_path, 4, case.name)
        held = sum(int(one["parameters"]) for one in ranks) // 2
        assert held == pytest.approx(GPT(config).layout.parameter_count, rel=0.01)
        for one in ranks:
            wanted = goals[case.zero] * int(one["parameters"])
            assert int(one["state_bytes"]) == pytest.approx(wanted, rel=0.03), case.name


@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "dp=2,tp=2"])
def test_what_diverges_is_named_by_layer_rank_and_step(
    small_jobs: SmallJobs, mesh: str, corpus: Path, tmp_path: Path
) -> None:
    case = Case(
        name="poisoned",
        mesh=mesh,
        model=OURS,
        training=TRAINING,
        corpus=str(corpus),
        zero=3,
        poisoned=3,
        poison="backward",
    )
    named = "blocks.1" if "pp" in mesh else r"blocks\.\d"
    with pytest.raises(UserError, match=rf"step 0: .* It began on rank 3, in the backward pass of {named}"):
        on_ranks(small_jobs, tmp_path, 4, case)


@given(
    sizes=st.tuples(st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4])),
    states=st.integers(0, 3),
    chunks=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
    narrow=st.booleans(),
)
def test_the_norm_of_shards_has_the_bits_of_that_of_parts(
    sizes: tuple[int, int, int], states: int, chunks: int, seed: int, narrow: bool
) -> None:
    """Whatever the blocks are that it is summed in: here, smaller than most parameters.

    states: how many ranks along `dp` hold each shard, if the state is sharded along `fsdp`.
    """
    axes = ("dp", "fsdp", "pp", "tp") if states else ("dp", "pp", "tp")
    mesh = Mesh(axes, (states, *sizes) if states else sizes)
    data, stages, parts = sizes
    config, luck = replace(OURS, layers=4), np.random.default_rng(seed)
    dtype = np.float16 if narrow else np.float32
    models = [PartOfGPT(config, part, parts) if parts > 1 else GPT(config) for part in range(parts)]
    flats = [luck.standard_normal(model.layout.size).astype(dtype) for model in models]
    for index, slot in enumerate(models[0].layout.slots):
        for model, flat in zip(models, flats, strict=True):
            flat[slice(model.layout.slots[index].span.stop, None)][:16] *= 0  # padding, or what comes next
            if not cut_of(slot.name)[1]:
                flat[model.layout.slots[index].span] = flats[0][slot.span]
    cuts = Stages(chunks=chunks if stages > 1 else 1).cuts_of(config, stages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "NORM_BLOCK", NORM_BLOCK)
        norms, pieces = ShardedNorm(mesh, models[0], cuts), list[np.ndarray]()
        for rank in range(mesh.world_size):
            here = mesh.coordinates(rank)
            own = OwnParts(models[here["tp"]], cuts, stages=stages, stage=here["pp"])
            shards = shards_of(own, data)
            shard = shards.shard_of(own.cut(flats[here["tp"]]), here[mesh.sharded_axis])
            pieces.append(norms.pieces(rank, [shard[unit.in_shard] for unit in shards.units]))
        assert [len(one) for one in pieces] == norms.lengths
        found = norms.norm(pieces)
        assert found == (global_norm(flats[0], xp=np) if parts == 1 else norm_along_tp(models, flats))


def norm_along_tp(models: list[GPT], flats: list[np.ndarray]) -> float:
    """As it is without ZeRO."""
    total = 0.0
    for index, slot in enumerate(models[0].layout.slots):
        held = range(len(models)) if cut_of(slot.name)[1] else range(1)
        views = [models[part].layout.views(flats[part])[index].reshape(-1) for part in held]
        squares = 0.0
        for view in views:
            squares += squares_of(view, xp=np)
        total += squares
    return norm_from(total)
