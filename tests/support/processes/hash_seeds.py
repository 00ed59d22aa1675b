"""The output of a function of a test module under other seeds of Python's string hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HASH_SEEDS = ("1", "2")
TIMEOUT_S = 60


def printed_under_hash_seeds(module_file: str, call: str) -> set[str]:
    """The outputs of `print(module.call)`, one process a hash seed."""
    module = Path(module_file)
    code = (
        f"import sys; sys.path.insert(0, {str(module.parent)!r}); import {module.stem} as t; print(t.{call})"
    )
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        ).stdout
        for hash_seed in HASH_SEEDS
    }
