"""Divide a model over the stages of a mesh by the time of its layers, and compute a rank's memory for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Assignment, assign_shards
from zbmd.training.autograd.array_module import Array
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.job.mesh import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Mesh
from zbmd.training.job.stragglers.policy import shares_most
from zbmd.training.model.gpt import GPT
from zbmd.training.model.tensor_parallel import PartOfGPT
from zbmd.training.optim import OptimizerConfig, arrays_of
from zbmd.training.optim.mixed_precision import LossScale, computing_dtype
from zbmd.training.pipeline.part import GPTPart, OwnParts, balanced_cuts, even_cuts, layers_in
from zbmd.training.pipeline.program import Shape, StageProgram
from zbmd.training.pipeline.rings import inbox_bytes_needed, runnable_programs, traffic_of
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import assignment_of, buffers_most
from zbmd.training.zero.layout import ShardLayout, shards_of
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

FLOAT32: np.dtype[np.floating] = np.dtype(np.float32)
SLOTS = 2
"""Versions of the state: a step reads one and writes the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The division of a model into stages. cuts: the layers of each part; empty: equally many blocks each.

    balance: layers are divided by what they cost. That is known once it is measured: until then `cuts` are
    empty, and a stage needs memory for any number of layers.
    """

    schedule: str = "1f1b"
    chunks: int = 1
    cuts: tuple[range, ...] = ()
    balance: bool = False

    def cuts_of(self, config: GPTConfig, stages: int) -> tuple[range, ...]:
        """The layers of each part. Raises `UserError` for blocks that do not divide."""
        if self.chunks < 1:
            raise UserError(f"chunks is {self.chunks}: it must be at least 1.")
        shape = Shape(stages=stages, chunks=self.chunks, microbatches=1)
        if self.balance and not self.cuts:
            return balanced_cuts([1.0] * layers_in(config), stages * self.chunks)
        return self.cuts or even_cuts(config.layers, shape)

    def programs(
        self, training: TrainingConfig, mesh: Mesh, assignment: Assignment = ()
    ) -> tuple[tuple[StageProgram, ...], ...]:
        """The programs of the pipeline at each place among those that divide the data. Raises `UserError`.

        assignment: the shards of each place, unless they are even.
        """
        if mesh.size(PIPELINE_AXIS) > 1 and training.shards < mesh.data_ranks:
            along = " × ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.data_axes)
            raise UserError(
                f"{training.shards} logical shards are too few for {along} pipelines, each of which wants a "
                f"micro-batch: give more --shards, or a smaller {' or '.join(mesh.data_axes)}."
            )
        return tuple(
            runnable_programs(
                self.schedule,
                Shape(stages=mesh.size(PIPELINE_AXIS), chunks=self.chunks, microbatches=max(1, stop - start)),
            )
            for start, stop in assignment or assign_shards(training.shards, mesh.data_ranks)
        )

    def programs_most(
        self, training: TrainingConfig, mesh: Mesh, *, moves: bool
    ) -> tuple[tuple[StageProgram, ...], ...]:
        """Return the programs of pipelines, of which one has as many micro-batches as any ever has there.

        moves: whether shards may move between pipelines. Raises `UserError` as `programs`.
        """
        most = assignment_of(shares_most(training.shards, mesh.data_ranks)) if moves else ()
        return self.programs(training, mesh, most)


ONE_EACH = Stages()
"""A part a stage, in 1F1B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of memory that others reach, for one rank."""

    arena: int
    inbox: int


def bytes_needed(
    model: GPT,
    training: TrainingConfig,
    mesh: Mesh,
    stages: Stages,
    *,
    dtype: np.dtype[np.floating] = FLOAT32,
    copies: int = 0,
    offloaded: bool = False,
    shrinks: bool = False,
    spare: int = 0,
) -> RankBytes:
    """Of any rank of the mesh; `model` is the first part along `tp`, `copies`: of states kept for others.

    `dtype` is that of weights and gradients. offloaded: whether states are in files;
    shrinks: whether views may have fewer ranks along `dp`; spare: gradients beyond those of even shares, if
    shards may move.

    Raises `UserError` for layers or shards that cannot be divided over the mesh.
    """
    most = elements_most(model.config, mesh, stages)
    data_ranks = mesh.size(DATA_AXIS)
    buffers = buffers_most(training.shards, range(1, data_ranks + 1) if shrinks else [data_ranks]) + spare
    computing = computing_dtype(dtype)
    stored = (buffers + 1 + (dtype != computing or offloaded)) * most * dtype.itemsize
    state = 0 if offloaded else state_elements(most, dtype, training.optimizer) * computing.itemsize
    meshes = [mesh, mesh.along_data(1)] if shrinks else [mesh]
    moves = spare > 0
    inbox = max(
        inbox_needed(model.config, training, one, stages, dtype=computing, moves=moves) for one in meshes
    )
    return RankBytes(arena=stored + (SLOTS + copies) * state, inbox=inbox)


def inbox_needed(
    config: GPTConfig,
    training: TrainingConfig,
    mesh: Mesh,
    stages: Stages,
    *,
    dtype: np.dtype[np.floating] = FLOAT32,
    moves: bool = False,
) -> int:
    """Return the bytes that stages write to a rank. Raises `UserError` as `bytes_needed`.

    dtype: of activations; moves: whether shards may move between pipelines.
    """
    every = stages.programs_most(training, mesh, moves=moves)
    if mesh.size(PIPELINE_AXIS) == 1:
        return 0
    traffic = traffic_of(config, training, tensor_ranks=mesh.size(TENSOR_AXIS), dtype=dtype)
    return max(inbox_bytes_needed(programs, traffic) for programs in every)


def shard_layouts(config: GPTConfig, mesh: Mesh, stages: Stages) -> list[ShardLayout]:
    """Return how the part of each stage and slice of the model is sharded.

    Raises `UserError` as `bytes_needed`.
    """
    count, ranks = mesh.size(PIPELINE_AXIS), mesh.size(mesh.sharded_axis)
    cuts, models = stages.cuts_of(config, count), models_along_tp(config, mesh)
    if stages.balance:  # until layers are measured, a stage may have any of them
        return [
            ShardLayout.of(model.layout, (slice(0, len(model.layout.slots)),), ranks=ranks)
            for model in models
        ]
    return [
        shards_of(OwnParts(model, cuts, stages=count, stage=stage), ranks)
        for model in models
        for stage in range(count)
    ]


def models_along_tp(config: GPTConfig, mesh: Mesh) -> list[GPT]:
    """Return the slices of a model that ranks along `tp` hold. Raises `UserError` if it is not divided."""
    parts = mesh.size(TENSOR_AXIS)
    return [PartOfGPT(config, part, parts) for part in range(parts)] if parts > 1 else [GPT(config)]


def state_elements(size: int, dtype: np.dtype[np.floating], optimizer: OptimizerConfig) -> int:
    """Return the length of the state of `size` parameters of `dtype`, with the loss scale, if it changes."""
    return len(arrays_of(optimizer)) * size + LossScale.of(dtype).numbers


def elements_most(config: GPTConfig, mesh: Mesh, stages: Stages) -> int:
    """Parameters, with padding, of the rank that holds most. Raises `UserError` as `bytes_needed`."""
    count, models = mesh.size(PIPELINE_AXIS), models_along_tp(config, mesh)
    cuts = stages.cuts_of(config, count)
    if stages.balance:
        return max(model.layout.size for model in models)
    return max(OwnParts(model, cuts, stages=count, stage=0).size_most for model in models)


REPEATS = 4
"""The first finds cold caches; the shortest counts."""


def measured_costs(recipe: Recipe) -> list[float]:
    """Nanoseconds of a forward and a backward pass of one micro-batch, by layer: embedding, blocks, head.

    Blocks are all alike: one is timed.
    """
    config = recipe.model.config
    whole = recipe.model.init(recipe.config.seed)
    tokens = recipe.corpus.windows(recipe.sample_ids(0)[0])
    rows = tokens.shape[0] * config.context
    activations = np.random.default_rng(0).standard_normal((rows, config.width)).astype(np.float32)
    first, last = 0, layers_in(config) - 1
    cost_of = {layer: _cost(recipe, layer, whole, tokens, activations) for layer in (first, 1, last)}
    return [cost_of[layer if layer in (first, last) else 1] for layer in range(layers_in(config))]


def _cost(recipe: Recipe, layer: int, whole: Array, tokens: Array, activations: Array) -> float:
    part = GPTPart(recipe.model, range(layer, layer + 1))
    params = whole[part.span]
    grads = np.zeros_like(params)
    batch = part.model.batch(tokens, global_batch=1)
    shortest = float("inf")
    for _ in range(REPEATS):
        given = None if part.is_last else activations.copy()
        started_ns = now_ns()
        done = part.forward(params, grads, batch, None if part.is_first else activations)
        part.backward(done, given)
        shortest = min(shortest, now_ns() - started_ns)
    return shortest
