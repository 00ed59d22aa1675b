"""Runs on a mesh under a host: whoever is killed is replaced, and the bits stay those of a calm run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.jobs.small_jobs import SmallJobs
from support.processes.captures import Captures

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.training.optim.mixed_precision import Precision
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

CASES = (
    ("pp=2", "auto", "rank0:shards.written,rank0#2:job.saved"),
    ("pp=2", "tcp", "rank1:pipeline.compute:20"),
    ("tp=2", "auto", "rank0:mirror.middle:3"),
    ("dp=2,tp=2", "auto", "rank3:mesh.backward:5"),
    ("dp=2,tp=2", "auto", "rank1:job.begin:3,rank1#2:collective.point:12"),  # as groups are made
    ("dp=2,pp=2", "auto", "rank1:job.begin:3,rank1#2:mirror.restore_middle"),
    # Rank 3 waits for a held-out message of rank 1, its stage before, which has given up, as it lost rank 0.
    ("pp=2,tp=2", "auto", "rank0:mirror.commit:2"),
    ("tp=2", "auto", "rank0:job.parted"),  # it alone tells the result, and its peers are gone
    ("dp=2", "auto", "rank1:pipeline.compute:7"),
    ("dp=2", "auto", "rank0:mirror.commit:3"),  # it alone logs, and the other one knows what
)
"""The last two are in float16, while attempts overflow. All points:
`python -m zbmd.tools.chaos.sweep --mesh dp=2,pp=2 -n 4 --second`, and so for other meshes."""

OF_RUNS = {"jobs", "hello", "directory", "upgrade-ledger", "operations", "pipeline-stage", "mirror"}
"""The machines of a run on a mesh: played again, each answers as it did, kills included."""


def test_kills_leave_no_trace_in_the_weights(
    small_jobs: SmallJobs, tmp_path: Path, captures: Captures
) -> None:
    data = write_text(tmp_path / "text")
    kinds: tuple[tuple[str, Precision], ...] = (("dp=1", "float32"), ("tp=2", "float32"), ("dp=1", "float16"))
    calm = small_jobs.undisturbed(tmp_path, data, kinds)  # dp and pp change no bit
    assert len(set(calm.values())) == len(calm)
    for number, (mesh, links, fault) in enumerate(CASES):
        captured = captures.into(tmp_path / f"{number}.zlog")
        ranks, precision = 2 ** len(mesh.split(",")), kinds[-1][1] if mesh == "dp=2" else "float32"
        found = small_jobs.run(
            tmp_path / str(number),
            data,
            fault=fault,
            links=links,
            mesh=mesh,
            world_size=ranks,
            precision=precision,
        )
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm["tp" in mesh, precision], (mesh, fault)
        assert captures.played(captured) == (0, OF_RUNS), (mesh, fault)


@pytest.mark.parametrize(
    "fault",
    ["rank0:job.begin:3", "rank2:mirror.commit:2,rank1:pipeline.compute:6", "rank0:collective.point:9"],
)
def test_a_run_that_shrinks_ends_with_the_same_bits(
    small_jobs: SmallJobs, tmp_path: Path, fault: str
) -> None:
    data = write_text(tmp_path / "text")
    calm = small_jobs.undisturbed(tmp_path, data, [("dp=1", "float32")])
    shrunk = small_jobs.run(
        tmp_path / "run", data, mesh="dp=3", world_size=3, fault=fault, on_loss=OnLoss.SHRINK
    )
    assert shrunk.deaths == len(faults.parse(fault)), (shrunk.failures, shrunk.told)
    assert shrunk.digest == calm[False, "float32"]


@pytest.mark.parametrize(
    ("mesh", "fault"),
    [
        ("dp=2,pp=2", "rank1:job.begin:3"),
        ("dp=2,tp=2", "rank0:mirror.prepared:3"),
        ("dp=3,pp=2", "rank2:pipeline.compute:20,rank1:job.met:2"),
        ("pp=2,dp=2", "rank3:mirror.commit:3"),
        ("dp=2,pp=2,tp=2", "rank5:job.begin:2"),
    ],
)
def test_a_mesh_goes_on_with_whole_replicas(
    small_jobs: SmallJobs, tmp_path: Path, mesh: str, fault: str
) -> None:
    """The other ranks of a replica that lost one wait, and are there when they are needed."""
    data, ranks = write_text(tmp_path / "text"), math.prod(int(axis[-1]) for axis in mesh.split(","))
    tensor = "tp" in mesh
    calm = small_jobs.undisturbed(tmp_path, data, [("tp=2" if tensor else "dp=1", "float32")])
    shrunk = small_jobs.run(
        tmp_path / "run", data, mesh=mesh, world_size=ranks, fault=fault, on_loss=OnLoss.SHRINK
    )
    assert shrunk.deaths == len(faults.parse(fault)), (shrunk.failures, shrunk.told)
    assert shrunk.digest == calm[tensor, "float32"]


def test_a_run_whose_state_is_cut_does_not_shrink(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data, fault = write_text(tmp_path / "text"), "rank1:job.begin:3"
    with pytest.raises(UserError, match="the state is cut for 2: run with --on-loss replace"):
        small_jobs.run(tmp_path / "run", data, mesh="pp=2", world_size=2, fault=fault, on_loss=OnLoss.SHRINK)


@pytest.mark.parametrize(
    ("setting", "fault"), [("dp=2,tp=2", "rank1:optimizer.gather:9"), ("zero", "rank2:optimizer.gather:7")]
)
def test_a_kill_while_a_matrix_is_gathered_leaves_no_trace(
    small_jobs: SmallJobs, tmp_path: Path, setting: str, fault: str
) -> None:
    """With Muon an update waits for others: some may have made it, when one that is waited for dies."""
    data = write_text(tmp_path / "text")
    mesh, zero = ("", 1) if setting == "zero" else (setting, 0)
    digests = [
        small_jobs.run(
            tmp_path / f"{setting}{bool(one)}",
            data,
            fault=one,
            mesh=mesh,
            zero=zero,
            world_size=4,
            optimizer="muon",
        )
        for one in ("", fault)
    ]
    assert [one.deaths for one in digests] == [0, 1], (setting, digests)
    assert digests[0].digest == digests[1].digest, setting


def test_a_stage_and_its_buddy_lost_at_once_are_told_in_words(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data, fault = write_text(tmp_path / "text"), "rank0:job.begin:3+rank1:job.begin:3"
    with pytest.raises(UserError, match="a rank and its buddy were lost at once"):
        small_jobs.run(tmp_path / "run", data, fault=fault, world_size=2, mesh="pp=2", keep_memory=False)


@pytest.mark.parametrize(
    ("mesh", "zero", "fault"),
    [
        ("dp=1", 0, "rank0:job.begin:3"),
        ("dp=2", 0, "rank0:mirror.prepared:3,rank1:job.begin:4"),  # one after the other, as they come there
        ("dp=2", 0, "rank0:mirror.commit:3+rank1:mirror.commit:3"),
        ("pp=2", 0, "rank0:job.begin:3+rank1:job.begin:3"),
        ("tp=2", 0, "rank0:mirror.copied:3,rank1:mirror.commit:3"),
        ("", 3, "rank0:zero.updated:2+rank1:zero.update:2"),
        (
            "dp=2,tp=2",
            1,
            "rank0:zero.norm:3,rank1:mirror.commit:3,rank2:zero.updated:3,rank3:mirror.middle:3",
        ),
    ],
)
def test_a_run_loses_nothing_when_all_of_its_ranks_are_killed(
    small_jobs: SmallJobs, tmp_path: Path, mesh: str, zero: int, fault: str
) -> None:
    """Their memory outlives them."""
    data, tensor, ranks = write_text(tmp_path / "text"), "tp" in mesh, len(faults.parse(fault))
    if mesh:
        calm = small_jobs.undisturbed(tmp_path, data, [("tp=2" if tensor else "dp=1", "float32")])
        digest = calm[tensor, "float32"]
    else:
        digest = small_jobs.run(tmp_path / "calm", data, world_size=1).digest
    found = small_jobs.run(tmp_path / "run", data, fault=fault, world_size=ranks, mesh=mesh, zero=zero)
    assert (found.deaths, found.digest) == (ranks, digest), (found.failures, found.told)
