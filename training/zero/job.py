"""`python -m zbmd.training --zero STAGE`: the training job with its state shared out over the ranks."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict

from zbmd.actors.member import Node, join
from zbmd.actors.runtime_env import RankEnvironment
from zbmd.collectives.group import Group, group
from zbmd.training.job import JobOptions, JobResult, open_recipe, result_of
from zbmd.training.journal import WEIGHTS_NAME
from zbmd.training.recipe import Recipe
from zbmd.training.weights import save_weights
from zbmd.training.zero.trainer import ZeroOptions, ZeroTrainer, arena_bytes_needed
from zbmd.transport._native import now_ns
from zbmd.transport.errors import OutOfMemory, UserError


async def run_zero(options: JobOptions, zero: ZeroOptions) -> JobResult | None:
    """The job on this rank; the lowest rank returns the result, the others None.

    Raises `UserError` for what only a person can mend, `PeerLost` when a rank ends.
    """
    if options.resume is not None:
        raise UserError("a run with --zero starts from its seed: leave out --resume.")
    launched = RankEnvironment.read(os.environ)
    ranks = 1 if launched is None else launched.world_size
    recipe = open_recipe(options)
    arena_bytes = arena_bytes_needed(recipe.model, options.training, zero, ranks=ranks)
    try:
        async with join(arena=arena_bytes) as node:
            made = await group(node)
            try:
                return await asyncio.to_thread(_train, node, made, recipe, options, zero)
            finally:
                await made.close()
    except OutOfMemory as error:
        raise UserError(
            f"ZeRO-{zero.stage} of this model over {ranks} ranks does not fit into memory: {error}. Choose a "
            "higher --zero stage, a smaller model, or more ranks."
        ) from error


def _train(
    node: Node, made: Group, recipe: Recipe, options: JobOptions, zero: ZeroOptions
) -> JobResult | None:
    trainer = ZeroTrainer(node, made, recipe, zero)
    loss_last = 0.0
    for _ in range(recipe.config.steps):
        done = trainer.run_step()
        loss_last = done.loss
        if node.rank == made.members[0]:
            _report_step(node, made, done.version, done.loss, done.grad_norm)
    weights = trainer.weights()
    result: JobResult | None = None
    if node.rank == made.members[0]:
        save_weights(options.out / WEIGHTS_NAME, weights, options.model, step=trainer.version)
        result = result_of(options, recipe, weights, loss_last)
        node.report({"kind": "result", **asdict(result)})
    made.blocking.barrier()  # nobody leaves before the weights are on disk
    return result


def _report_step(node: Node, made: Group, version: int, loss: float, grad_norm: float) -> None:
    node.report(
        {
            "kind": "step",
            "version": version,
            "epoch": made.epoch,
            "members": list(made.members),
            "loss": loss,
            "grad_norm": grad_norm,
            "held_out_loss": None,
            "at_ns": now_ns(),
        }
    )
