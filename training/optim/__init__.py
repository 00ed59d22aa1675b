"""Optimizers. All write the next version of a state out of place, and share one state: weights, two moments.

An optimizer that keeps one moment neither reads nor writes `square`, which has no room then (`arrays_of`).
All but Muon are elementwise, so their bits do not depend on how the flat array is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Final, Protocol, assert_never

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlot
from zbmd.training.optim.adamw import ARRAYS, AdamW, AdamWConfig, AdamWState, Shard, StateArray
from zbmd.training.optim.lion import Lion, LionConfig
from zbmd.training.optim.muon import Gather, HeldMatrices, HeldMatrix, Muon, MuonConfig, alone, hidden_of
from zbmd.training.optim.sgd import SGD, SGDConfig

OptimizerConfig = AdamWConfig | LionConfig | MuonConfig | SGDConfig

OPTIMIZERS: Final[Mapping[str, OptimizerConfig]] = MappingProxyType(
    {"adamw": AdamWConfig(), "lion": LionConfig(), "muon": MuonConfig(), "sgd": SGDConfig()}
)
"""By the names that command lines and recipes have for them."""

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "AdamW",
    "AdamWConfig",
    "AdamWState",
    "Gather",
    "HeldMatrices",
    "HeldMatrix",
    "Lion",
    "LionConfig",
    "Muon",
    "MuonConfig",
    "Optimizer",
    "OptimizerConfig",
    "SGDConfig",
    "alone",
    "arrays_of",
    "hidden_of",
    "optimizer_for",
    "taken_whole",
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


def arrays_of(config: OptimizerConfig) -> tuple[StateArray, ...]:
    """What the state of an optimizer is made of: weights, and one moment or two."""
    return ARRAYS[:2] if isinstance(config, LionConfig | SGDConfig) else ARRAYS


def taken_whole(config: OptimizerConfig, layout: ParameterLayout) -> tuple[ParameterSlot, ...]:
    """The parameters that an optimizer works on as a whole, and not block by block."""
    return hidden_of(layout) if isinstance(config, MuonConfig) else ()


def optimizer_for(
    config: OptimizerConfig,
    layout: ParameterLayout,
    *,
    xp: ModuleType = np,
    dtype: type[np.floating] = np.float32,
    shard: Shard | None = None,
    held: HeldMatrices | None = None,
) -> Optimizer:
    """Return the optimizer that `config` is of; `shard` as in `AdamW`, `held` as in `Muon`."""
    match config:
        case AdamWConfig():
            return AdamW(config, layout, xp=xp, dtype=dtype, shard=shard)
        case LionConfig():
            return Lion(config, layout, xp=xp, shard=shard)
        case MuonConfig():
            return Muon(config, layout, xp=xp, dtype=dtype, held=held, shard=shard)
        case SGDConfig():
            return SGD(config, layout, xp=xp, shard=shard)
        case _:
            assert_never(config)
