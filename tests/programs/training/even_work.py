"""A task whose steps take a rank milliseconds of matrix products. argv: directory, steps, on_straggler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import zbmd
from zbmd.training.job.data_parallel import DataParallelTask, State, run_task
from zbmd.training.job.stragglers.policy import OnStraggler

WIDTH = 256


class EvenWork(DataParallelTask):
    examples, shards, samples = 512, 8, 8

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.x = np.random.default_rng(0).standard_normal((self.examples, WIDTH)).astype(np.float32)

    def initial(self) -> dict[str, np.ndarray]:
        return {"w": np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH}

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, Mapping[str, np.ndarray]]:
        w, x = state["w"], self.x[ids]
        for _ in range(4):  # work, and no more: the gradient is that of one product
            (w @ w).sum()
        y = x @ w
        return float(np.square(y).mean()), {"w": x.T @ y / np.float32(y.size)}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        new["w"][:] = old["w"] - np.float32(0.01) * gradient["w"]


out, steps, on_straggler = sys.argv[1:]
zbmd.run(run_task(EvenWork(int(steps)), out=Path(out), on_straggler=OnStraggler(on_straggler)))
