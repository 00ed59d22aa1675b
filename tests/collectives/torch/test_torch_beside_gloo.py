"""200 random sequences of mixed operations over random groups, sync and async: results equal gloo's.

Each rank has a group of either backend over the same ranks, and gives both the same calls. Values are small
integers in every dtype, so that no sum depends on its order. Only zbmd gets views with gaps, and gloo a copy:
gloo (PyTorch 2.13) takes the elements that follow the first one in memory for those of the tensor. What gloo
leaves in the tensors of `reduce` elsewhere than at its root is not compared. `ZBMD_TEST_SEED` repeats a run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


SEQUENCES = 200
HAS_TWO_CORES = len(os.sched_getaffinity(0)) >= 2
WITH_A_CORE_EACH = pytest.mark.skipif(not HAS_TWO_CORES, reason="ranks that share a core queue all calls")


@pytest.mark.parametrize(
    ("links", "ranks"), [("auto", 4), ("tcp", 4), pytest.param("auto", 2, marks=WITH_A_CORE_EACH)]
)
async def test_random_sequences_equal_gloos(run_ranks: RunRanks, seed: int, links: str, ranks: int) -> None:
    await run_ranks("operations/beside_gloo", str(seed), str(SEQUENCES), ranks=ranks, links=links)
