"""The pipeline of a recipe: its programs, proven, and what passes between its stages."""

from __future__ import annotations

import numpy as np

from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.pipeline.program import Shape, StageProgram
from zbmd.training.pipeline.rings import Traffic
from zbmd.training.pipeline.schedules import activations_max, programs_of
from zbmd.training.pipeline.verifier import verify


def runnable_programs(schedule: str, shape: Shape) -> tuple[StageProgram, ...]:
    """Verified programs of a schedule that can be run. Raises `UserError`."""
    programs = programs_of(schedule, shape)
    verify(programs, activations_max=activations_max(schedule, shape))
    return programs


def traffic_of(
    model: GPTConfig, config: TrainingConfig, *, dtype: np.dtype[np.floating], tensor_ranks: int = 1
) -> Traffic:
    """What passes between stages for one micro-batch, which is a logical shard: this rank's rows of it."""
    rows = config.sequences_per_shard * model.context // tensor_ranks
    return Traffic(shape=(rows, model.width), dtype=dtype)
