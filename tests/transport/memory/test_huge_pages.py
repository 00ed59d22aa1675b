"""When PyTorch is to ask for huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.transport.memory.huge_pages import HUGE_PAGES_VARIABLE, huge_page_variables


@pytest.mark.parametrize("modes", ["always [madvise] never", "[always] madvise never"])
def test_pytorch_asks_for_them_where_the_kernel_gives_them(tmp_path: Path, modes: str) -> None:
    (tmp_path / "enabled").write_text(f"{modes}\n")
    assert huge_page_variables(tmp_path / "enabled") == {HUGE_PAGES_VARIABLE: "1"}


def test_and_does_not_where_it_gives_none(tmp_path: Path) -> None:
    assert not huge_page_variables(tmp_path / "enabled"), "a kernel without them"
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert not huge_page_variables(tmp_path / "enabled")
