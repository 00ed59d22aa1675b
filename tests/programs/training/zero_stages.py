"""A rank that trains with each ZeRO stage and storage, then with a NaN on rank 1; argv: its options.

Halfway a logical shard moves from the last rank to the first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from dataclasses import replace

from support.jobs.by_words import recipe_by

import zbmd
from zbmd.training.job.mesh import Mesh, MeshGroups
from zbmd.training.optim import MuonConfig
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import Storage
from zbmd.training.sharded.stages import ONE_EACH, shard_layouts
from zbmd.training.sharded.zero_trainer import ZeroTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.training.zero.options import ZeroOptions, arena_bytes_needed

FEW = os.environ["WORLD_SIZE"] == "2"
STEPS = 20
SPARE = 1
"""Partial sums beyond those of even shares."""
KINDS: dict[Storage, int] = {"float32": STEPS} if FEW else {"float32": STEPS, "bfloat16": 6, "float16": 6}
OPTIONS = [
    (ZeroOptions(stage=stage, storage=storage, prefetch=stage, loss_scale=2.0**24), steps)
    for storage, steps in KINDS.items()
    for stage in (1, 2, 3)
]


def train(worker: zbmd.Worker, group: zbmd.Group, recipe: Recipe) -> None:
    for zero, steps in OPTIONS:
        trainer = ZeroTrainer(recipe, MeshGroups.along_data(group), zero, spare=SPARE)
        done = trainer.run_step()
        for step in range(1, steps):
            if step == steps // 2:
                first, *others, last = trainer.shares
                print(f"moved: {trainer.rebalance([first + 1, *others, last - 1])} {trainer.shares}")
            done = trainer.run_step()
        digest = hashlib.sha256(trainer.weights().data).hexdigest()
        if worker.rank == 0:
            told = f"{done.loss!r} {done.grad_norm!r} {done.skipped} {digest}"
            print(f"{zero.storage} stage {zero.stage}: {told}")
    group.blocking.barrier()
    # Of stage 1 each rank has weights of its own; of stage 3 all gather those of their owner.
    stage = 1 if FEW else 3
    trainer = ZeroTrainer(recipe, MeshGroups.along_data(group), OPTIONS[stage - 1][0])
    if worker.rank == 1:
        trainer.own.part(1)[0] = float("nan")
    try:
        trainer.run_step()
    except TrainingDiverged as error:
        print(f"told {error}")


async def main() -> None:
    recipe = recipe_by(sys.argv[1:])
    if os.environ["OPTIMIZER"] == "muon":
        recipe = Recipe(recipe.model, recipe.corpus, replace(recipe.config, optimizer=MuonConfig()))
    ranks = int(os.environ["WORLD_SIZE"])
    layouts = shard_layouts(recipe.model.config, Mesh.of(ranks, {"dp": ranks}), ONE_EACH)
    sizes = [arena_bytes_needed(layouts, recipe.config, zero, spare=SPARE) for zero, _ in OPTIONS]
    async with zbmd.join(arena=sum(sizes) + sizes[0]) as worker:
        group = await zbmd.group(worker)
        await asyncio.to_thread(train, worker, group, recipe)
        await group.close()


zbmd.run(main())
