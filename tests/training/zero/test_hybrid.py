"""States that are sharded along `fsdp`, and whole along `dp`: same bits, fewer bytes, and replicas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from programs.mesh_ranks import Case
from support.jobs.mesh_cases import Result, on_ranks, told
from support.jobs.small_jobs import SmallJobs
from support.processes.captures import Captures

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import STEPS, write_text
from zbmd.tools.runs.commands import audit_run
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import prepare_corpus
from zbmd.training.optim import LionConfig, MuonConfig
from zbmd.training.optim.mixed_precision import Precision
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.training.sharded.options import TrainOptions
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

OURS = GPTConfig(context=8, width=24, heads=4, layers=2, dropout=0.1)
"""A width at which parameters have padding between them."""
GPT2 = GPTConfig(family="gpt2", activation="gelu", vocabulary=259, context=8, width=16, heads=4, layers=1)
TRAINING = TrainingConfig(
    steps=4, shards=5, sequences_per_shard=2, learning_rate=3e-4, warmup_steps=2, clip_norm=0.1
)
LION = replace(TRAINING, optimizer=LionConfig())
MUON = replace(TRAINING, optimizer=MuonConfig())


def case_of(
    name: str,
    mesh: str,
    *,
    model: GPTConfig = OURS,
    training: TrainingConfig = TRAINING,
    dtype: Precision = "float32",
) -> Case:
    scale = 2.0**24 if dtype == "float16" else 1.0
    return Case(
        name=name, mesh=mesh, model=model, training=training, corpus="", dtype=dtype, loss_scale=scale
    )


CASES: tuple[tuple[Case, tuple[str, ...], tuple[int, ...]], ...] = (
    (case_of("flat", "dp=4"), ("dp=2,fsdp=2", "fsdp=2,dp=2"), (1, 2, 3)),
    (case_of("bfloat16", "dp=4", training=LION, dtype="bfloat16"), ("dp=2,fsdp=2",), (1, 3)),
    (case_of("overflow", "dp=4", dtype="float16"), ("dp=2,fsdp=2",), (2,)),
    (case_of("muon", "dp=4", training=MUON), ("dp=2,fsdp=2",), (2, 3)),
    (case_of("tied", "dp=4", model=GPT2), ("dp=2,fsdp=2",), (1, 3)),
    (case_of("uneven", "dp=6"), ("dp=3,fsdp=2", "dp=2,fsdp=3"), (3,)),  # a rank has no shard
    (case_of("tp", "dp=4,tp=2", training=MUON), ("dp=2,fsdp=2,tp=2",), (1, 3)),
    (case_of("pp", "dp=4,pp=2"), ("dp=2,fsdp=2,pp=2", "dp=2,pp=2,fsdp=2"), (2, 3)),
)
"""A mesh on which all hold the whole state, and those with the same data ranks that shard it, by stages."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(str(write_text(directory / "text")), directory, context=OURS.context)


@pytest.mark.parametrize(("plain", "meshes", "stages"), CASES, ids=[case.name for case, _, _ in CASES])
def test_the_bits_are_those_of_a_mesh_with_whole_states(
    small_jobs: SmallJobs,
    plain: Case,
    meshes: tuple[str, ...],
    stages: tuple[int, ...],
    corpus: Path,
    tmp_path: Path,
) -> None:
    """Weights, losses and norms."""
    plain = msgspec.structs.replace(plain, corpus=str(corpus))
    if plain.name == "pp":
        plain = msgspec.structs.replace(plain, training=replace(TRAINING, shards=7))
    ranks = math.prod(int(axis[-1]) for axis in plain.mesh.split(","))
    hybrids = [
        msgspec.structs.replace(plain, name=f"{mesh}-{stage}", mesh=mesh, zero=stage)
        for mesh in meshes
        for stage in stages
    ]
    runs = [[plain], *([one] for one in hybrids)] if "pp" in plain.mesh else [[plain, *hybrids]]
    found = dict[str, Result]()  # a process has one pipeline
    for cases in runs:
        found |= on_ranks(small_jobs, tmp_path, ranks, *cases)
    norms = told(tmp_path, ranks, plain.name)[0]["norms"].tolist()
    for one in hybrids:
        assert found[one.name][0].tobytes() == found[plain.name][0].tobytes(), one.name
        assert found[one.name][1] == found[plain.name][1], one.name
        assert told(tmp_path, ranks, one.name)[0]["norms"].tolist() == norms, one.name


def test_bytes_of_model_state_are_those_of_the_ranks_that_share_it(
    small_jobs: SmallJobs, corpus: Path, tmp_path: Path
) -> None:
    """A rank holds 4 + 12 / N, 2 + 14 / N or 16 / N bytes of each parameter, whatever `dp` is."""
    config, few = GPTConfig(context=8, width=64, heads=2, layers=6), replace(TRAINING, steps=1, shards=4)
    goals = {1: 4 + 12 / 2, 2: 2 + 14 / 2, 3: 16 / 2}
    cases = [
        msgspec.structs.replace(
            case_of(f"{stage}", "dp=2,fsdp=2", model=config, training=few, dtype="bfloat16"),
            corpus=str(corpus),
            zero=stage,
        )
        for stage in goals
    ]
    on_ranks(small_jobs, tmp_path, 4, *cases)
    for case in cases:
        for one in told(tmp_path, 4, case.name):
            wanted = goals[case.zero] * int(one["parameters"])
            assert int(one["state_bytes"]) == pytest.approx(wanted, rel=0.03), case.name


