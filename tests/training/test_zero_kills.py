"""ZeRO under a host: a rank that alone held its shard is killed, and the bits stay those of a calm run."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.tools.kill_sweep import run_small_job, write_text
from zbmd.transport import faults
from zbmd.transport.errors import UserError

CASES = (
    (3, "auto", "rank0:mirror.middle:3"),
    (1, "auto", "rank1:zero.updated:2"),
    (3, "auto", "rank1:zero.update:3,rank1#2:mirror.restore_middle"),
    (2, "auto", "rank0:mirror.commit:3"),
    (3, "tcp", "rank2:zero.backward:7"),
    (3, "auto", "rank1:zero.saved"),
)


async def test_kills_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    replicated = await run_small_job(tmp_path / "calm", data)
    for number, (stage, links, fault) in enumerate(CASES):
        found = await run_small_job(tmp_path / str(number), data, fault=fault, links=links, zero=stage)
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == replicated.digest, fault


async def test_a_rank_and_its_buddy_lost_at_once_are_told_in_words(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    fault = "rank0:zero.norm:4,rank1:zero.norm:4"
    with pytest.raises(UserError, match="a rank and its buddy were lost at once"):
        await run_small_job(tmp_path / "run", data, fault=fault, world_size=2, zero=3)
