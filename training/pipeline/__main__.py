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

from zbmd.actors.member import INBOX_BYTES_DEFAULT, Node, join
from zbmd.actors.runtime_env import RankEnvironment
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group import Group, group
from zbmd.training import __main__ as training
from zbmd.training.job import JobOptions, open_recipe, weights_sha256
from zbmd.training.pipeline.layers import balanced_cuts
from zbmd.training.pipeline.measure import measured_costs
from zbmd.training.pipeline.part import layers_in
from zbmd.training.pipeline.rings import inbox_bytes_needed
from zbmd.training.pipeline.schedules import SCHEDULES
from zbmd.training.pipeline.trainer import (
    StageStep,
    StageTrainer,
    runnable_programs,
    shape_of,
    traffic_of,
)
from zbmd.training.recipe import Recipe
from zbmd.transport.errors import PeerLost, UserError

REPORT_EVERY_STEPS = 10
LEAVE_TAG = 1


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
    runnable = [name for name, schedule in SCHEDULES.items() if not schedule.splits]
    made.add_argument("--schedule", default="1f1b", help=f"{', '.join(runnable)} (%(default)s)")
    made.add_argument("--chunks", type=int, default=1, help="parts a stage (%(default)s)")
    return made


async def run(options: JobOptions, *, schedule: str, chunks: int) -> PipelineResult | None:
    """The job on this rank, a stage of as many as there are ranks; the first returns the result.

    Raises `UserError` for what only a person can mend, `PeerLost` when a stage ends.
    """
    found = RankEnvironment.read(os.environ)
    stages = 1 if found is None else found.world_size
    recipe = open_recipe(options)
    parts = stages * chunks
    balanced_cuts([1.0] * layers_in(options.model), parts)
    programs = runnable_programs(schedule, shape_of(recipe, stages=stages, parts=parts))
    inbox_bytes = INBOX_BYTES_DEFAULT + inbox_bytes_needed(programs, traffic_of(recipe))
    async with join(inbox_bytes=inbox_bytes) as node:
        made = await group(node)
        try:
            return await asyncio.to_thread(_train, node, made, recipe, schedule, parts)
        finally:
            await made.close()


def _train(node: Node, made: Group, recipe: Recipe, schedule: str, parts: int) -> PipelineResult | None:
    costs = np.zeros(layers_in(recipe.model.config))
    if node.rank == made.members[0]:
        costs[:] = measured_costs(recipe)
    cuts = balanced_cuts(made.blocking.broadcast(costs, made.members[0]).tolist(), parts)
    trainer = StageTrainer(node, made, recipe, cuts, schedule=schedule)
    try:
        steps = [_step(node, trainer, recipe.config.steps) for _ in range(recipe.config.steps)]
        digest = weights_sha256(trainer.weights())
        _take_leave(node, made)
    finally:
        trainer.close()
    if node.rank != made.members[0]:
        return None
    return PipelineResult(
        steps=len(steps),
        schedule=schedule,
        stages=made.size,
        layers=tuple(map(len, cuts)),
        loss_last=steps[-1].loss,
        bubble=float(np.median([one.took_ns / max(one.busy_ns) - 1.0 for one in steps])),
        weights_sha256=digest,
    )


def _take_leave(node: Node, made: Group) -> None:
    """Return once all stages have done their last operation: a group that closes ends those under way."""
    first, nothing = made.members[0], np.zeros(1, np.uint8)
    if node.rank != first:
        made.blocking.send(nothing, first, tag=LEAVE_TAG)
    else:
        for rank in made.members[1:]:
            made.blocking.recv(rank, tag=LEAVE_TAG)
    # Who has closed the group or ended by now had leave from the first, so all are done: that says the same.
    with contextlib.suppress(OperationAborted, PeerLost):
        if node.rank != first:
            made.blocking.recv(first, tag=LEAVE_TAG)
        else:
            for rank in made.members[1:]:
                made.blocking.send(nothing, rank, tag=LEAVE_TAG)


def _step(node: Node, trainer: StageTrainer, steps: int) -> StageStep:
    done = trainer.run_step()
    if node.rank == 0 and ((done.step + 1) % REPORT_EVERY_STEPS == 0 or done.step + 1 == steps):
        print(f"step {done.step + 1} loss {done.loss:.4f} grad_norm {done.grad_norm:.2f}", file=sys.stderr)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the last line that the first stage prints is its result as JSON."""
    try:
        arguments = parser().parse_args(argv)
        if arguments.resume is not None or arguments.plain:
            raise UserError("a pipeline starts from its seed, on ranks: leave out --resume and --plain.")
        if arguments.chunks < 1:
            raise UserError(f"--chunks is {arguments.chunks}: it must be at least 1.")
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
