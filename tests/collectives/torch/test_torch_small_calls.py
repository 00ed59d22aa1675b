"""Small asynchronous operations: they begin on the caller's thread, and end where they are waited for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from zbmd.actors.view import OnLoss

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks that share a core queue all calls"),
]


@pytest.mark.parametrize(
    ("case", "good", "on_loss"), [("calls", 2, OnLoss.STOP), ("killed", 1, OnLoss.SHRINK)]
)
async def test_a_small_call_needs_no_other_thread(
    run_ranks: RunRanks, case: str, good: int, on_loss: OnLoss
) -> None:
    await run_ranks("groups/small_calls", case, ranks=2, good=good, on_loss=on_loss, arena_bytes=32 << 20)