KILLS: tuple[tuple[str, int, Precision, str, str], ...] = (
    ("dp=2,fsdp=2", 3, "float32", "auto", "rank0:mirror.prepared:3"),
    ("dp=2,fsdp=2", 1, "float32", "auto", "rank3:zero.updated:2,rank3#2:mirror.restore_middle"),
    ("dp=2,fsdp=2", 3, "float32", "auto", "rank2:zero.backward:9,rank1:zero.backward:9"),  # two shards
    ("dp=2,fsdp=2", 2, "float16", "tcp", "rank1:collective.point:900"),  # while attempts overflow
    ("dp=2,fsdp=2", 3, "float32", "auto", "rank0:mirror.commit:3"),  # it alone logs
    ("dp=2,fsdp=2,pp=2", 3, "float32", "auto", "rank5:pipeline.compute:9"),
    ("dp=2,fsdp=2,tp=2", 2, "float32", "auto", "rank6:zero.update:3,rank6#2:collective.point:12"),
    ("dp=1,fsdp=4", 3, "float32", "auto", "rank2:mirror.middle:3"),  # no replicas: buddies have copies
)


def test_kills_leave_no_trace_in_the_weights(
    small_jobs: SmallJobs, tmp_path: Path, captures: Captures
) -> None:
    data = write_text(tmp_path / "text")
    plain: tuple[tuple[str, Precision], ...] = (("dp=1", "float32"), ("tp=2", "float32"), ("dp=1", "float16"))
    calm = small_jobs.undisturbed(tmp_path, data, plain)
    for number, (mesh, stage, precision, links, fault) in enumerate(KILLS):
        captured = captures.into(tmp_path / f"{number}.zlog")
        found = small_jobs.run(
            tmp_path / str(number),
            data,
            fault=fault,
            links=links,
            zero=stage,
            mesh=mesh,
            world_size=math.prod(int(axis[-1]) for axis in mesh.split(",")),
            precision=precision,
        )
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm["tp" in mesh, precision], (mesh, fault)
        exit_code, kinds = captures.played(captured)
        assert (exit_code, kinds >= {"zero-step", "mirror"}) == (0, True), (fault, kinds)
        audited = audit_run(tmp_path / str(number))
        assert (audited.samples_skipped, audited.samples_repeated, audited.steps_lost) == (0, 0, 0), fault


def test_all_ranks_are_killed_and_all_that_hold_one_shard(small_jobs: SmallJobs, tmp_path: Path) -> None:
    """The memory of the dead outlives them; without it, the loss of all copies of a shard ends the run."""
    data = write_text(tmp_path / "text")
    calm = small_jobs.undisturbed(tmp_path, data, [("dp=1", "float32")])
    points = ("zero.update:3", "mirror.prepared:3", "zero.norm:3", "mirror.commit:3")
    fault = ",".join(f"rank{rank}:{point}" for rank, point in enumerate(points))
    found = small_jobs.run(tmp_path / "all", data, fault=fault, world_size=4, mesh="dp=2,fsdp=2", zero=3)
    assert (found.deaths, found.digest) == (4, calm[False, "float32"]), found.told
    alike = "rank1:zero.norm:3+rank3:zero.norm:3"
    with pytest.raises(UserError, match="all ranks that held the same state were lost at once"):
        small_jobs.run(
            tmp_path / "lost",
            data,
            fault=alike,
            world_size=4,
            mesh="dp=2,fsdp=2",
            zero=3,
            keep_memory=False,
        )


@pytest.mark.parametrize(
    ("mesh", "stage", "fault"),
    [
        ("dp=2,fsdp=2", 3, "rank1:job.begin:3"),
        ("dp=3,fsdp=2", 1, "rank2:zero.update:3,rank5:job.met:2"),
        ("dp=2,fsdp=2,pp=2", 2, "rank6:mirror.prepared:2"),
    ],
)
def test_a_run_goes_on_with_whole_replicas(
    small_jobs: SmallJobs, tmp_path: Path, mesh: str, stage: int, fault: str
) -> None:
    """Nothing is re-sharded: those that are left hold all of it."""
    data, ranks = write_text(tmp_path / "text"), math.prod(int(axis[-1]) for axis in mesh.split(","))
    calm = small_jobs.undisturbed(tmp_path, data, [("dp=1", "float32")])
    shrunk = small_jobs.run(
        tmp_path / "run", data, mesh=mesh, zero=stage, world_size=ranks, fault=fault, on_loss=OnLoss.SHRINK
    )
    ended = shrunk.deaths, shrunk.digest
    assert ended == (len(faults.parse(fault)), calm[False, "float32"]), shrunk.told
    members = [record.members for record in read_log(tmp_path / "run" / LOG_NAME)[1]]
    assert (len(members), len(members[-1])) == (STEPS, ranks // int(mesh[3])), members


def test_a_mesh_with_fsdp_shards_all_of_the_state() -> None:
    assert TrainOptions(out=Path("run"), mesh="dp=2,fsdp=2").zero == 3
    assert TrainOptions(out=Path("run"), mesh="dp=2,fsdp=2", zero=1).zero == 1
    assert TrainOptions(out=Path("run"), mesh="dp=2,tp=2").zero == 0
    options = TrainOptions(out=Path("run"), mesh="fsdp=-1")
    assert TrainOptions.decode(options.encode()) == options
    with pytest.raises(UserError, match="float32: choose another --precision"):
        msgspec.structs.replace(options, precision="float64", checkpoint_every=0).check()
