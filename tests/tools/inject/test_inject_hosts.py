"""A host whose cable becomes slow while a job runs is named for its link; of two hosts, both are."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.slow_cable import check_slow_cable

WORK = PROGRAMS / "training/even_work.py"


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [3, 2])
def test_a_host_behind_a_slow_cable_is_named_for_its_link_and_cleared(tmp_path: Path, hosts: int) -> None:
    check_slow_cable(tmp_path, WORK, hosts)
