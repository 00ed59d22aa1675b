"""Optimizers. All write the next version of a state out of place, and share one state: weights, two moments.

An optimizer that keeps one moment leaves `square` as it is: a job's store has room for both, whatever it is
trained by. All but Muon are elementwise, so their bits do not depend on how the flat array is cut.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol, assert_never

import numpy as np

from zbmd.training.adamw import AdamW, AdamWConfig, AdamWState
from zbmd.training.layout import ParameterLayout
from zbmd.training.optim.lion import Lion, LionConfig
from zbmd.training.optim.muon import Muon, MuonConfig
from zbmd.training.optim.sgd import SGD, SGDConfig
from zbmd.training.xp import Array

OptimizerConfig = AdamWConfig | LionConfig | MuonConfig | SGDConfig

__all__ = [
    "SGD",
    "AdamW",
    "AdamWConfig",
    "AdamWState",
    "Lion",
    "LionConfig",
    "Muon",
    "MuonConfig",
    "Optimizer",
    "OptimizerConfig",
    "SGDConfig",
    "optimizer_for",
]


class Optimizer(Protocol):
    """What a training step asks of an optimizer; see `AdamW.update`."""

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
        """Write to `new` the state that follows `old` by `grad_scale * grads`."""


def optimizer_for(
    config: OptimizerConfig,
    layout: ParameterLayout,
    *,
    xp: ModuleType = np,
    dtype: type[np.floating] = np.float32,
) -> Optimizer:
    """Return the optimizer that `config` is of."""
    match config:
        case AdamWConfig():
            return AdamW(config, layout, xp=xp, dtype=dtype)
        case LionConfig():
            return Lion(config, layout, xp=xp)
        case MuonConfig():
            return Muon(config, layout, xp=xp, dtype=dtype)
        case SGDConfig():
            return SGD(config, layout, xp=xp)
        case _:
            assert_never(config)
