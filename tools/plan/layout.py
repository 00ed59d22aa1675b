"""The memory of one rank: a model's shape, how a mesh divides it, and what each part of it takes.

Pure. Sizes are in bytes, of the rank that holds most. Mixed precision as in ZeRO (Rajbhandari et al. 2020):
weights and gradients of 2 bytes, and the optimizer's float32 arrays, as many as the training engine keeps
(`zbmd.training.optim.arrays_of`). Activations follow Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", table 2, with attention that stores no scores (flash attention).
The estimates of the training engine itself (`training/step/memory_estimate.py`) count its float32 arrays on a
CPU, and do not fit a 16-bit job on accelerators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from zbmd.training.optim import AdamWConfig, arrays_of
from zbmd.transport.errors import UserError

ITEM: Final = 2
"""Bytes of a weight, gradient or activation."""
ARRAY_ITEM: Final = 4
"""Bytes of a number of the optimizer's state."""
LAYER_BYTES: Final = 34
"""Of the activations of a layer, for each token and feature (Korthikanti et al. 2022)."""
LOGIT_BYTES: Final = 6
"""Of each logit: 2 of it, and 4 of its float32 copy in the loss."""
GATHERED: Final = 2
"""Layers whose whole weights ZeRO 3 holds: the one at work, and the one that is gathered ahead."""
ASPECT: Final = 128
"""Features of a layer for each layer, if only the number of parameters is given."""
HEAD: Final = 128
WIDTH_STEP: Final = 1_024
"""Widths are multiples of it, so that heads divide over the accelerators of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer. parameters: all; active: those that each token passes. context: tokens.

    experts: of each layer, 1 if it is dense. top: experts that a token passes.
    """

    parameters: float
    active: float
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    experts: int = 1
    top: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "context", "experts", "top"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name}: expected at least 1, got {getattr(self, name)}")
        if self.experts > 1 and not (self.top < self.experts and self.active < self.parameters):
            raise UserError("--experts: expected --top below it, and --active parameters below --parameters")

    @property
    def of_experts(self) -> float:
        """Return the parameters in experts: P = S + E·x and A = S + k·x."""
        if self.experts == 1:
            return 0.0
        return self.experts * (self.parameters - self.active) / (self.experts - self.top)

    @property
    def flops_a_token(self) -> float:
        """Return 6·P, of the active parameters: 2 forward and 4 backward (Kaplan et al. 2020)."""
        return 6.0 * self.active

    @property
    def attention_flops_a_token(self) -> float:
        """Return 6·layers·width·context, for causal attention: half of PaLM's 12·L·H·Q·T."""
        return 6.0 * self.layers * self.width * self.context


def shape_of(parameters: float) -> tuple[int, int]:
    """Return usual layers and width: 12·layers·width² parameters, with `ASPECT` features for each layer."""
    layers = max(4, 4 * round((parameters / (12 * ASPECT**2)) ** (1 / 3) / 4))
    width = math.sqrt(parameters / (12 * layers))
    step = WIDTH_STEP if width >= WIDTH_STEP else HEAD
    return layers, max(HEAD, step * round(width / step))


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """The division of a model over ranks. dp × fsdp × cp × tp × pp of them; ep divides dp × fsdp.

    ZeRO of stage `zero` divides the state along fsdp, and keeps it whole along dp. rows: sequences of a
    micro-batch.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    rows: int = 1
    recompute: bool = False

    @property
    def data(self) -> int:
        """Return the number of ranks that see data of their own."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        """The axes that are used, such as `fsdp=8 × tp=4, ZeRO 1`."""
        axes = [
            f"{axis}={getattr(self, axis)}"
            for axis in ("dp", "fsdp", "tp", "pp", "cp")
            if getattr(self, axis) > 1
        ]
        more = [f"ep={self.ep}"] if self.ep > 1 else []
        more += [f"ZeRO {self.zero}"] if self.zero else []
        more += ["recomputed"] if self.recompute else []
        return ", ".join([" × ".join(axes) or "one rank", *more])


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.weights + self.gradients + self.optimizer + self.activations


def held_parameters(model: ModelShape, strategy: Strategy) -> float:
    """Return the parameters of the largest rank before ZeRO divides them."""
    dense = model.parameters - model.of_experts
    return (dense + model.of_experts / strategy.ep) / (strategy.tp * strategy.pp)


def activation_bytes(model: ModelShape, strategy: Strategy, microbatches: int) -> float:
    """Return the activations of the first stage in 1F1B, which holds a micro-batch for each stage."""
    tokens = strategy.rows * model.context / strategy.cp
    unit = tokens * model.width / strategy.tp
    layers = model.layers / strategy.pp
    waiting = min(strategy.pp, microbatches)
    width = 1.0 + (model.top - 1) * 0.5 if model.experts > 1 else 1.0
    of_layer = LAYER_BYTES * unit * width
    logits = LOGIT_BYTES * tokens * model.vocabulary / strategy.tp
    if strategy.recompute:
        return waiting * layers * ITEM * unit + of_layer + logits
    return waiting * layers * of_layer + logits


def rank_memory(model: ModelShape, strategy: Strategy, microbatches: int) -> RankMemory:
    """Return what the largest rank holds."""
    held, zero, ranks = held_parameters(model, strategy), strategy.zero, strategy.fsdp
    weights, arrays = ITEM * held, ARRAY_ITEM * len(arrays_of(AdamWConfig()))
    if zero == 3:
        layer = weights / max(1.0, model.layers / strategy.pp)
        weights = weights / ranks + (GATHERED * layer if ranks > 1 else 0.0)
    return RankMemory(
        weights=weights,
        gradients=ITEM * held / (ranks if zero >= 2 else 1),
        optimizer=arrays * held / (ranks if zero >= 1 else 1),
        activations=activation_bytes(model, strategy, microbatches),
    )
