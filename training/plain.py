"""The job in one plain process: a loop, with no supervision, no messages and no shared memory.

It is the reference for the bits (a distributed run ends with the same weights) and for the time (what the
stack costs is measured against it).
"""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.training.accumulate import AccumulationPlan
from zbmd.training.adamw import AdamWState
from zbmd.training.recipe import Recipe
from zbmd.training.xp import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """What a step reported: its number, training loss (nats per byte) and gradient norm before clipping."""

    step: int
    loss: float
    grad_norm: float


class PlainTrainer:
    """Trains `recipe` from its initial weights. `state` and `step` are those of the next step."""

    def __init__(self, recipe: Recipe) -> None:
        xp, layout = recipe.model.xp, recipe.model.layout
        self.recipe = recipe
        self.step = 0
        weights: Array = xp.asarray(recipe.model.init(recipe.config.seed))
        self.state = AdamWState(weights, xp.zeros_like(weights), xp.zeros_like(weights))
        self._spare = AdamWState(*(xp.zeros_like(weights) for _ in range(3)))
        self._plan = AccumulationPlan.of(recipe.config.shards, 0, recipe.config.shards)
        self._buffers: list[Array] = [xp.zeros_like(weights) for _ in range(self._plan.buffers)]
        self._everything = slice(0, layout.size)

    def run_step(self) -> PlainStep:
        """Do one step. Raises `TrainingDiverged` for a gradient that is not finite; the state stays."""
        ids = self.recipe.sample_ids(self.step)
        loss = 0.0
        for leaf in self._plan.leaves:
            buffer = self._buffers[leaf.buffer]
            loss += self.recipe.shard_gradient(self.state.weights, buffer, ids[leaf.shard], step=self.step)
            self._plan.perform(leaf.additions, self._buffers, self._everything)
        (total,) = self._plan.partials.values()
        norm = self.recipe.update(self.state, self._spare, self._buffers[total], step=self.step)
        self.state, self._spare = self._spare, self.state
        self.step += 1
        return PlainStep(step=self.step - 1, loss=loss, grad_norm=norm)
