"""A rank of a ZeRO job: rank 1 computes with a NaN in one attempt at one step; argv: its options."""

from __future__ import annotations

import asyncio
import sys

from support.jobs.by_words import recipe_by

import zbmd
from zbmd.training.job.mesh import Mesh, MeshGroups
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import LossScale
from zbmd.training.sharded.stages import ONE_EACH, shard_layouts
from zbmd.training.sharded.zero_trainer import ZeroTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.training.zero.options import ZeroOptions, arena_bytes_needed


def train(worker: zbmd.Worker, group: zbmd.Group, recipe: Recipe, zero: ZeroOptions) -> None:
    trainer = ZeroTrainer(recipe, MeshGroups.along_data(group), zero)
    trainer.run_step()
    attempt, part = trainer._attempt, trainer.own.part(1)

    def errs(scale: LossScale) -> float:
        trainer._attempt, kept = attempt, part[0]
        part[0] = float("nan")
        try:
            return attempt(scale)
        finally:
            part[0] = kept

    if worker.rank == 1:
        trainer._attempt = errs
    try:
        trainer.run_step()
    except TrainingDiverged as error:
        print(f"told {error}")


async def main() -> None:
    recipe = recipe_by(sys.argv[1:])
    zero = ZeroOptions(stage=1)
    layouts = shard_layouts(recipe.model.config, Mesh.of(2, {"dp": 2}), ONE_EACH)
    async with zbmd.join(arena=arena_bytes_needed(layouts, recipe.config, zero)) as worker:
        group = await zbmd.group(worker)
        await asyncio.to_thread(train, worker, group, recipe, zero)
        await group.close()


zbmd.run(main())
