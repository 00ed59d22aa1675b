"""docs/FAULTS.md names a test for every fault, and each one is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "FAULTS.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| fault", "| ---"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_every_fault_has_a_test_that_is_there(row: str) -> None:
    found = re.search(r"`(tests/[\w/]+\.py)::(\w+)` \|$", row)
    assert found is not None, row
    path, name = found.groups()
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)


def test_the_table_is_there() -> None:
    assert len(ROWS) > 30
