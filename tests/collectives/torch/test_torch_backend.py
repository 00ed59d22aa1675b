"""PyTorch over the backend `zbmd`: every operation, DDP and FSDP2 beside gloo, and the death of a rank.

The ranks are real processes of `zbmd-node run`'s host; the losses are compared with those that gloo gives in
the same processes: they differ by the order of a sum of two at most, so not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zbmd.actors.view import OnLoss
from zbmd.transport.tcp.sockets import free_port

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


def meeting() -> dict[str, str]:
    return {"MASTER_PORT": str(free_port())}


@pytest.mark.parametrize(
    ("name", "ranks", "links"),
    [
        ("operations", 3, "auto"),
        ("operations", 3, "tcp"),
        ("counts", 2, "auto"),
        ("children", 2, "auto"),
    ],
)
async def test_torch_over_zbmd(run_ranks: RunRanks, name: str, ranks: int, links: str) -> None:
    await run_ranks(f"groups/{name}", ranks=ranks, links=links, arena_bytes=32 << 20, environment=meeting())


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_tensors_that_the_arena_could_not_hold(run_ranks: RunRanks, links: str) -> None:
    await run_ranks("groups/large", ranks=2, links=links, arena_bytes=48 << 20, environment=meeting())


async def test_losses_are_those_of_gloo(run_ranks: RunRanks, tmp_path: Path) -> None:
    stores = str(tmp_path / "store")
    await run_ranks("groups/losses", stores, ranks=2, arena_bytes=32 << 20, environment=meeting())


@pytest.mark.parametrize(
    ("name", "links"),
    [("death", "auto"), ("deaths_while_all_meet", "auto"), ("deaths_while_all_meet", "tcp")],
)
async def test_ranks_that_die_are_replaced(run_ranks: RunRanks, name: str, links: str) -> None:
    options: dict[str, Any] = {"on_loss": OnLoss.REPLACE, "arena_bytes": 32 << 20, "environment": meeting()}
    await run_ranks(f"groups/{name}", ranks=3, links=links, **options)


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_ranks_that_die_are_left_out(run_ranks: RunRanks, links: str) -> None:
    options: dict[str, Any] = {"on_loss": OnLoss.SHRINK, "arena_bytes": 32 << 20, "environment": meeting()}
    await run_ranks("groups/shrink", ranks=4, good=2, links=links, **options)
