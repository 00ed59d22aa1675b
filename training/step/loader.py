"""Read and cut the next step's batches on a thread, while the step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd import spans
from zbmd.training.autograd.rng import Noise
from zbmd.training.model.gpt import Batch
from zbmd.training.step.recipe import Recipe
from zbmd.transport.native._native import now_ns

AHEAD_SHARE: Final = 0.01
"""Of a step: batches that are cut in less are cut when they are needed. A thread that cuts them holds the
interpreter meanwhile, which costs the step as much."""


class Loaded(NamedTuple):
    """The batches of some logical shards, in their order, and the ids of their samples."""

    samples: Mapping[int, npt.NDArray[np.int64]]
    batches: Sequence[Batch]


class BatchLoader:
    """Loads the batches of `recipe` for one rank. For one thread; close it after use."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, tuple[int, ...], Future[Loaded]] | None = None
        self._last: tuple[int, tuple[int, ...], Loaded] | None = None
        self._asked_ns = self._cut_ns = 0
        """When batches were asked for last, and how long it takes to cut those of a step."""

    def load(self, step: int, shards: Sequence[int]) -> Loaded:
        """Return the batches of these shards of `step`; a step that is repeated takes the same ones.

        Begins to load those of the next step, which are dropped if it has other shards.
        """
        asked = tuple(shards)
        with spans.DATA:
            if self._last is None or self._last[:2] != (step, asked):
                self._last = step, asked, self._found(step, asked)
                self._look_ahead(step + 1, asked)
        return self._last[2]

    def _found(self, step: int, shards: tuple[int, ...]) -> Loaded:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (step, shards):
            return ahead[2].result()
        return self._cut(step, shards)

    def _look_ahead(self, step: int, shards: tuple[int, ...]) -> None:
        now = now_ns()
        took_ns, self._asked_ns = now - self._asked_ns, now
        if self._cut_ns < AHEAD_SHARE * took_ns or step >= self._recipe.config.steps:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-loader")
        self._ahead = step, shards, self._pool.submit(self._cut, step, shards)

    def _cut(self, step: int, shards: tuple[int, ...]) -> Loaded:
        recipe, config, began_ns = self._recipe, self._recipe.config, now_ns()
        ids = recipe.order_of(step)
        batches = [
            recipe.model.batch(
                recipe.corpus.windows(ids[shard]),
                global_batch=config.global_batch,
                noise=Noise(config.seed, step, ids[shard]),
            )
            for shard in shards
        ]
        self._cut_ns = now_ns() - began_ns
        return Loaded({shard: ids[shard] for shard in shards}, batches)

    def close(self) -> None:
        """End the thread. Idempotent."""
        pool, self._pool, self._ahead = self._pool, None, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
