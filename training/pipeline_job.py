"""Train a byte-level GPT cut into pipeline stages, one a rank: the bits of `python -m zbmd.training --plain`.

examples:
  zbmd-node run -n 2 -m zbmd.training.pipeline_job --steps 100
  zbmd-node run -n 2 -m zbmd.training.pipeline_job --schedule 1f1b --chunks 2 --layers 6 --out
      runs/pipeline
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import INBOX_BYTES_DEFAULT, Worker, join
from zbmd.collectives.commit.driver import StepFailed
from zbmd.collectives.group.group import Group
from zbmd.training import __main__ as training
from zbmd.training.autograd.array_module import Array
from zbmd.training.model.gpt import GPT
from zbmd.training.optim import arrays_of
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.pipeline.part import GPTPart, balanced_cuts, layers_in
from zbmd.training.pipeline.schedules import SCHEDULES
from zbmd.training.profiler.lines import StepLine
from zbmd.training.redundancy.interface import Redundancy
from zbmd.training.replicated.job import JobOptions, check_data, open_recipe, plan_of, weights_sha256
from zbmd.training.run.journal import report_result
from zbmd.training.sharded.job import MeshJob, MeshTask
from zbmd.training.sharded.mesh import PIPELINE_AXIS, Mesh, MeshGroups
from zbmd.training.sharded.stages import SLOTS, RankBytes, Stages, bytes_needed
from zbmd.training.sharded.trainer import MeshStep, MeshTrainer
from zbmd.training.step.accumulate import AccumulationPlan
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

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


REPORT_EVERY_STEPS = 10
ARENA_SPARE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """The result of a finished run. layers: those of each part, in order; bubble: median over steps.

    bubble_of_times: the schedule's, if each computation takes the median of what it took in this run: what
    `bubble` is above it is wake-ups, transfers, and how the times vary.
    """

    steps: int
    schedule: str
    stages: int
    layers: tuple[int, ...]
    loss_last: float
    bubble: float
    bubble_of_times: float
    weights_sha256: str


def parser() -> argparse.ArgumentParser:
    """The options of the job, and those of the pipeline."""
    made = training.parser()
    made.prog, made.description = "python -m zbmd.training.pipeline_job", __doc__
    made.add_argument("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)} (%(default)s)")
    made.add_argument("--chunks", type=int, default=1, help="parts a stage (%(default)s)")
    return made


async def run(options: JobOptions, *, schedule: str, chunks: int) -> PipelineResult | None:
    """The job on this rank, a stage of as many as there are ranks; the first returns the result.

    Raises `UserError` for what only a person can mend: settings, a divergence, neighbours lost at once.
    """
    found = RankEnvironment.read(os.environ)
    ranks = 1 if found is None else found.world_size
    mesh, needed = _needed(options, ranks, schedule, chunks)
    recipe = open_recipe(options, prepare=found is None or found.incarnation == 1)
    # Layers are cut by what they cost, which is not known yet: no stage has more than all of them.
    buffers = AccumulationPlan.of(recipe.config.shards, 0, recipe.config.shards).buffers
    arrays = len(arrays_of(recipe.config.optimizer))
    arena = 4 * (arrays * 2 * SLOTS + buffers) * recipe.model.layout.size + ARENA_SPARE_BYTES
    try:
        async with join(arena=arena, inbox_bytes=INBOX_BYTES_DEFAULT + needed.inbox, enter=False) as worker:
            return await MeshJob(worker, mesh, _Task(worker, recipe, options, schedule, chunks)).run()
    except (StepFailed, TrainingDiverged) as error:
        raise UserError(str(error)) from error


def _needed(options: JobOptions, ranks: int, schedule: str, chunks: int) -> tuple[Mesh, RankBytes]:
    """The mesh, and what a rank needs if layers cost alike. Raises `UserError` for what cannot be cut."""
    mesh = Mesh.of(ranks, {PIPELINE_AXIS: ranks})
    guessed = _stages([1.0] * layers_in(options.model), ranks, schedule, chunks)
    return mesh, bytes_needed(GPT(options.model), options.training, mesh, guessed)


def check(argv: Sequence[str], *, ranks: int, data: str | None) -> None:
    """Raise `UserError` for what this job cannot do on `ranks` ranks of this host, before one is started."""
    arguments, is_named = training.parsed(parser(), argv, data=data)
    options = _options_of(arguments)
    _needed(options, ranks, arguments.schedule, arguments.chunks)
    check_data(options, plan=plan_of, is_named=is_named)


def _options_of(arguments: argparse.Namespace) -> JobOptions:
    if arguments.resume is not None or arguments.plain:
        raise UserError("a pipeline starts from its seed, on ranks: omit --resume and --plain.")
    if arguments.zero is not None or arguments.offload is not None or arguments.storage != "float32":
        raise UserError("pipeline stages do not shard their state: omit --zero, --offload and --storage.")
    return training.options_of(arguments)


def _stages(costs: Sequence[float], ranks: int, schedule: str, chunks: int) -> Stages:
    """Layers of these costs, cut so that the dearest part is as cheap as can be. Raises `UserError`."""
    if chunks < 1:
        raise UserError(f"--chunks is {chunks}: it must be at least 1.")
    cuts = balanced_cuts(costs, ranks * chunks)
    return Stages(schedule=schedule, chunks=chunks, cuts=cuts)


class _Task(MeshTask[PipelineResult]):
    """Train with layers cut by what they cost on the first stage's machine."""

    def __init__(
        self, worker: Worker, recipe: Recipe, options: JobOptions, schedule: str, chunks: int
    ) -> None:
        self.steps, self.known, self.out = recipe.config.steps, 0, options.out
        self._worker, self._recipe = worker, recipe
        self._schedule, self._chunks = schedule, chunks
        self._costs = np.zeros(layers_in(recipe.model.config))
        """Of the layers; none is known at first."""
        self._stages = Stages()
        self._done: list[MeshStep] = []

    def agree(self, world: Group) -> None:
        """Cut by what the members of earlier views cut by; in the first, by what the first stage measures."""
        known = world.blocking.all_gather(self._costs)
        first = next((costs for costs in known if costs.any()), None)
        if first is None:
            if world.rank == 0:
                self._costs[:] = measured_costs(self._recipe)
            first = world.blocking.broadcast(self._costs, 0)
        self._costs[:] = first
        self._stages = _stages(self._costs.tolist(), world.size, self._schedule, self._chunks)

    def trainer(self, groups: MeshGroups) -> MeshTrainer:
        """See `MeshTask`."""
        return MeshTrainer(self._recipe, groups, stages=self._stages, zeros=self._zeros, begins_later=True)

    def copies(self, trainer: MeshTrainer) -> list[np.ndarray]:
        """See `MeshTask`."""
        size = len(arrays_of(self._recipe.config.optimizer)) * trainer.own.size_most
        return [self._zeros(size, trainer.state_dtype) for _ in range(SLOTS)]

    def _zeros(self, size: int, dtype: Any) -> np.ndarray:
        return self._worker.segment.arena.zeros(size, dtype)

    def committed(self, done: MeshStep) -> None:
        """Say how it goes."""
        if self._done and done.step <= self._done[-1].step:
            return
        self._done.append(done)
        step = done.step + 1
        if self._worker.rank == 0 and (step % REPORT_EVERY_STEPS == 0 or step == self.steps):
            print(f"step {step} loss {done.loss:.4f} grad_norm {done.grad_norm:.2f}", file=sys.stderr)

    def profiled(self, line: StepLine, mfu: float | None) -> None:
        """The profile's own files have it."""

    def reached(self, trainer: MeshTrainer, keeper: Redundancy) -> None:
        """Nothing is written on the way."""

    def finish(self, trainer: MeshTrainer) -> PipelineResult | None:
        """See `MeshTask`."""
        digest, bubble_of_times = weights_sha256(trainer.weights()), trainer.bubble_of_times()
        if self._worker.rank != 0:
            return None
        bubbles = [one.compute_ns / max(one.busy_ns) - 1.0 for one in self._done if one.busy_ns]
        result = PipelineResult(
            steps=trainer.step,
            schedule=self._schedule,
            stages=trainer.own.stages,
            layers=tuple(map(len, self._stages.cuts)),
            loss_last=self._done[-1].loss,
            bubble=float(np.median(bubbles)) if bubbles else 0.0,
            bubble_of_times=bubble_of_times,
            weights_sha256=digest,
        )
        report_result(self._worker, result)
        return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the last line that the first stage prints is its result as JSON."""
    try:
        arguments = parser().parse_args(argv)
        options = _options_of(arguments)
        uvloop.run(run(options, schedule=arguments.schedule, chunks=arguments.chunks))
    except UserError as error:
        if RankEnvironment.read(os.environ) is not None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return training.USER_ERROR_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
