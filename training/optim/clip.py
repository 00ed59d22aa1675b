"""Gradient clipping by the global norm, in one fixed order of summation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

from zbmd.training.autograd.array_module import Array, widened
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.transport.errors import ZbmdError

NORM_BLOCK = 16_384  # elements


class TrainingDiverged(ZbmdError):
    """The gradient is not finite: the state before this step is the last that is worth keeping."""


def global_norm(grads: Array, *, xp: ModuleType) -> float:
    """Return the Euclidean norm of `grads`, 1-D of any float dtype.

    The squares are summed in blocks of `NORM_BLOCK` elements in `grads`' dtype (float32 for 16-bit floats),
    the blocks' sums in order in double precision: the same bits wherever the array lies. Raises
    `TrainingDiverged` if the norm is not finite.
    """
    total = 0.0
    for start in range(0, len(grads), NORM_BLOCK):
        block = widened(grads[start : start + NORM_BLOCK])
        total += float(xp.dot(block, block))
    return norm_from(total)


def norm_from(squares: float) -> float:
    """The root of a sum of squares. Raises `TrainingDiverged` if it is not finite."""
    norm = math.sqrt(squares) if squares >= 0.0 else math.nan
    if not math.isfinite(norm):
        raise TrainingDiverged(
            f"the gradient's norm is {norm}: the training diverged. Lower the learning rate, or clip harder."
        )
    return norm


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A parameter whose gradient is not finite: in `bad` of `size` elements."""

    name: str
    is_nan: bool
    bad: int
    size: int

    def __str__(self) -> str:
        kind = "NaN" if self.is_nan else "infinite"
        return f"that of {self.name} is {kind} ({self.bad:,} of {self.size:,} elements are not finite)"


def non_finite(layout: ParameterLayout, grads: Array, *, xp: ModuleType) -> NonFinite | None:
    """Name the first parameter, as the backward pass goes, whose gradient is not finite; None if all are.

    The backward pass goes from the last parameter to the first, and carries what is not finite along.
    """
    views = layout.views(grads)
    for slot, view in zip(reversed(layout.slots), reversed(views), strict=True):
        bad = int(slot.size - xp.isfinite(view).sum())
        if bad:
            return NonFinite(slot.name, bool(xp.isnan(view).any()), bad, slot.size)
    return None


def clip_scale(norm: float, *, limit: float) -> float:
    """Return the factor, at most 1, that brings a gradient of norm `norm` down to the norm `limit`."""
    return 1.0 if norm <= limit else limit / norm
