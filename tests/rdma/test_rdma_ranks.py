"""Ranks whose links and memory are RDMA: actors, collectives, a training job, kills; the bits of one host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rdma_jobs import EXPECTED_VARIABLE, digests_of_collectives, digests_on_one_host, train_over_rdma


async def test_jobs_over_rdma_have_the_bits_of_one_host_and_survive_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = os.environ.get(EXPECTED_VARIABLE)
    wanted = given.split(",") if given else await digests_on_one_host(tmp_path, monkeypatch)
    by = "RdmaLink RemoteMemory"
    found = await digests_of_collectives(tmp_path, monkeypatch, "rdma", by=by)
    assert found == wanted, f"{found} is not {wanted}"
    weights, plain = await train_over_rdma(tmp_path)
    assert weights == plain, f"{weights} is not {plain}"
