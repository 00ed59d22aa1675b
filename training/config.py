"""The configuration of a model and of a training run, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zbmd.training.optim import CURVES, AdamWConfig, Curve, OptimizerConfig
from zbmd.transport.errors import UserError

VOCABULARY = 256  # bytes: the default
# Bounds on what a file of weights may ask for; far above what a host's memory holds.
LAYERS_MAX = 1_024
EXTENT_MAX = 1 << 16

Activation = Literal["relu2", "gelu"]
Family = Literal["zbmd", "gpt2"]
"""The architecture of a model; see `zbmd.training.model.gpt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a decoder-only transformer. Raises `UserError` for an impossible one.

    `vocabulary` is the number of tokens: 256 if a token is a byte.
    """

    context: int = 64
    width: int = 128
    heads: int = 8
    layers: int = 5
    activation: Activation = "relu2"
    dropout: float = 0.0
    vocabulary: int = VOCABULARY
    family: Family = "zbmd"

    def __post_init__(self) -> None:
        for name, value, most in (
            ("context", self.context, EXTENT_MAX),
            ("width", self.width, EXTENT_MAX),
            ("heads", self.heads, EXTENT_MAX),
            ("layers", self.layers, LAYERS_MAX),
            ("vocabulary", self.vocabulary, EXTENT_MAX),
        ):
            if not 1 <= value <= most:
                raise UserError(f"the model's {name} is {value}: it must be 1 to {most}.")
        if self.width % self.heads:
            raise UserError(
                f"the model's width {self.width} cannot be divided over {self.heads} heads: "
                "choose a width that is a multiple of the number of heads."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"the model's dropout is {self.dropout}: it must be at least 0 and below 1.")
        if self.activation not in ("relu2", "gelu"):
            raise UserError(f'unknown activation "{self.activation}": use "relu2" or "gelu".')
        if self.family not in ("zbmd", "gpt2"):
            raise UserError(f'unknown model family "{self.family}": use "zbmd" or "gpt2".')


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The settings that determine the bits of a run, besides model and data.

    Raises `UserError` for impossible values.

    A step trains on `shards * sequences_per_shard` windows. Shards are logical: their number belongs to the
    job, not to its ranks. The learning rate rises for `warmup_steps`, then follows `curve` down to
    `learning_rate_floor` times its peak at the last of `horizon` steps (see
    `zbmd.training.optim`); 0 means `steps`. Set the horizon of a run that is to be continued
    later from its beginning.
    """

    steps: int
    shards: int = 12
    sequences_per_shard: int = 2
    learning_rate: float = 4e-3
    warmup_steps: int = 50
    learning_rate_floor: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    curve: Curve = "cosine"
    horizon: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "shards", "sequences_per_shard"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0.0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0.")
        if self.curve not in CURVES:
            raise UserError(f'unknown learning rate curve "{self.curve}": use {", ".join(CURVES)}.')
        if self.horizon < 0:
            raise UserError(f"the horizon is {self.horizon}: it must be 0 or more.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"the seed is {self.seed}: it must be 0 to 2**63 - 1.")

    @property
    def global_batch(self) -> int:
        """Return the windows per step."""
        return self.shards * self.sequences_per_shard
