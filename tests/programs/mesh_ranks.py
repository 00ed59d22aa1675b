"""The program of a test mesh's ranks: train a small model, and write the result down.

Told by the environment: where to (MESH_OUT), and the cases, one after the other (MESH_CASES, JSON).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import uvloop

from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.group.group import Group, group
from zbmd.training import ops
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus
from zbmd.training.job.mesh import Mesh, MeshGroups
from zbmd.training.job.task import StepResult
from zbmd.training.model.gpt import Operator
from zbmd.training.optim.mixed_precision import SCALE_FIRST, Precision, storage_dtype
from zbmd.training.sharded.replicated import ReplicatedTrainer
from zbmd.training.sharded.stages import Stages
from zbmd.training.sharded.trainer import MeshTrainer
from zbmd.training.sharded.zero_trainer import ZeroTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.training.zero.options import ZeroOptions


class Case(msgspec.Struct, kw_only=True):
    """A model to train on a mesh."""

    name: str
    mesh: str
    model: GPTConfig
    training: TrainingConfig
    corpus: str
    dtype: Precision = "float32"
    overlap: bool = True
    recompute: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    loss_scale: float = SCALE_FIRST
    zero: int = 0
    """The stage that shards the state along dp; 0: none does."""
    moves: dict[int, tuple[int, ...]] = {}
    """Shards of each place among those that divide the data, from a step on; at first they are even."""
    poisoned: int = -1
    """The rank that finds a NaN, and no other."""
    poison: Literal["weight", "forward", "backward"] = "weight"
    """The content of the block that it has first."""


def run_case(case: Case, groups: MeshGroups, worker: Worker) -> dict[str, np.ndarray]:
    model = groups.model(case.model, recompute=case.recompute)
    recipe = Recipe(model, Corpus(Path(case.corpus), context=case.model.context), case.training)
    stages, spare = Stages(schedule=case.schedule, chunks=case.chunks), 2 * bool(case.moves)
    trainer: ReplicatedTrainer | ZeroTrainer
    if case.zero:
        assert case.dtype != "float64"
        options = ZeroOptions(stage=case.zero, storage=case.dtype, loss_scale=case.loss_scale)
        trainer = ZeroTrainer(recipe, groups, options, stages=stages, spare=spare)
        trainer.enter(groups, 0)
    else:
        trainer = ReplicatedTrainer(
            recipe,
            groups,
            stages=stages,
            dtype=storage_dtype(case.dtype),
            loss_scale=case.loss_scale,
            arena=worker.segment.arena,
            overlap=case.overlap,
            spare=spare,
        )
    if case.poisoned == worker.rank and case.poison == "weight":
        assert isinstance(trainer, ReplicatedTrainer)
        slot = next(one for one in trainer.own.layout.slots if one.name.endswith("blocks.0.mlp.out.weight"))
        trainer.params[slot.offset] = np.nan
    elif case.poisoned == worker.rank:
        model.operators = replace(model.operators, activation=poisoned_activation(case.poison == "forward"))
    done = [moved_step(trainer, case.moves.get(step, ())) for step in range(case.training.steps)]
    losses = [one.loss for one in done] + [trainer.held_out_loss(windows_max=20)]
    told = {
        "weights": trainer.weights(),
        "losses": np.array(losses),
        "norms": np.array([one.grad_norm for one in done]),
        "parameters": np.array(trainer.part.own.layout.parameter_count),
    }
    if isinstance(trainer, ZeroTrainer):
        told["state_bytes"] = np.array(trainer.memory.state_bytes_most)
    trainer.close()
    return told


def moved_step(trainer: MeshTrainer, shares: tuple[int, ...]) -> StepResult:
    """Run a step, with so many shards at each place among those that divide the data, unless it is empty."""
    mesh = trainer.groups.mesh
    if shares:
        of_ranks = tuple(shares[mesh.data_place(rank)] for rank in range(mesh.world_size))
        assert trainer.rebalance(of_ranks) and trainer.shares == of_ranks
    return trainer.run_step()


def poisoned_activation(forwards: bool) -> Operator:
    """An activation with a NaN in its output, or in the gradient of its output."""

    def poisoned(tape: Tape, x: Tensor) -> Tensor:
        y = ops.squared_relu(tape, x)
        if forwards:
            y.data[0, 0] = np.nan
            return y

        def backward(dy: np.ndarray) -> None:
            dy[0, 0] = np.nan
            y.accumulate(dy)

        return tape.record(y.data, backward)

    return poisoned


async def run_cases(world: Group, worker: Worker, cases: list[Case]) -> None:
    for case in cases:
        mesh = Mesh.parse(case.mesh, world.size)
        along_data = case.zero and mesh.size("dp") == world.size
        groups = MeshGroups.along_data(world) if along_data else await MeshGroups.of(world, mesh)
        told = await asyncio.to_thread(run_case, case, groups, worker)
        with (Path(os.environ["MESH_OUT"]) / f"{case.name}.{worker.rank}.npz").open("wb") as file:
            np.savez(file, allow_pickle=False, **told)
        await world.barrier()
        await groups.close()


async def main() -> None:
    cases = msgspec.json.decode(os.environ["MESH_CASES"], type=list[Case])
    async with join(arena=256 << 20) as worker:
        world = await group(worker)
        try:
            await run_cases(world, worker, cases)
        finally:
            await world.close()


if __name__ == "__main__":
    uvloop.run(main())
