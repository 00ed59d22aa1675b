"""The benchmark of collectives between hosts runs, and prints a line for each size and contender."""

from __future__ import annotations

import subprocess
import sys

from support.netns.netns import require_lab

from zbmd.tools.lab.bench.collectives.hosts import MODULE


def test_a_line_for_each_size_and_contender() -> None:
    require_lab()
    command = [sys.executable, "-m", MODULE, "--sizes", "1K,2M", "--rounds", "1", "--cases", "all-gather"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines() if " zbmd" in line]
    assert rows == [["1K", "zbmd"], ["1K", "zbmd-none"], ["2M", "zbmd"], ["2M", "zbmd-none"]]
