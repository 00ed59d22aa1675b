"""A rank of `zbmd.tools.lab.bench.training.zero`: trains with and without copies of its shard, and from a
file."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import uvloop

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.group.group import Group, group
from zbmd.training import __main__ as training
from zbmd.training.redundancy.buddy import COPIES, BuddyReplica
from zbmd.training.redundancy.file import FileRedundancy
from zbmd.training.redundancy.interface import Digests
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.redundancy.state_file import NO_NOTE, StateFile, StateName
from zbmd.training.replicated.job import open_recipe
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.step_hook import NO_HOOK, StepHook
from zbmd.training.zero.layout import MemoryKind
from zbmd.training.zero.trainer import (
    ZeroOptions,
    ZeroStepResult,
    ZeroTrainer,
    arena_bytes_needed,
)
from zbmd.transport.native._native import now_ns

KIND: Final = "zero-cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Peak bytes of this rank, and times: of each step, and of copies and waits for them a step.

    offloaded_bytes: of the file; resident_bytes: of it in memory between steps, at most.
    """

    parameters: int
    state_bytes: int
    buddy_bytes: int
    previous_bytes: int
    working_bytes: int
    step_ns: list[int]
    mirrored_ns: list[int]
    offloaded_ns: list[int]
    offloaded_bytes: int
    resident_bytes: int
    copy_ns: int
    waited_ns: int


def measured(worker: Worker, made: Group, recipe: Recipe, options: ZeroOptions, folder: Path) -> RankCost:
    """Do the recipe's steps with all trainers, after one of each to warm up."""
    plain = ZeroTrainer(worker, made, recipe, options)
    file = _file(folder, plain, made.size)
    filed = ZeroTrainer(worker, made, recipe, options, offload=file)
    keeper = FileRedundancy(
        worker,
        filed.own,
        file,
        place=filed.own.rank,
        ranks=made.size,
        known=0,
        on_update=_ignore_update,
        on_commit=_ignore_commit,
        note=lambda _: NO_NOTE,
    )
    kept = ZeroTrainer(worker, made, recipe, options, keep_previous=True)
    mirror = BuddyReplica(
        worker,
        kept.own,
        place=kept.own.rank,
        ranks=made.size,
        copies=kept.own.mirror_copies(),
        known=0,
        on_update=_ignore_update,
        on_commit=_ignore_commit,
    )
    try:
        kept.enter(made, mirror.meet(made))
        filed.enter(made, keeper.meet(made))
        turns = ((plain, NO_HOOK), (kept, mirror), (filed, keeper))
        for trainer, watch in turns:
            trainer.run_step(watch)
        mirror.busy_ns = mirror.waited_ns = 0
        times: list[list[int]] = []
        resident_bytes = 0
        for _ in range(recipe.config.steps):
            times.append([_timed(trainer, watch) for trainer, watch in turns])
            resident_bytes = max(resident_bytes, file.resident_bytes())
        steps = len(times)
        shard_bytes = kept.own.slots[0].nbytes
        return RankCost(
            parameters=recipe.model.layout.parameter_count,
            state_bytes=plain.memory.state_bytes_most,
            buddy_bytes=kept.memory.most[MemoryKind.MIRROR] - shard_bytes,
            previous_bytes=kept.memory.most[MemoryKind.MIRROR] - SLOTS * shard_bytes,
            working_bytes=plain.memory.most[MemoryKind.WORKING],
            step_ns=[one[0] for one in times],
            mirrored_ns=[one[1] for one in times],
            offloaded_ns=[one[2] for one in times],
            offloaded_bytes=sum(slot.nbytes for slot in file.slots),
            resident_bytes=resident_bytes,
            copy_ns=mirror.busy_ns // steps,
            waited_ns=mirror.waited_ns // steps,
        )
    finally:
        file.remove()
        for watcher in (mirror, keeper):
            watcher.epoch_over()
            watcher.close()


def _file(folder: Path, like: ZeroTrainer, ranks: int) -> StateFile:
    own = like.own
    name = StateName(run=os.getppid(), place=own.rank, ranks=ranks, elements=own.slots[0].size)
    return StateFile(folder, name, again=False)


def _timed(trainer: ZeroTrainer, watch: StepHook) -> int:
    began_ns = now_ns()
    trainer.run_step(watch)
    return now_ns() - began_ns


def _ignore_update(done: ZeroStepResult) -> None:
    """Nobody is told."""


def _ignore_commit(version: int, digests: Digests) -> None:
    """Nobody is told."""


async def run() -> None:
    """Measure on this rank, and report."""
    arguments = training.parser().parse_args(sys.argv[1:])
    recipe = open_recipe(training.options_of(arguments))
    options = ZeroOptions(stage=arguments.zero, storage=arguments.storage)
    launched = RankEnvironment.read(os.environ)
    folder = arguments.offload or arguments.out / "offload"
    ranks, config = 1 if launched is None else launched.world_size, recipe.config
    arena_bytes = sum(
        arena_bytes_needed(recipe.model, config, options, ranks=ranks, copies=copies)
        for copies in (0, COPIES)
    )
    async with join(arena=arena_bytes) as worker:
        made = await group(worker)
        cost = await asyncio.to_thread(measured, worker, made, recipe, options, folder)
        worker.report({"kind": KIND, "cost": asdict(cost)})
        await made.barrier()
        await made.close()


if __name__ == "__main__":
    uvloop.run(run())
