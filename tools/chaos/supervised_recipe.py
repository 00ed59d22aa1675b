"""A recipe whose shards are computed by actors in this process: for the soak of operators, benchmarks and
tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, flat_slice
from zbmd.training.autograd.rng import Noise
from zbmd.training.autograd.tape import GradReady
from zbmd.training.model_actors.actors import HeldTensor
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.model_actors.operator_devices import HostDevice, OperatorDevice
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.pipeline.part import GPTPart, layers_in
from zbmd.training.step.recipe import Recipe


class HeldWeights:
    """Flat weights of `layout` as a `StateSource`: all of version `step`."""

    def __init__(self, layout: ParameterLayout, weights: Array) -> None:
        self.layout, self.weights, self.step = layout, weights, 0

    def tensors(self, version: int) -> Iterator[HeldTensor]:
        """See `StateSource`."""
        for slot, view in zip(self.layout.slots, self.layout.views(self.weights), strict=True):
            yield HeldTensor(slot.name, flat_slice(slot.size, 0, slot.size), view)


class SupervisedRecipe(Recipe):
    """`plain`, computed by `actors`. Call `actors.start` before a step, on the loop that it is made on."""

    def __init__(
        self, plain: Recipe, weights: Array | None = None, devices: Sequence[OperatorDevice] = (HostDevice(),)
    ) -> None:
        super().__init__(plain.model, plain.corpus, plain.config)
        layout = plain.model.layout
        weights = np.zeros(layout.size, np.float32) if weights is None else weights
        self.weights = HeldWeights(layout, weights)
        self.actors = ModelActors(self.weights, plain.model, seed=plain.config.seed, devices=devices)
        self.part = self.actors.part(GPTPart(plain.model, range(layers_in(plain.model.config))))

    def shard_gradient(
        self,
        params: Array,
        grads: Array,
        sample_ids: npt.NDArray[np.int64],
        *,
        step: int,
        on_grad_ready: GradReady | None = None,
        loss_scale: float = 1.0,
    ) -> float:
        """See `Recipe`. Raises `RestartsExhausted`."""
        noise = Noise(self.config.seed, step, sample_ids)
        windows = self.corpus.windows(sample_ids)
        batch = self.model.batch(windows, global_batch=self.config.global_batch, noise=noise)
        done = self.part.forward(params, grads, batch, None, on_grad_ready=on_grad_ready)
        loss = float(done.output.data)
        self.part.backward(done, None, loss_scale=loss_scale)
        return loss

    def apply(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        norm: float,
        loss_scale: float = 1.0,
    ) -> None:
        """See `Recipe`. Raises `RestartsExhausted`."""
        apply = super().apply
        self.actors.update(lambda: apply(old, new, grads, step=step, norm=norm, loss_scale=loss_scale))
