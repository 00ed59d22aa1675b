"""The time that layers take on this machine, by which they are divided over stages."""

from __future__ import annotations

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.pipeline.part import GPTPart, layers_in
from zbmd.training.step.recipe import Recipe
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
