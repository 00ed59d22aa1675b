"""Train on a GPU: each rank along `dp` holds the whole state on its device, and a copy in host memory.

The device computes passes, sums of shards, norm and update. A new version of the state is copied to its slot
in host memory, where digests, redundancy and checkpoints read it as they do any rank's, and where it outlives
the process. A view begins with a copy back from the slot in use, whoever filled it.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.step_order import Computed
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.optim.clip import TrainingDiverged, clip_scale, non_finite, norm_from
from zbmd.training.optim.on_device import DeviceOptimizer, squares_on_device
from zbmd.training.sharded.replicated import ReplicatedTrainer
from zbmd.training.step.recipe import Recipe


class DeviceTrainer(ReplicatedTrainer):
    """A `ReplicatedTrainer` whose model is one of `executor`'s array module; weights are bf16 there."""

    def __init__(self, recipe: Recipe, groups: MeshGroups, executor: Executor, **settings: Any) -> None:
        self.executor = executor
        self._held: list[DeviceArray] = []
        """Weights and moments, float32, of the version in use."""
        self._device_optimizer: DeviceOptimizer | None = None
        super().__init__(recipe, groups, **settings)

    def _gradient(self) -> Array:
        made = self.executor.empty(self.own.layout.size, self.dtype)
        self.own.layout.clear_padding(cast(Array, made))
        return cast(Array, made)

    def _prepare_weights(self) -> None:
        """Copy the slot in use to the device."""
        run, config = self.executor, self.recipe.config
        if not self._held:
            self._held = [run.empty(self.own.layout.size, np.float32) for _ in self._arrays]
            self._device_optimizer = DeviceOptimizer(config.optimizer, self.own.layout, run)
        for name, array in zip(self._arrays, self._held, strict=True):
            run.upload(getattr(self.state, name), array)
        run.copy(self._device(self.params), self._held[0])

    def _device(self, array: Array) -> DeviceArray:
        return cast(DeviceArray, array)

    def held_out_loss(self, *, windows_max: int) -> float:
        """See `Trainer`: with the weights as the device has them, rounded."""
        return self.part.held_out_loss(self.recipe, self.params, self.groups, windows_max=windows_max)

    def _norm(self) -> float:
        with spans.GRAD_CLIP:
            return norm_from(squares_on_device(self._device(self._total), self.executor))

    def _named(self, error: TrainingDiverged) -> TrainingDiverged:
        partials = [to_host(self._buffers[place]) for place in self._plan.partials.values()]
        found = [non_finite(self.own.layout, grads, xp=np) for grads in partials]
        first = next((one for one in found if one is not None), None) or "those of other ranks' shards"
        return TrainingDiverged(f"step {self.step}: {error} First of the gradients, {first}.")

    def _update(self, made: Computed) -> None:
        config, target, run = self.recipe.config, 1 - self.slot, self.executor
        self._ready(self.slots[target])
        assert self._device_optimizer is not None, "a view has begun"
        with spans.OPTIMIZER:
            self._device_optimizer.update(
                self._held,
                self._device(self.params),
                self._device(self._total),
                step=self.step,
                learning_rate=self.recipe.learning_rate(self.step),
                grad_scale=clip_scale(made.norm, limit=config.clip_norm),
            )
            into = self._state_in(target)
            for name, array in zip(self._arrays, self._held, strict=True):
                run.download(array, getattr(into, name))
        self.slot = target

    def _end_step(self) -> None:
        """Do nothing: the update has rounded the weights."""
