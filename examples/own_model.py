"""Train a model of your own, in plain numpy: kill any rank while it runs, and the bits stay the same.

Run it: zbmd-node run -n 3 examples/own_model.py runs/spirals
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import zbmd
from zbmd.training import DataParallelTask, run_task

State = Mapping[str, np.ndarray]


class Spirals(DataParallelTask):
    """Tell two spirals apart: one hidden layer, and stochastic gradient descent with momentum."""

    steps, examples, shards, samples = 600, 2048, 8, 16
    parameters = ("hidden", "out")

    def __init__(self) -> None:
        turn = np.random.default_rng(0).random(self.examples) * 6
        side = np.arange(self.examples) % 2
        self.x = np.stack([turn * np.cos(turn + np.pi * side), turn * np.sin(turn + np.pi * side)], 1)
        self.x = np.concatenate([self.x / 3, np.ones((self.examples, 1))], 1).astype(np.float32)
        self.y = side.astype(np.float32)

    def initial(self) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(1)
        hidden = draw.normal(0, 1, (3, 64)).astype(np.float32)
        out = draw.normal(0, 0.1, 64).astype(np.float32)
        return {"hidden": hidden, "out": out, "m.hidden": 0 * hidden, "m.out": 0 * out}

    def gradient(self, state: State, ids: np.ndarray) -> tuple[float, State]:
        x, y = self.x[ids], self.y[ids]
        h = np.tanh(x @ state["hidden"])
        p = 1 / (1 + np.exp(-h @ state["out"]))
        loss = -np.mean(np.log(np.where(y == 1, p, 1 - p) + 1e-7))
        error = (p - y) / len(ids)
        back = np.outer(error, state["out"]) * (1 - h * h)
        return float(loss), {"hidden": x.T @ back, "out": h.T @ error}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        for name in self.parameters:
            new["m." + name][:] = 0.9 * old["m." + name] + gradient[name]
            new[name][:] = old[name] - 0.3 * new["m." + name]


result = zbmd.run(run_task(Spirals(), out=Path(sys.argv[1])))
