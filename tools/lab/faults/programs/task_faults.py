"""A small training task with one fault; argv: fault, step, rank, seed, directory, a checkpoint or nothing."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import zbmd
from zbmd.training.job.data_parallel import DataParallelTask, State, run_task

FAULT, STEP, WHO, SEED, OUT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
RESUME = Path(sys.argv[6]) if len(sys.argv) > 6 else None
STEPS = 16
RANK = int(os.environ["RANK"])


class Line(DataParallelTask):
    """Fits a line."""

    examples, shards, samples, steps = 64, 4, 4, STEPS if RESUME is None else STEPS + 4

    def __init__(self) -> None:
        self.x = np.random.default_rng(SEED).standard_normal((self.examples, 8)).astype(np.float32)
        self.step = 0

    def initial(self) -> dict[str, np.ndarray]:
        """Return the weights to begin with."""
        return {"w": np.random.default_rng(SEED + 1).standard_normal(8).astype(np.float32)}

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, Mapping[str, np.ndarray]]:
        """Return the loss of samples and its gradient."""
        x = self.x[ids]
        y = x @ state["w"]
        gradient = x.T @ y / np.float32(len(ids))
        if FAULT == "nan" and self.step + 1 >= STEP and RANK == WHO:
            gradient = gradient * np.float32(np.nan)
        return float(np.square(y).mean()), {"w": gradient}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        """Write the next state."""
        self.step = step
        new["w"][:] = old["w"] - np.float32(0.01) * gradient["w"]
        if step == STEP and FAULT == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        elif step == STEP and FAULT == "bits" and RANK == WHO:
            new["w"].view(np.uint32)[SEED % 8] ^= np.uint32(1 << (SEED % 20))


zbmd.run(run_task(Line(), out=Path(OUT), resume=RESUME, checkpoint_every=4))
