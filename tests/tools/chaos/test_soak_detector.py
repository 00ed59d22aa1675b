"""A short soak: with all cores busy nobody is taken for dead, or hanging. Ten minutes are for the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 120.0
SECONDS = 4


def test_nobody_is_accused_under_full_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    command = [sys.executable, "-m", "zbmd.tools.chaos.soak_detector", "--minutes", f"{SECONDS / 60}"]
    done = subprocess.run(
        [*command, "--ranks", "3", "--nodes", "2"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 false positives" in done.stdout.splitlines()[-1]
