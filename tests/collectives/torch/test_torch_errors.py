"""Errors of scripts over the backend `zbmd`: every rank gets them in PyTorch's words. Real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zbmd.actors.view import OnLoss

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


@pytest.mark.parametrize(
    ("name", "ranks", "links"),
    [
        ("mismatched", 2, "auto"),
        ("mismatched", 2, "tcp"),
        ("early", 3, "auto"),
        ("early", 3, "tcp"),
        ("destroyed", 3, "auto"),
        ("destroyed", 3, "tcp"),
        ("many", 2, "auto"),
    ],
)
async def test_the_error_of_every_rank_names_what_happened(
    run_ranks: RunRanks, name: str, ranks: int, links: str
) -> None:
    await run_ranks(f"errors/{name}", ranks=ranks, links=links, arena_bytes=32 << 20)


async def test_what_pytorch_builds_works_with_its_own_checks_of_all_calls(run_ranks: RunRanks) -> None:
    checks = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    await run_ranks("errors/wrapped", ranks=2, is_warm=False, arena_bytes=32 << 20, environment=checks)


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_a_death_is_named_by_who_hears_of_it_from_another(run_ranks: RunRanks, links: str) -> None:
    await run_ranks("errors/killed", ranks=3, good=2, links=links, on_loss=OnLoss.SHRINK)
