"""The training job under a host: killed where it hurts, it ends with the same bits and a balanced ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs.small_jobs import SmallJobs

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.transport import kill_points as faults

ALL_SAVED = "rank0:job.saved+rank1:job.saved+rank2:job.saved"
CASES = (
    "rank0:mesh.backward",
    "rank1:job.begin:2",
    "rank2:mirror.prepared:3",
    "rank0:mirror.prepared:2",
    "rank1:mirror.commit:2",
    "rank0:mirror.commit:3",
    "rank0:job.logged:3",
    "rank0:shards.written",
    "rank2:job.parted",
    "rank1:collective.point:40",
    "rank2:collective.point:75",
    "rank1:job.begin:3,rank1#2:mirror.restore_middle",
    "rank1:job.begin:3,rank1#2:collective.point:12",
    "rank1:job.begin:3,rank0:job.met:2",
    ALL_SAVED,
    f"{ALL_SAVED},rank1#2:job.meet",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def calm(small_jobs: SmallJobs, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of three ranks that nobody kills."""
    found = small_jobs.run(tmp_path_factory.mktemp("calm") / "run", data)
    assert found.deaths == 0
    return found.digest


def test_kills_leave_no_trace_in_the_weights(
    small_jobs: SmallJobs, data: Path, calm: str, tmp_path: Path
) -> None:
    for number, fault in enumerate(CASES):
        found = small_jobs.run(tmp_path / str(number), data, fault=fault)
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm, fault


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_bits_do_not_depend_on_the_number_of_ranks(
    small_jobs: SmallJobs, data: Path, calm: str, tmp_path: Path, world_size: int
) -> None:
    assert small_jobs.run(tmp_path / "run", data, world_size=world_size).digest == calm


def test_a_run_that_shrinks_ends_with_the_same_bits(
    small_jobs: SmallJobs, data: Path, calm: str, tmp_path: Path
) -> None:
    fault = "rank1:job.begin:3"
    shrunk = small_jobs.run(tmp_path / "shrunk", data, fault=fault, on_loss=OnLoss.SHRINK)
    assert shrunk.deaths == 1, (shrunk.failures, shrunk.told)
    assert shrunk.digest == calm
