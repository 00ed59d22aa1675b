"""The computation of one training step, whichever rank does it: shared by all jobs.

A step is: every shard's gradient (`Recipe.shard_gradient`), their sum along the shard tree, and the update
(`Recipe.update`). Each part depends on (model, data, configuration, step) and its inputs' bits alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import watched
from zbmd.training.autograd.rng import Noise
from zbmd.training.autograd.tape import GradReady
from zbmd.training.config import TrainingConfig
from zbmd.training.data.corpus import Corpus, SampleOrder
from zbmd.training.model.gpt import GPT
from zbmd.training.optim import learning_rate, optimizer_for
from zbmd.training.optim.clip import TrainingDiverged, clip_scale, global_norm, non_finite
from zbmd.training.optim.elementwise import AdamWState

# From malloc.h of glibc.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

FREED_BYTES_KEPT_MAX = 1 << 29
# Larger arrays are mapped and unmapped one by one; glibc takes no higher threshold.
HEAP_ARRAY_BYTES_MAX = 1 << 25


def keep_freed_memory() -> None:
    """Let this process keep up to `FREED_BYTES_KEPT_MAX` of freed memory instead of returning it at once.

    A step frees all its activations at its end. glibc gives such memory back to the kernel, and the next
    step pays for it by 800 page faults, an eighth of its time. All threads share one heap, since a thread's
    own one is made of 64 MiB parts that are given back whatever the thresholds say. Call it before the
    threads are made. A C library without `mallopt` is left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, HEAP_ARRAY_BYTES_MAX)
        mallopt(M_TRIM_THRESHOLD, FREED_BYTES_KEPT_MAX)
        mallopt(M_ARENA_MAX, 1)


WINDOWS_PER_PASS = 16
"""Held-out windows of one pass."""


class Recipe:
    """The step of one model on one corpus under one configuration. It holds no state of the training.

    Making one lets the process keep freed memory (`keep_freed_memory`).
    """

    def __init__(self, model: GPT, corpus: Corpus, config: TrainingConfig) -> None:
        keep_freed_memory()
        self.model = model
        self.corpus = corpus
        self.config = config
        self._order = SampleOrder(corpus.split, seed=config.seed, batch=config.global_batch)
        self._optimizer = optimizer_for(config.optimizer, model.layout, xp=model.xp)

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """Return the window ids of `step`, (shards, sequences_per_shard)."""
        with spans.DATA:
            return self.order_of(step)

    def order_of(self, step: int) -> npt.NDArray[np.int64]:
        """Return `sample_ids`, on any thread."""
        return self._order.sample_ids(step).reshape(self.config.shards, self.config.sequences_per_shard)

    def shard_gradient(
        self,
        params: Array,
        grads: Array,
        sample_ids: npt.NDArray[np.int64],
        *,
        step: int,
        on_grad_ready: GradReady | None = None,
        loss_scale: float = 1.0,
    ) -> float:
        """Write to `grads` one shard's part of the batch's gradient and return its part of the loss, nats.

        `sample_ids` is one row of `sample_ids(step)`, and `step` keys what is random; the rest is as in
        `GPT.loss_and_grads`.
        """
        with spans.DATA:
            windows = self.corpus.windows(sample_ids)
        return self.model.loss_and_grads(
            params,
            grads,
            windows,
            global_batch=self.config.global_batch,
            on_grad_ready=on_grad_ready,
            noise=Noise(self.config.seed, step, sample_ids),
            loss_scale=loss_scale,
        )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step` (from 0)."""
        return learning_rate_of(self.config, step)

    def update(self, old: AdamWState, new: AdamWState, grads: Array, *, step: int) -> float:
        """Write to `new` the state after `step`, whose summed gradient is `grads`; return its unclipped norm.

        Raises `TrainingDiverged` if the gradient is not finite; `new` is then as it was.
        """
        norm = self.norm(grads, step=step)
        self.apply(old, new, grads, step=step, norm=norm)
        return norm

    def norm(self, grads: Array, *, step: int) -> float:
        """Return the norm of a summed gradient. Raises `TrainingDiverged` if it is not finite."""
        try:
            with spans.GRAD_CLIP, watched("global_norm", grads):
                return global_norm(grads, xp=self.model.xp)
        except TrainingDiverged as error:
            raise self.diverged(error, grads, step=step) from None

    def diverged(self, error: TrainingDiverged, grads: Array, *, step: int) -> TrainingDiverged:
        """Return the error for a gradient that is not finite; it names the first such parameter."""
        first = non_finite(self.model.layout, grads, xp=self.model.xp) or "all its elements are finite"
        return TrainingDiverged(f"step {step}: {error} First of the gradients, {first}.")

    def apply(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        norm: float,
        loss_scale: float = 1.0,
    ) -> None:
        """Write to `new` the state after `step`, of gradient `grads / loss_scale`, clipped by its `norm`."""
        with spans.OPTIMIZER, watched("update", *old.arrays, *new.arrays, grads):
            self._optimizer.update(
                old,
                new,
                grads,
                step=step,
                learning_rate=self.learning_rate(step),
                grad_scale=clip_scale(norm, limit=self.config.clip_norm) / loss_scale,
            )

    def held_out_loss(self, params: Array, *, windows_max: int) -> float:
        """Return the mean loss, nats per byte, on at most `windows_max` held-out windows, always the same."""
        chunks = self.evaluation_chunks(windows_max)
        totals = [self.model.loss(params, self.corpus.windows(ids)) * len(ids) for ids in chunks]
        return mean_loss([np.array(totals)], chunks)

    def evaluation_chunks(self, windows_max: int) -> list[npt.NDArray[np.int64]]:
        """Return the ids of at most so many held-out windows, in chunks of one pass each."""
        ids = self.corpus.evaluation_ids(windows_max)
        return [ids[start : start + WINDOWS_PER_PASS] for start in range(0, len(ids), WINDOWS_PER_PASS)]


def mean_loss(totals: Sequence[Array], chunks: Sequence[npt.NDArray[np.int64]]) -> float:
    """Return the mean loss over the windows of `chunks`.

    totals: (chunks,) of each rank, the summed loss of each chunk; of n ranks, rank r has computed chunks r,
    r + n, r + 2n and so on.
    """
    found = [float(totals[number % len(totals)][number]) for number in range(len(chunks))]
    return sum(found) / sum(map(len, chunks))


def learning_rate_of(config: TrainingConfig, step: int) -> float:
    """The learning rate of `step` (from 0) under `config`."""
    return learning_rate(
        step,
        peak=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=config.horizon or config.steps,
        floor=config.learning_rate_floor,
        curve=config.curve,
    )
