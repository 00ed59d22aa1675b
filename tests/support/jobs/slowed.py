"""A rank of a running job that `zbmd inject` slows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from support.processes.launcher import MARKER


@contextmanager
def injected(out: Path, *words: str) -> Generator[subprocess.Popen[str]]:
    """Slow a rank of the run in `out` within the context. words: of `zbmd inject`."""
    command = [sys.executable, "-m", "zbmd", "inject", str(out), "--for", "10min", *words]
    environment = {**os.environ, MARKER: out.as_posix()}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert "is slowed for" in said, said + process.stderr.read()
        try:
            yield process
        finally:
            process.terminate()
