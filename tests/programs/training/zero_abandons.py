"""Ranks that abandon a step of ZeRO where rank 1 fails; argv: the corpus, a mesh, and where.

Each prints what that step, and the one before it, have left in the arena, without a collection of garbage.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from pathlib import Path

import zbmd
from zbmd.collectives.errors import OperationAborted
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus
from zbmd.training.job.mesh import Mesh, MeshGroups
from zbmd.training.sharded.zero_trainer import ZeroTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.training.zero.options import ZeroOptions
from zbmd.transport.errors import PeerLost

MODEL = GPTConfig(context=8, width=32, heads=2, layers=2)
TRAINING = TrainingConfig(steps=3, shards=4, sequences_per_shard=1, learning_rate=1e-3)
FAILING = {"gather": "_gather", "reduce": "_reduce", "norm": "_share_norm"}


def fails(*_: object) -> None:
    raise OperationAborted("on purpose")


def abandon(groups: MeshGroups, recipe: Recipe, point: str) -> None:
    trainer, arena = ZeroTrainer(recipe, groups, ZeroOptions(stage=3)), groups.worker.segment.arena
    trainer.enter(groups, 0)
    trainer.run_step()
    gc.collect()
    gc.disable()
    before = arena.used_bytes
    trainer.run_step()
    print(f"{groups.mesh} step leaves {arena.used_bytes - before} bytes")
    if groups.world.rank == 1:
        setattr(trainer, FAILING[point], fails)
    with contextlib.suppress(OperationAborted, PeerLost):
        trainer.run_step()
    print(f"{groups.mesh} {point} leaves {arena.used_bytes - before} bytes")
    gc.enable()
    trainer.close(gave_up=True)


async def main() -> None:
    corpus, mesh, point = sys.argv[1:]
    async with zbmd.join(arena=64 << 20) as worker:
        world = await zbmd.group(worker)
        made = Mesh.parse(mesh, world.size)
        groups = MeshGroups.along_data(world)
        if made.size("dp") < world.size:
            groups = await MeshGroups.of(world, made)
        recipe = Recipe(groups.model(MODEL), Corpus(Path(corpus), context=MODEL.context), TRAINING)
        await asyncio.to_thread(abandon, groups, recipe, point)
        await groups.close()
        await world.close()


zbmd.run(main())
