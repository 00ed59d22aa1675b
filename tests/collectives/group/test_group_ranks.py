"""Ranks in a group's calls are ranks of the group, as in MPI and PyTorch, on every surface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "programs" / "group_ranks.py"


def test_ranks_of_sub_groups_are_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    command = [sys.executable, "-m", "zbmd.tools.node.cli", "run", "-n", "4", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank}: done" in done.stdout for rank in range(4)), done.stdout
