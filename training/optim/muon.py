"""Muon, out of place: the momentum of a hidden matrix is made orthogonal before it is a step.

K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon). The iteration is Newton and Schulz's, of fifth order, with coefficients
that bring every singular value near 1 in a few rounds, none exactly. Everything that is no hidden matrix
(embedding, head, gains) is AdamW's.
"""

from __future__ import annotations

import math
from types import ModuleType

import msgspec
import numpy as np

from zbmd.training.adamw import AdamW, AdamWConfig, AdamWState
from zbmd.training.layout import ParameterLayout, ParameterSlot
from zbmd.training.xp import Array, widened

ROUNDS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NORM_LEAST = 1e-7
NOT_HIDDEN = ("embed.weight", "head.weight")


class MuonConfig(msgspec.Struct, frozen=True, kw_only=True, tag="muon"):
    """The constants of Muon. The learning rate of what is left to AdamW is `adamw_rate` times Muon's."""

    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_rate: float = 0.1
    adamw: AdamWConfig = msgspec.field(default_factory=AdamWConfig)


class Muon:
    """The optimizer of one layout. Of a hidden matrix it keeps one moment, `mean`: the momentum."""

    def __init__(
        self,
        config: MuonConfig,
        layout: ParameterLayout,
        *,
        xp: ModuleType = np,
        dtype: type[np.floating] = np.float32,
    ) -> None:
        self.config = config
        self.layout = layout
        self.xp = xp
        self._hidden = tuple(slot for slot in layout.slots if is_hidden(slot))
        self._rest = AdamW(config.adamw, layout, xp=xp, dtype=dtype, skipped=self._hidden)

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
        rate = learning_rate * self.config.adamw_rate
        self._rest.update(old, new, grads, step=step, learning_rate=rate, grad_scale=grad_scale)
        for slot in self._hidden:
            self._update_matrix(old, new, grads, slot, learning_rate, grad_scale)

    def _update_matrix(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        slot: ParameterSlot,
        learning_rate: float,
        grad_scale: float,
    ) -> None:
        momentum, span = self.config.momentum, slot.span
        slope = widened(grads[span]) * grad_scale
        mean = new.mean[span]
        self.xp.multiply(old.mean[span], momentum, out=mean)
        slope *= 1.0 - momentum
        mean += slope
        # Nesterov's look ahead: momentum * mean + (1 - momentum) * gradient.
        slope += mean * momentum
        inputs, outputs = slot.shape
        move = orthogonalized(slope.reshape(slot.shape), xp=self.xp)
        move *= learning_rate * math.sqrt(max(1.0, outputs / inputs))
        weights = new.weights[span]
        self.xp.multiply(old.weights[span], 1.0 - learning_rate * self.config.weight_decay, out=weights)
        weights -= move.reshape(-1)
        new.square[span] = old.square[span]


def is_hidden(slot: ParameterSlot) -> bool:
    """Tell whether a parameter is a matrix between hidden layers."""
    return len(slot.shape) == 2 and slot.name not in NOT_HIDDEN


def orthogonalized(matrix: Array, *, xp: ModuleType) -> Array:
    """Return `matrix`, 2-D, with its singular values brought to about 1 (0.7 to 1.2); its vectors stay."""
    first, second, third = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x: Array = matrix.T if tall else matrix
    flat = matrix.reshape(-1)
    x = x * (1.0 / (math.sqrt(float(xp.dot(flat, flat))) + NORM_LEAST))
    for _ in range(ROUNDS):
        square = xp.matmul(x, x.T)
        mixed = xp.matmul(square, square)
        mixed *= third
        mixed += square * second
        x = x * first + xp.matmul(mixed, x)
    return x.T.copy() if tall else x
