"""The memory that a rank's activations take on a mesh: how many passes wait at once, of how many layers."""

from __future__ import annotations

from zbmd.training.config import GPTConfig
from zbmd.training.job.mesh import PIPELINE_AXIS, TENSOR_AXIS, Mesh
from zbmd.training.job.stragglers.policy import shares_most
from zbmd.training.pipeline.program import Shape
from zbmd.training.pipeline.schedules import schedule_named
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.step.memory_estimate import activation_bytes


def activations_needed(options: TrainOptions, config: GPTConfig, mesh: Mesh) -> int:
    """Return the bytes of float32 activations that a rank of `mesh` holds at its peak, on the CPU."""
    stages, training = options.stages, options.training
    microbatches = -(-training.shards // mesh.data_ranks)
    if options.spare_gradients:
        microbatches = max(shares_most(training.shards, mesh.data_ranks))
    shape = Shape(stages=mesh.size(PIPELINE_AXIS), chunks=stages.chunks, microbatches=microbatches)
    held = schedule_named(stages.schedule).activations_max(shape, 0)
    if options.zero and shape.stages == 1:  # all wait at each unit
        held = microbatches
    return activation_bytes(
        config,
        rows=training.sequences_per_shard * config.context,
        passes=min(held, microbatches * stages.chunks),
        blocks=max(1, config.layers // (shape.stages * shape.chunks)),
        tensor_ranks=mesh.size(TENSOR_AXIS),
        recompute=options.recompute,
    )
