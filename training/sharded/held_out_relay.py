"""The held-out loss of a model in stages: forward passes alone, handed from stage to stage."""

from __future__ import annotations

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array
from zbmd.training.model.gpt import Batch
from zbmd.training.pipeline.own import OwnParts
from zbmd.training.step.recipe import Recipe

WINDOWS_PER_PASS = 16
RELAY_TAG = 2


def relayed_loss(
    recipe: Recipe, own: OwnParts, weights: Array, pipeline: Group, *, windows_max: int
) -> float:
    """What `Recipe.held_out_loss` returns, on all stages; all together. weights: (own.layout.size,)."""
    ids, total = recipe.corpus.evaluation_ids(windows_max), np.zeros(1)
    for start in range(0, len(ids), WINDOWS_PER_PASS):
        tokens = recipe.corpus.windows(ids[start : start + WINDOWS_PER_PASS])
        batch = recipe.model.batch(tokens, global_batch=len(tokens))
        loss = _relay(own, weights, batch, pipeline)
        if loss is not None:
            total += loss * len(tokens)
    last = pipeline.members[(len(own.every) - 1) % own.stages]
    found: Array = pipeline.blocking.broadcast(total, last)
    return float(found[0]) / len(ids)


def _relay(own: OwnParts, weights: Array, batch: Batch, pipeline: Group) -> float | None:
    """One pass through all parts, in their order; the last one's stage has the loss."""
    came: Array | None = None
    for number, part in own.parts.items():
        if number:
            before = pipeline.members[(number - 1) % own.stages]
            came = pipeline.blocking.recv(before, tag=RELAY_TAG).array
        made = part.evaluate(weights[own.spans[number]], batch, came)
        if part.is_last:
            return float(made)
        behind = pipeline.members[(number + 1) % own.stages]
        pipeline.blocking.send(np.ascontiguousarray(made), behind, tag=RELAY_TAG)
    return None
