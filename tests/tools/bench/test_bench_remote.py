"""The benchmark of collectives between hosts runs, and prints a line for each size."""

from __future__ import annotations

import pytest

from zbmd.tools.lab.bench.collectives.remote import SIZES, launch


async def test_a_line_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert await launch(2, "tcp", 1) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "busbw" in line]
    assert [int(line.split()[0].replace(",", "")) for line in lines] == list(SIZES)
