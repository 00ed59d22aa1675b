"""Mixed precision: weights and gradients stored in 16 bits, computed in float32, updated from float32
masters.

P. Micikevicius and others, "Mixed precision training", 2018, arXiv:1710.03740. bfloat16 has the range of
float32 and needs nothing else. float16 overflows at 65,504 and flushes values below 6e-8, so its gradients
are multiplied by a dynamic loss scale: an attempt whose gradients overflow changes nothing and is counted,
and the step is attempted again with a smaller scale. All ranks see one norm, so they decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, assert_never

import numpy as np

from zbmd.training.autograd.array_module import Array, bfloat16, computing_dtype
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.transport.errors import UserError

Storage = Literal["float32", "bfloat16", "float16"]
Precision = Literal["float32", "float64", "bfloat16", "float16"]

SCALE_FIRST = 2.0**16
SCALE_LEAST = 1.0
SCALE_MOST = 2.0**24
SCALE_FACTOR = 2.0
GROWTH_STEPS = 2_000
"""Steps without an overflow after which the scale is doubled."""
SKIPPED_MOST = 1 << 24
"""Attempts that are counted: the largest integer up to which float32 is exact."""
__all__ = ["LossScale", "Precision", "Storage", "attempted", "computing_dtype", "storage_dtype"]

SCALE_NUMBERS: Final = 16
"""Elements that a loss scale takes next to masters and moments: a cache line of float32."""


def storage_dtype(storage: Precision) -> np.dtype[Any]:
    """Return the dtype of `storage`. Raises `UserError` for bfloat16 if ml_dtypes is missing."""
    match storage:
        case "float32":
            return np.dtype(np.float32)
        case "float64":
            return np.dtype(np.float64)
        case "float16":
            return np.dtype(np.float16)
        case "bfloat16":
            return bfloat16()
        case _:
            assert_never(storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The loss scale and its history, a part of the training state.

    `good_steps` have passed since it changed; `skipped` attempts at steps have overflowed so far.
    """

    scale: float = SCALE_FIRST
    good_steps: int = 0
    skipped: int = 0
    dynamic: bool = True

    @classmethod
    def of(cls, stored: np.dtype[Any], *, first: float = SCALE_FIRST) -> LossScale:
        """Return the initial scale for weights and gradients stored as `stored`; only float16 needs one,
        `first`.

        Raises `UserError` if `first` is out of bounds.
        """
        if not SCALE_LEAST <= first <= SCALE_MOST:
            raise UserError(
                f"the loss scale {first:g} is out of range: it must be {SCALE_LEAST:g} to {SCALE_MOST:g}."
            )
        return cls(scale=first) if stored == np.float16 else cls(scale=1.0, dynamic=False)

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale after an attempt whose gradients were finite, or were not and changed nothing."""
        if not finite:
            smaller = max(SCALE_LEAST, self.scale / SCALE_FACTOR) if self.dynamic else self.scale
            return replace(self, scale=smaller, good_steps=0, skipped=min(self.skipped + 1, SKIPPED_MOST))
        if not self.dynamic or self.good_steps + 1 < GROWTH_STEPS:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(SCALE_MOST, self.scale * SCALE_FACTOR), good_steps=0)

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale cannot help: the next overflow is a divergence."""
        return not self.dynamic or self.scale <= SCALE_LEAST

    @property
    def numbers(self) -> int:
        """Return the number of elements it takes next to a state: 0 if it never changes."""
        return SCALE_NUMBERS if self.dynamic else 0

    def write(self, room: Array) -> None:
        """Write it to `room`, (numbers,) float32, from which `read` restores it."""
        room[: len(self.values)] = self.values

    @property
    def values(self) -> tuple[float, ...]:
        """Return the values that `write` stores: none if it never changes."""
        return (self.scale, self.good_steps, self.skipped)[: self.numbers]

    def read(self, room: Array) -> LossScale:
        """Return the scale in `room`, or this one if `room` is empty. Raises `UserError` for invalid
        numbers."""
        if not len(room):
            return self
        if not self.dynamic or len(room) < 3:
            raise UserError(f"{len(room)} numbers are not a loss scale of this precision.")
        scale, good, skipped = (float(number) for number in room[:3])
        whole = good.is_integer() and skipped.is_integer()
        if not (whole and SCALE_LEAST <= scale <= SCALE_MOST and 0 <= good < GROWTH_STEPS and skipped >= 0):
            raise UserError(f"{scale}, {good}, {skipped} is not a loss scale: the saved state is damaged.")
        return replace(self, scale=scale, good_steps=int(good), skipped=int(skipped))


def attempted(scale: LossScale, attempt: Callable[[LossScale], float]) -> tuple[float, LossScale]:
    """Attempt a step until its gradient is finite; return its unscaled norm and the scale that was used.

    `attempt(scale)` computes the step's gradient, multiplied by the scale, and returns its norm, or raises
    `TrainingDiverged`. If no smaller scale can help, that error is raised here.
    """
    while True:
        try:
            return attempt(scale) / scale.scale, scale
        except TrainingDiverged:
            if scale.exhausted:
                raise
            scale = scale.after(finite=False)
