"""Train a byte-level GPT cut into pipeline stages, one a rank: the bits of `python -m zbmd.training --plain`.

examples:
  zbmd-node run -n 2 -m zbmd.training.pipeline --steps 100
  zbmd-node run -n 2 -m zbmd.training.pipeline --schedule 1f1b --chunks 2 --layers 6 --out runs/pipeline
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import uvloop

from zbmd.actors.member import INBOX_BYTES_DEFAULT, join
from zbmd.actors.runtime_env import RankEnvironment
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group import Group, group
from zbmd.training import __main__ as training
from zbmd.training.job import JobOptions, open_recipe, weights_sha256
from zbmd.training.mesh import Mesh
from zbmd.training.pipeline.layers import balanced_cuts
from zbmd.training.pipeline.measure import measured_costs
from zbmd.training.pipeline.part import layers_in
from zbmd.training.pipeline.rings import inbox_bytes_needed
from zbmd.training.pipeline.runnable import traffic_of
from zbmd.training.pipeline.schedules import RUNNABLE
from zbmd.training.recipe import Recipe
from zbmd.training.tensor.axes import PIPELINE_AXIS
from zbmd.training.tensor.groups import MeshGroups
from zbmd.training.tensor.stages import Stages
from zbmd.training.tensor.trainer import MeshStep, MeshTrainer
from zbmd.transport.errors import PeerLost, UserError

REPORT_EVERY_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """What a finished run says of itself. layers: those of each part, in order; bubble: median over steps."""

    steps: int
    schedule: str
    stages: int
    layers: tuple[int, ...]
    loss_last: float
    bubble: float
    weights_sha256: str


def parser() -> argparse.ArgumentParser:
    """The options of the job, and those of the pipeline."""
    made = training.parser()
    made.prog, made.description = "python -m zbmd.training.pipeline", __doc__
    made.add_argument("--schedule", default="1f1b", help=f"{', '.join(RUNNABLE)} (%(default)s)")
    made.add_argument("--chunks", type=int, default=1, help="parts a stage (%(default)s)")
    return made


async def run(options: JobOptions, *, schedule: str, chunks: int) -> PipelineResult | None:
    """The job on this rank, a stage of as many as there are ranks; the first returns the result.

    Raises `UserError` for what only a person can mend, `PeerLost` when a stage ends.
    """
    found = RankEnvironment.read(os.environ)
    ranks = 1 if found is None else found.world_size
    recipe, mesh = open_recipe(options), Mesh.of(ranks, {PIPELINE_AXIS: ranks})
    guessed = _stages([1.0] * layers_in(options.model), ranks, schedule, chunks)
    (programs,) = guessed.programs(recipe.config, mesh)
    traffic = traffic_of(options.model, recipe.config, dtype=np.dtype(np.float32))
    inbox_bytes = INBOX_BYTES_DEFAULT + inbox_bytes_needed(programs, traffic)
    async with join(inbox_bytes=inbox_bytes) as node:
        world = await group(node)
        try:
            groups = await MeshGroups.of(world, mesh)
            try:
                return await asyncio.to_thread(_train, groups, recipe, schedule, chunks)
            finally:
                await groups.close()
        finally:
            await world.close()


def _stages(costs: Sequence[float], ranks: int, schedule: str, chunks: int) -> Stages:
    """Layers of these costs, cut so that the dearest part is as cheap as can be. Raises `UserError`."""
    if chunks < 1:
        raise UserError(f"--chunks is {chunks}: it must be at least 1.")
    cuts = balanced_cuts(costs, ranks * chunks)
    return Stages(schedule=schedule, chunks=chunks, cuts=cuts)


def _train(groups: MeshGroups, recipe: Recipe, schedule: str, chunks: int) -> PipelineResult | None:
    costs, world = np.zeros(layers_in(recipe.model.config)), groups.world
    is_first = world.rank == world.members[0]
    if is_first:
        costs[:] = measured_costs(recipe)
    agreed = world.blocking.broadcast(costs, world.members[0]).tolist()
    stages = _stages(agreed, world.size, schedule, chunks)
    trainer = MeshTrainer(recipe, groups, stages=stages)
    try:
        steps = [_step(trainer, recipe.config.steps, tell=is_first) for _ in range(recipe.config.steps)]
        digest = weights_sha256(trainer.weights())
        _take_leave(world)
    finally:
        trainer.close()
    if not is_first:
        return None
    return PipelineResult(
        steps=len(steps),
        schedule=schedule,
        stages=world.size,
        layers=tuple(map(len, stages.cuts)),
        loss_last=steps[-1].loss,
        bubble=float(np.median([one.compute_ns / max(one.busy_ns) - 1.0 for one in steps])),
        weights_sha256=digest,
    )


def _take_leave(world: Group) -> None:
    """Return once all stages have done their last operation: a group that closes ends those under way."""
    with contextlib.suppress(OperationAborted, PeerLost):
        world.blocking.barrier()


def _step(trainer: MeshTrainer, steps: int, *, tell: bool) -> MeshStep:
    done = trainer.run_step()
    if tell and ((done.step + 1) % REPORT_EVERY_STEPS == 0 or done.step + 1 == steps):
        print(f"step {done.step + 1} loss {done.loss:.4f} grad_norm {done.grad_norm:.2f}", file=sys.stderr)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the last line that the first stage prints is its result as JSON."""
    try:
        arguments = parser().parse_args(argv)
        if arguments.resume is not None or arguments.plain:
            raise UserError("a pipeline starts from its seed, on ranks: leave out --resume and --plain.")
        options = training.options_of(arguments)
        result = uvloop.run(run(options, schedule=arguments.schedule, chunks=arguments.chunks))
    except UserError as error:
        if RankEnvironment.read(os.environ) is not None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return training.USER_ERROR_EXIT
    if result is not None:
        print(msgspec.json.encode(asdict(result)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
