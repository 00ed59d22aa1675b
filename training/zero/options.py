"""The options of sharded state, and the memory that a rank needs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.training.config import TrainingConfig
from zbmd.training.optim import arrays_of
from zbmd.training.optim.mixed_precision import SCALE_FIRST, LossScale, Storage, storage_dtype
from zbmd.training.step.reduction import partials_of, state_sums
from zbmd.training.zero.layout import ShardLayout
from zbmd.training.zero.machine import PREFETCH_MAX, REDUCING_MAX
from zbmd.transport.errors import UserError

STAGES: Final = (1, 2, 3)
WEIGHTS_STAGE: Final = STAGES[-1]
"""That which shards weights."""
ARENA_SLACK: Final = 1.25
"""Holes between arrays that come and go."""
ARENA_ROOM_BYTES: Final = 8 << 20
"""For what the group's operations stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptions:
    """The stage of ZeRO and its settings. prefetch: units whose weights are gathered ahead, with stage 3.

    loss_scale: what float16 begins with.

    Raises `UserError` for a stage or storage that there is not.
    """

    stage: int = 3
    storage: Storage = "float32"
    prefetch: int = 1
    loss_scale: float = SCALE_FIRST

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise UserError(f"unknown ZeRO stage {self.stage}: use 1, 2 or 3.")
        if not 1 <= self.prefetch <= PREFETCH_MAX:
            raise UserError(f"prefetch is {self.prefetch}: it must be 1 to {PREFETCH_MAX}.")
        LossScale.of(storage_dtype(self.storage), first=self.loss_scale)


def kept_bytes(
    layouts: Sequence[ShardLayout], config: TrainingConfig, options: ZeroOptions, *, copies: int, ranks: int
) -> int:
    """Return the bytes of shards, with `copies`, that any of `ranks` ranks keeps while a state is recut."""
    arrays, shard = len(arrays_of(config.optimizer)), max(one.shard_size for one in layouts)
    scale_bytes = 4 * LossScale.of(storage_dtype(options.storage)).numbers
    held = (1 + copies) if ranks > 1 else min(2, 1 + copies)  # nobody copies the state of one
    return int(ARENA_SLACK * held * (4 * arrays * shard + scale_bytes))


def arena_bytes_needed(
    layouts: Sequence[ShardLayout],
    config: TrainingConfig,
    options: ZeroOptions,
    *,
    copies: int = 0,
    offloaded: bool = False,
    states: int = 1,
    spare: int = 0,
) -> int:
    """Return the bytes of arena that any rank needs, with room for `copies` of shards beside its own.

    layouts: those of all stages and slices of the model. offloaded: shards are in files, and not in memory.
    states: how often the mesh holds the state. spare: partial sums beyond those of even shares.
    """
    ranks = layouts[0].ranks
    every = state_sums(config.shards, assign_shards(config.shards, states * ranks), states)
    dtype, arrays = storage_dtype(options.storage), len(arrays_of(config.optimizer))
    itemsize, scale_bytes = dtype.itemsize, 4 * LossScale.of(dtype).numbers
    shard = max(one.shard_size for one in layouts)
    whole = ranks * shard
    largest = ranks * max(unit.part for one in layouts for unit in one.units)
    units = max(len(one.units) for one in layouts)
    weights = shard if options.stage == 3 else whole
    grads = whole if options.stage == 1 else shard
    buffers, width = partials_of(every)
    partials = buffers + spare + 2 * (width + spare) + int(states > 1)
    reducing = min(units, REDUCING_MAX + 1) * itemsize * partials
    gathered = min(units, options.prefetch + 1) * itemsize
    held = 0 if offloaded else 1 + copies
    state_bytes = held * (4 * arrays * shard + scale_bytes) + itemsize * (weights + grads)
    return int(ARENA_SLACK * (state_bytes + (reducing + gathered) * largest)) + ARENA_ROOM_BYTES
