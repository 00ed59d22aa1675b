"""PyTorch over zbmd: tensors of more than 2 GiB."""

from __future__ import annotations

import subprocess
import sys

import pytest
from programs import PROGRAMS

from zbmd.transport.memory.memfd import available_memory

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

GIB = 1 << 30
NEEDED_GIB = 16
"""Two ranks with three times 2 GiB, and what else runs."""


def test_tensors_may_be_larger_than_2_gib() -> None:
    if available_memory().nbytes < NEEDED_GIB * GIB:
        pytest.skip(f"{NEEDED_GIB} GiB of memory are needed")
    program = str(PROGRAMS / "torch/beyond_2_gib.py")
    command = [sys.executable, "-m", "zbmd.tools.node.cli", "run", "-n", "2", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank{rank}]: rank {rank} is done" for rank in range(2)]
