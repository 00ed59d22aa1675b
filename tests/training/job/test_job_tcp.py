"""The training job with every rank as if on a host of its own: the bits of one host, also after kills."""

from __future__ import annotations

from pathlib import Path

from support.jobs.small_jobs import SmallJobs

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.transport import kill_points as faults

CASES = (
    "rank0:mesh.backward",
    "rank1:mirror.commit:2",
    "rank2:collective.point:75",
    "rank1:job.begin:3,rank1#2:mirror.restore_middle",
    "rank1:job.begin:3,rank1#2:collective.point:12",
    "rank0:job.parted+rank1:job.parted+rank2:job.parted",
)


def test_the_job_over_tcp_ends_with_the_same_bits(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    one_host = small_jobs.run(tmp_path / "one", data)
    for number, fault in enumerate(("", *CASES)):
        found = small_jobs.run(tmp_path / str(number), data, fault=fault, links="tcp")
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == one_host.digest, fault
    fault = "rank1:job.begin:3"
    shrunk = small_jobs.run(
        tmp_path / "shrunk", data, fault=fault, on_loss=OnLoss.SHRINK, world_size=2, links="tcp"
    )
    assert (shrunk.deaths, shrunk.digest) == (1, one_host.digest)
