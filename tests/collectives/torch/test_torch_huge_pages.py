"""Ranks have their tensors on huge pages, unless their user has said otherwise. Real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zbmd.transport.memory.huge_pages import HUGE_PAGES_VARIABLE, huge_page_variables

if TYPE_CHECKING:
    from support.jobs.torch_ranks import RunRanks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


@pytest.mark.skipif(not huge_page_variables(), reason="this kernel gives no huge pages")
@pytest.mark.parametrize("said", ["", "0"])
async def test_tensors_are_on_huge_pages(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.delenv(HUGE_PAGES_VARIABLE, raising=False)
    if said:
        monkeypatch.setenv(HUGE_PAGES_VARIABLE, said)
    await run_ranks("loading/huge_pages", "small" if said else "huge", ranks=1, is_warm=False)
