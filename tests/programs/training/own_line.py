"""A data-parallel task of the user's own; it stands still in step 20 until `go20` is there.

Argument: the run's directory.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import zbmd
from zbmd.training import DataParallelTask, run_task


class Line(DataParallelTask):
    steps, examples, shards, samples = 40, 64, 4, 4

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

    def initial(self) -> dict[str, Any]:
        return {"w": np.ones(3, np.float32)}

    def gradient(self, state: Any, ids: Any) -> tuple[float, dict[str, Any]]:
        error = self.x[ids] @ state["w"]
        return float(error @ error), {"w": self.x[ids].T @ error}

    def update(self, old: Any, new: Any, gradient: Any, step: int) -> None:
        while step == 20 and not Path("go20").exists():
            threading.Event().wait(0.02)
        new["w"][:] = old["w"] - np.float32(0.3) * gradient["w"] / np.float32(100)


zbmd.run(run_task(Line(), out=Path(sys.argv[1])))
