"""Optimizers: each writes the next version of a state out of place; all share one state: weights and two
moments.

An optimizer with one moment neither reads nor writes `square`, which is empty then (`arrays_of`). All but
Muon are elementwise, so their bits do not depend on how the flat array is divided. Imports only `autograd`
and `ops`. Begin with `Optimizer` and `elementwise`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Final, Literal, Protocol, assert_never, get_args

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
    is_hidden,
)

# ---- learning rate

Curve = Literal["cosine", "linear", "wsd", "constant"]
CURVES: tuple[Curve, ...] = get_args(Curve)
WSD_DECAY = 0.2
"""The fraction of the steps after warm-up in which a WSD schedule decays."""


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    floor: float,
    curve: Curve = "cosine",
) -> float:
    """Return the rate of `step` (from 0): rising to `peak` in `warmup_steps`, then falling to `floor * peak`.

    The last step, `total_steps - 1`, has the lowest rate; later steps keep it. `cosine`: I. Loshchilov, F.
    Hutter, "SGDR", 2017, arXiv:1608.03983, without restarts; `linear`; `wsd`: at the peak, with a linear
    decay over the last `WSD_DECAY` of the steps (S. Hu and others, "MiniCPM", 2024, arXiv:2404.06395);
    `constant`: at the peak to the end.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    match curve:
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            left = 1.0 - progress
        case "wsd":
            left = min(1.0, (1.0 - progress) / WSD_DECAY)
        case "constant":
            left = 1.0
        case _:
            assert_never(curve)
    return peak * (floor + (1.0 - floor) * left)


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
    "saved_arrays",
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


def saved_arrays(config: OptimizerConfig, name: str, shape: Sequence[int]) -> tuple[StateArray, ...]:
    """Return the arrays of a parameter that a checkpoint has: all but Muon's second moment, which is 0.

    Versions before 2026-12 wrote that as well; it is not read.
    """
    arrays = arrays_of(config)
    return arrays[:2] if isinstance(config, MuonConfig) and is_hidden(name, shape) else arrays


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
