"""Operations of `torch.distributed` that other backends leave out, or that PyTorch keeps for one of them.

Reductions with a factor, of narrow dtypes and of sparse tensors; `monitored_barrier`, `split_group`,
functional collectives; compiled programs; records of calls. Real processes of `zbmd-node run`'s host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


RANKS = 3
PROGRAMS_OF_BOTH = ("sparse", "barriers_and_splits")
NAMES = (*PROGRAMS_OF_BOTH, "records", "reductions", "functional", "compiled")


@pytest.mark.parametrize(
    ("name", "links"), [*((name, "auto") for name in NAMES), *((name, "tcp") for name in PROGRAMS_OF_BOTH)]
)
async def test_operations_over_zbmd(
    monkeypatch: pytest.MonkeyPatch, run_ranks: RunRanks, name: str, links: str
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "4")
    await run_ranks(f"operations/{name}", ranks=RANKS, links=links)
