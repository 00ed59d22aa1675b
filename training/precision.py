"""Weights and gradients kept in 16 bits, computed with in float32, and updated from float32 masters.

P. Micikevicius and others, "Mixed precision training", 2018, arXiv:1710.03740. bfloat16 has float32's range
and needs no more; float16 overflows at 65,504 and loses what is below 6e-8, so its gradients are made
larger by a factor that follows what happens: a step whose gradients overflow is skipped, and counted.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never

import numpy as np
import numpy.typing as npt

from zbmd.training.adamw import AdamW, AdamWConfig, AdamWState
from zbmd.training.clip import TrainingDiverged, clip_scale, global_norm, non_finite
from zbmd.training.gpt import GPT, Tokens
from zbmd.training.xp import Array
from zbmd.transport.errors import UserError

Storage = Literal["float32", "bfloat16", "float16"]

SCALE_FIRST = 2.0**16
SCALE_LEAST = 1.0
SCALE_MOST = 2.0**24
SCALE_FACTOR = 2.0
GROWTH_STEPS = 2_000
"""Steps without an overflow after which the scale is doubled."""


def storage_dtype(storage: Storage) -> np.dtype[Any]:
    """Return the dtype. Raises `UserError` where bfloat16 is wanted and ml_dtypes is missing."""
    match storage:
        case "float32":
            return np.dtype(np.float32)
        case "float16":
            return np.dtype(np.float16)
        case "bfloat16":
            try:
                found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
                return found
            except ImportError as error:
                raise UserError("bfloat16 needs ml_dtypes: pip install 'zbmd[bfloat16]'.") from error
        case _:
            assert_never(storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """What gradients are multiplied by, and how it came to that. A part of a training's state.

    `good_steps` have passed since it changed; `skipped` steps overflowed so far.
    """

    scale: float = SCALE_FIRST
    good_steps: int = 0
    skipped: int = 0
    dynamic: bool = True

    @classmethod
    def of(cls, storage: Storage) -> LossScale:
        """The scale to begin with: only float16 needs one."""
        return cls() if storage == "float16" else cls(scale=1.0, dynamic=False)

    def after(self, *, finite: bool) -> LossScale:
        """The scale after a step whose gradients were finite, or were not and changed nothing."""
        if not finite:
            smaller = max(SCALE_LEAST, self.scale / SCALE_FACTOR) if self.dynamic else self.scale
            return replace(self, scale=smaller, good_steps=0, skipped=self.skipped + 1)
        if not self.dynamic or self.good_steps + 1 < GROWTH_STEPS:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(SCALE_MOST, self.scale * SCALE_FACTOR), good_steps=0)

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale cannot help: the next overflow is a divergence."""
        return not self.dynamic or self.scale <= SCALE_LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStep:
    """What a step reported: loss, nats a byte; the unscaled gradient's norm, or that it was skipped."""

    loss: float
    grad_norm: float
    skipped: bool


class MixedTrainer:
    """Trains a model on one process, with weights and gradients of `storage` and everything else in float32.

    Per parameter it keeps 2 + 2 bytes of weights and gradients, and 12 of masters and moments, which are
    updated in place.
    """

    def __init__(self, model: GPT, optimizer: AdamWConfig, *, storage: Storage, seed: int) -> None:
        self.model = model
        dtype = storage_dtype(storage)
        masters: npt.NDArray[np.float32] = model.init(seed)
        self.state = AdamWState(masters, np.zeros_like(masters), np.zeros_like(masters))
        self.weights: Array = masters.astype(dtype)
        self.loss_scale = LossScale.of(storage)
        self.step = 0
        self._grads: Array = np.zeros(model.layout.size, dtype=dtype)
        self._optimizer = AdamW(optimizer, model.layout)

    def run_step(self, tokens: Tokens, *, learning_rate: float, clip_norm: float) -> MixedStep:
        """Do one step on `tokens`, (samples, T + 1).

        Raises `TrainingDiverged`, naming the first gradient that is not finite, where no smaller scale can
        help; the state stays.
        """
        scale = self.loss_scale.scale
        loss = self.model.loss_and_grads(
            self.weights, self._grads, tokens, global_batch=len(tokens), loss_scale=scale
        )
        norm = scaled_norm(self._grads, scale=scale)
        finite = bool(np.isfinite(norm)) and bool(np.isfinite(loss))
        if not finite and self.loss_scale.exhausted:
            first = non_finite(self.model.layout, self._grads, xp=np) or "all are finite, and the loss is not"
            raise TrainingDiverged(
                f"step {self.step}: the training diverged. First of the gradients, {first}."
            )
        self.loss_scale = self.loss_scale.after(finite=finite)
        if finite:
            factor = clip_scale(norm, limit=clip_norm) / scale
            grads = self._grads.astype(np.float32)
            self._optimizer.update(
                self.state, self.state, grads, step=self.step, learning_rate=learning_rate, grad_scale=factor
            )
            self.weights[:] = self.state.weights
            self.step += 1
        return MixedStep(loss=loss, grad_norm=norm, skipped=not finite)


def scaled_norm(grads: Array, *, scale: float) -> float:
    """Return the norm of `grads / scale`, of any float dtype; infinite where it is not finite."""
    try:
        return global_norm(grads.astype(np.float32), xp=np) / scale
    except TrainingDiverged:
        return float("inf")
