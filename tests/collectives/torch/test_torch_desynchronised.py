"""Ranks that make different calls in one group: every one of them hears at once who called what.

Drawn calls and drawn mistakes, over groups of drawn ranks. Real processes of `zbmd-node run`'s host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


RANKS = 3
CASES = 40


@pytest.mark.parametrize(("links", "seed"), [("auto", 1), ("auto", 2), ("tcp", 3)])
async def test_every_rank_hears_which_ranks_called_what(run_ranks: RunRanks, links: str, seed: int) -> None:
    arguments = str(seed), str(CASES)
    await run_ranks("errors/desynchronised", *arguments, ranks=RANKS, links=links, arena_bytes=32 << 20)
