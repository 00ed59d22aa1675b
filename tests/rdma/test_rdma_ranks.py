"""Ranks whose links and memory are RDMA: actors, collectives, a training job, kills; the bits of one host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.rdma.rdma_jobs import (
    EXPECTED_VARIABLE,
    TRAINING_RANKS,
    digests_of_collectives,
    digests_on_one_host,
    train_over_rdma,
)

REGISTERED_MAX = 8
"""By each rank of a job, however many steps it has: in each of two views the descriptors of each of a mesh's
groups, what is pulled beside its place, and copies that are sent, from memory that is kept."""


async def test_jobs_over_rdma_have_the_bits_of_one_host_and_survive_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = os.environ.get(EXPECTED_VARIABLE)
    wanted = given.split(",") if given else await digests_on_one_host(tmp_path, monkeypatch)
    by = "RdmaLink RemoteMemory"
    found = await digests_of_collectives(tmp_path, monkeypatch, "rdma", by=by)
    assert found == wanted, f"{found} is not {wanted}"
    trained = await train_over_rdma(tmp_path, monkeypatch)
    assert trained.digest == trained.plain, f"{trained.digest} is not {trained.plain}"
    transfers = trained.transfers
    print(transfers)
    assert transfers.in_segment and transfers.reused, transfers
    assert transfers.registered <= REGISTERED_MAX * TRAINING_RANKS and not transfers.copied, transfers
