"""The job in one plain process: a loop without supervision, messages or shared memory.

It is the reference for the bits (a distributed run ends with the same weights) and for the time (the overhead
of the stack is measured against it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint.sharded import Piece, SavedState, take_state, whole_pieces
from zbmd.training.optim import arrays_of
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.optim.mixed_precision import SCALE_FIRST, LossScale, Storage, attempted, storage_dtype
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import AccumulationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """The report of a step: its number, training loss (nats per byte) and gradient norm before clipping."""

    step: int
    loss: float
    grad_norm: float


class PlainTrainer:
    """Trains `recipe` from its initial weights. `state` and `step` are those of the next step.

    With a 16-bit `storage`, weights and gradients are stored in it, and `state` holds masters and moments.
    `loss_scale` is the initial loss scale of float16.
    """

    def __init__(
        self, recipe: Recipe, *, storage: Storage = "float32", loss_scale: float = SCALE_FIRST
    ) -> None:
        xp, layout, dtype = recipe.model.xp, recipe.model.layout, storage_dtype(storage)
        self.recipe = recipe
        self.step = 0
        weights: Array = xp.asarray(recipe.model.init(recipe.config.seed))
        arrays = len(arrays_of(recipe.config.optimizer))
        self.state, self._spare = (
            AdamWState.of(xp.zeros(arrays * layout.size, dtype=weights.dtype), layout.size, arrays)
            for _ in range(2)
        )
        self.state.weights[:] = weights
        self.loss_scale = LossScale.of(dtype, first=loss_scale)
        self._narrow: Array | None = weights.astype(dtype) if dtype.itemsize == 2 else None
        self._plan = AccumulationPlan.of(recipe.config.shards, 0, recipe.config.shards)
        self._buffers: list[Array] = [xp.zeros_like(self.weights) for _ in range(self._plan.buffers)]
        self._everything = slice(0, layout.size)
        self._loss = 0.0

    def begin_with(self, weights: Array) -> None:
        """Start from the whole model's weights, not from the seed's."""
        self.state.weights[:] = weights
        self._round()

    def begin_from(self, saved: SavedState) -> None:
        """Start from the state in a checkpoint of any job. Raises `UserError` for a damaged one."""
        model = self.recipe.model
        take_state(saved, self.state, model.layout, self.recipe.config.optimizer, xp=model.xp)
        self.step, self.loss_scale = saved.version, self.loss_scale.read(np.array(saved.loss_scale))
        self._round()

    def pieces(self) -> list[Piece]:
        """Return the content of a checkpoint: every parameter, whole."""
        return whole_pieces(self.recipe.model.layout, self.state, self.recipe.config.optimizer)

    def run_step(self) -> PlainStep:
        """Run one step, attempted again with a smaller loss scale if its gradients overflow.

        Raises `TrainingDiverged` for a gradient that is not finite if no scale helps; the state is unchanged
        then.
        """
        norm, scale = attempted(self.loss_scale, self._attempt)
        self.recipe.apply(
            self.state, self._spare, self._total, step=self.step, norm=norm, loss_scale=scale.scale
        )
        self.state, self._spare = self._spare, self.state
        self.loss_scale = scale.after(finite=True)
        self._round()
        self.step += 1
        return PlainStep(step=self.step - 1, loss=self._loss, grad_norm=norm)

    def _round(self) -> None:
        """Update the 16-bit weights after a change of the state."""
        if self._narrow is not None:
            self._narrow[:] = self.state.weights

    @property
    def weights(self) -> Array:
        """Return the weights of the forward pass; with 16 bits, the rounded masters."""
        return self.state.weights if self._narrow is None else self._narrow

    @property
    def _total(self) -> Array:
        (total,) = self._plan.partials.values()
        return self._buffers[total]

    def _attempt(self, scale: LossScale) -> float:
        """Compute the gradient of the step, times `scale`; return its norm."""
        ids, self._loss = self.recipe.sample_ids(self.step), 0.0
        for leaf in self._plan.leaves:
            self._loss += self.recipe.shard_gradient(
                self.weights,
                self._buffers[leaf.buffer],
                ids[leaf.shard],
                step=self.step,
                loss_scale=scale.scale,
            )
            self._plan.perform(leaf.additions, self._buffers, self._everything)
        return self.recipe.norm(self._total, step=self.step)
