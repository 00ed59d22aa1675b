"""Freed memory is kept: a step that repeats touches no new pages."""

from __future__ import annotations

import subprocess
import sys

from programs import PROGRAMS


def test_a_repeated_pass_has_hardly_a_page_fault() -> None:
    command = [sys.executable, PROGRAMS / "training/page_faults.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20.0, "without keep_freed_memory there are over 200"
