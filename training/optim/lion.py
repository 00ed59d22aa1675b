"""Lion, out of place: the sign of a moment is the step.

X. Chen and others, "Symbolic discovery of optimization algorithms", 2023, arXiv:2302.06675.
"""

from __future__ import annotations

from types import ModuleType

import msgspec
import numpy as np

from zbmd.training.autograd.array_module import Array, widened
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.optim.adamw import AdamWState, Shard, update_blocks


class LionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="lion"):
    """The constants of Lion; `weight_decay` is multiplied by the learning rate and hits matrices only."""

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1


class Lion:
    """The optimizer of one layout. It keeps one moment, `mean`."""

    def __init__(
        self,
        config: LionConfig,
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
        xp, beta1, beta2 = self.xp, self.config.beta1, self.config.beta2
        for array in (old.weights, old.mean, new.weights, new.mean, grads):
            self._shard.check(array)
        for span, decayed in self._shard.blocks:
            decay = learning_rate * self.config.weight_decay if decayed else 0.0
            slope = widened(grads[span]) * grad_scale
            move = old.mean[span] * beta1
            move += slope * (1.0 - beta1)
            xp.sign(move, out=move)
            move *= learning_rate
            weights, mean = new.weights[span], new.mean[span]
            xp.multiply(old.weights[span], 1.0 - decay, out=weights)
            weights -= move
            xp.multiply(old.mean[span], beta2, out=mean)
            slope *= 1.0 - beta2
            mean += slope
