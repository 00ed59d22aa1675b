"""Stochastic gradient descent with momentum, out of place, with decoupled weight decay.

B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; Nesterov's form as in
I. Sutskever and others, "On the importance of initialization and momentum in deep learning", 2013; the decay
as in I. Loshchilov, F. Hutter, arXiv:1711.05101 (SGDW).
"""

from __future__ import annotations

from types import ModuleType

import msgspec
import numpy as np

from zbmd.training.autograd.array_module import Array, widened
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.optim.adamw import AdamWState, Shard, update_blocks


class SGDConfig(msgspec.Struct, frozen=True, kw_only=True, tag="sgd"):
    """The constants of SGD; `weight_decay` is multiplied by the learning rate and hits matrices only."""

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0


class SGD:
    """The optimizer of one layout. It keeps one moment, `mean`: the velocity."""

    def __init__(
        self,
        config: SGDConfig,
        layout: ParameterLayout,
        *,
        xp: ModuleType = np,
        shard: Shard | None = None,
    ) -> None:
        """With `shard`, the arrays given to `update` are a shard, not the whole flat arrays."""
        self.config = config
        self.layout = layout
        self.xp = xp
        self._shard = Shard(layout.size, update_blocks(layout)) if shard is None else shard

    def update(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        learning_rate: float,
        grad_scale: float = 1.0,
    ) -> None:
        """Write to `new` the state that follows `old` by `grad_scale * grads`; see `AdamW.update`."""
        momentum = self.config.momentum
        for array in (old.weights, old.mean, new.weights, new.mean, grads):
            self._shard.check(array)
        for span, decayed in self._shard.blocks:
            decay = learning_rate * self.config.weight_decay if decayed else 0.0
            slope = widened(grads[span]) * grad_scale
            velocity = new.mean[span]
            self.xp.multiply(old.mean[span], momentum, out=velocity)
            velocity += slope
            if self.config.nesterov:
                slope += velocity * momentum
            else:
                slope = velocity * 1.0
            slope *= learning_rate
            weights = new.weights[span]
            self.xp.multiply(old.weights[span], 1.0 - decay, out=weights)
            weights -= slope
