"""ZeRO under a host: a rank that alone held its shard is killed, and the bits stay those of a calm run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs.by_words import plain_by
from support.jobs.small_jobs import SmallJobs
from support.processes.captures import Captures

from zbmd.tools.chaos.small_job import SHAPE, STEPS, write_text
from zbmd.training.optim.mixed_precision import Precision
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

CASES = (
    (3, "auto", "rank0:mirror.middle:3"),
    (1, "auto", "rank1:zero.updated:2"),
    (2, "auto", "rank1:zero.update:3,rank1#2:mirror.restore_middle"),
    (3, "tcp", "rank1:job.saved"),
    (2, "auto", "rank0:job.parted"),  # it alone tells the result, and its peers are gone
)
"""All of them: `python -m zbmd.tools.chaos.sweep --zero 3 --second`."""

MESH_CASES: tuple[tuple[str, int, Precision, str, str], ...] = (
    ("dp=2,tp=2", 3, "float32", "auto", "rank0:collective.point:1500"),  # other ranks are in a unit
    ("dp=2,tp=2", 1, "float32", "auto", "rank3:zero.updated:2"),
    ("dp=2,tp=2", 2, "float32", "tcp", "rank1:zero.backward:9,rank1#2:collective.point:12"),
    ("dp=2,pp=2", 2, "float32", "auto", "rank1:pipeline.compute:20"),
    ("dp=2,pp=2", 3, "float32", "tcp", "rank2:zero.update:3,rank2#2:mirror.restore_middle"),
    ("dp=2,pp=2", 3, "float32", "auto", "rank0:shards.written,rank0#2:job.parted"),
    ("dp=2,pp=2", 1, "float16", "auto", "rank3:mirror.middle:3"),  # while attempts overflow
    ("dp=2,pp=2,tp=2", 3, "float32", "auto", "rank5:zero.norm:3"),
)
"""All of them: `python -m zbmd.tools.chaos.sweep --zero 3 --mesh dp=2,tp=2 --second`, and so for others."""


def test_kills_leave_no_trace_in_the_weights(
    small_jobs: SmallJobs, tmp_path: Path, captures: Captures
) -> None:
    data = write_text(tmp_path / "text")
    arguments = [*SHAPE, "--steps", str(STEPS), "--data", str(data), "--out", str(tmp_path / "plain")]
    calm = plain_by(arguments)
    for number, (stage, links, fault) in enumerate(CASES):
        captured = captures.into(tmp_path / f"{number}.zlog")
        found = small_jobs.run(tmp_path / str(number), data, fault=fault, links=links, zero=stage)
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm.weights_sha256, fault
        exit_code, kinds = captures.played(captured)
        assert (exit_code, kinds >= {"zero-step", "mirror"}) == (0, True), (fault, kinds)


def test_kills_on_a_mesh_leave_no_trace_in_the_weights(
    small_jobs: SmallJobs, tmp_path: Path, captures: Captures
) -> None:
    data = write_text(tmp_path / "text")
    plain: tuple[tuple[str, Precision], ...] = (("dp=1", "float32"), ("tp=2", "float32"), ("dp=1", "float16"))
    calm = small_jobs.undisturbed(tmp_path, data, plain)  # neither dp, pp nor a stage of ZeRO changes a bit
    for number, (mesh, stage, precision, links, fault) in enumerate(MESH_CASES):
        captured = captures.into(tmp_path / f"{number}.zlog")
        found = small_jobs.run(
            tmp_path / str(number),
            data,
            fault=fault,
            links=links,
            zero=stage,
            mesh=mesh,
            world_size=2 ** len(mesh.split(",")),
            precision=precision,
        )
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm["tp" in mesh, precision], (mesh, fault)
        exit_code, kinds = captures.played(captured)
        wanted = {"zero-step", "mirror"} | ({"pipeline-stage"} if "pp" in mesh else set())
        assert (exit_code, kinds >= wanted) == (0, True), (fault, kinds)


def test_the_first_step_after_a_recovery_is_committed_before_the_next_one_ends(
    small_jobs: SmallJobs, tmp_path: Path
) -> None:
    """A rank that is lost again in the second step, before its vote, cannot uncommit the first one."""
    data, run = write_text(tmp_path / "text"), tmp_path / "run"
    fault = "rank1:zero.norm:3,rank1#2:zero.norm:2"
    found = small_jobs.run(run, data, fault=fault, world_size=2, zero=3)
    assert found.deaths == 2, found.told
    epochs = {one.version: one.epoch for one in read_log(run / LOG_NAME)[1]}
    assert epochs[1] < epochs[2] == epochs[3] < epochs[4], epochs


def test_a_rank_and_its_buddy_lost_at_once_are_told_in_words(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    fault = "rank0:zero.norm:3+rank1:zero.norm:3"
    with pytest.raises(UserError, match="a rank and its buddy were lost at once"):
        small_jobs.run(tmp_path / "run", data, fault=fault, world_size=2, zero=3, keep_memory=False)


def test_all_ranks_lost_at_a_checkpoint_go_on_from_it(small_jobs: SmallJobs, tmp_path: Path) -> None:
    """Nobody is left who holds the state that was committed last, and the checkpoint has it."""
    data = write_text(tmp_path / "text")
    calm = small_jobs.run(tmp_path / "calm", data, world_size=2, zero=3)
    fault = "rank0:job.saved+rank1:job.saved"
    found = small_jobs.run(tmp_path / "run", data, fault=fault, world_size=2, zero=3, keep_memory=False)
    assert (found.deaths, found.digest) == (2, calm.digest)
