"""Tensors in the arena: buffers of DDP and FSDP2 that ranks read in place. Real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


@pytest.mark.parametrize("reading", ["read", "staged"])
@pytest.mark.parametrize(("name", "ranks"), [("tensors", 2), ("ddp", 3), ("fsdp2", 2)])
async def test_what_lies_in_the_arena_is_reduced_where_it_is(
    run_ranks: RunRanks, name: str, ranks: int, reading: str
) -> None:
    # By slots, nothing would be staged.
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ZBMD_ALGORITHM": "direct"}
    await run_ranks(f"arena/{name}", reading, ranks=ranks, arena_bytes=48 << 20, environment=environment)
