"""Optimizers: each writes the next version of a state out of place; all share one state: weights and two
moments.

An optimizer with one moment neither reads nor writes `square`, which is empty then (`arrays_of`). All but
Muon are elementwise, so their bits do not depend on how the flat array is divided. Imports only `autograd`
and `ops`. Begin with `Optimizer` and `elementwise`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Final, Protocol, assert_never

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlot
from zbmd.training.optim.elementwise import (
    ARRAYS,
    SGD,
    AdamW,
    AdamWConfig,
    AdamWState,
    Lion,
    LionConfig,
    SGDConfig,
    Shard,
    StateArray,
)
from zbmd.training.optim.muon import (
    Gather,
    HeldMatrices,
    HeldMatrix,
    Muon,
    MuonConfig,
    gather_alone,
    hidden_matrices,
)

OptimizerConfig = AdamWConfig | LionConfig | MuonConfig | SGDConfig

OPTIMIZERS: Final[Mapping[str, OptimizerConfig]] = MappingProxyType(
    {"adamw": AdamWConfig(), "lion": LionConfig(), "muon": MuonConfig(), "sgd": SGDConfig()}
)
"""Default configurations by the names that command lines and recipes use."""

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
    "gather_alone",
    "arrays_of",
    "hidden_matrices",
    "optimizer_for",
    "whole_parameters",
]


class Optimizer(Protocol):
    """The interface of optimizers; see `AdamW.update`."""

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
    """Return the arrays in the state of an optimizer: weights, and one moment or two."""
    return ARRAYS[:2] if isinstance(config, LionConfig | SGDConfig) else ARRAYS


def whole_parameters(config: OptimizerConfig, layout: ParameterLayout) -> tuple[ParameterSlot, ...]:
    """Return the parameters that an optimizer processes as a whole instead of block by block."""
    return hidden_matrices(layout) if isinstance(config, MuonConfig) else ()


def optimizer_for(
    config: OptimizerConfig,
    layout: ParameterLayout,
    *,
    xp: ModuleType = np,
    dtype: type[np.floating] = np.float32,
    shard: Shard | None = None,
    held: HeldMatrices | None = None,
) -> Optimizer:
    """Return the optimizer of `config`; `shard` as in `AdamW`, `held` as in `Muon`."""
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
