"""Numbers of 8 bits: how values are rounded to them, and the scales of tensors, or of blocks of them.

Delayed scaling chooses each tensor's scale from the steps before; a block's is that of its own values, as in
DeepSeek-V3's training (arXiv:2412.19437, section 3.3.2). `ops/cuda/hopper/fp8.cu` computes the same bits on a
device. Formats: P. Micikevicius and others, "FP8 formats for deep learning", 2022. Delayed scaling follows
NVIDIA's Transformer Engine, except that a scale is a power of two, so that multiplying by it is exact.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.transport.errors import UserError

Array = npt.NDArray[Any]
BLOCK: Final = 128
"""Columns of a block that has a scale of its own; its rows are 1, of activations, or 128, of weights."""
DEPTH_STEP: Final = 16
"""Elements that are read at once along the sums of a product."""
SCALE_EXPONENT_MOST: Final = 60
"""Of either sign: the product of two inverse scales is then a normal float32."""
_TINY: Final = np.float32(np.finfo(np.float32).tiny)


class Format(Enum):
    """E4M3 has more precision, for weights and activations; E5M2 more range, for gradients."""

    E4M3 = "float8_e4m3fn"
    E5M2 = "float8_e5m2"

    @property
    def largest(self) -> float:
        """Return the largest finite number: 1.75 times a power of two."""
        return 448.0 if self is Format.E4M3 else 57344.0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return numpy's dtype. Raises `UserError` if ml_dtypes is missing."""
        try:
            found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), self.value))
            return found
        except ImportError as error:
            raise UserError("FP8 needs ml_dtypes: pip install 'zbmd[bfloat16]'.") from error


def quantised(values: Array, scale: float | Array, form: Format) -> Array:
    """Return `values` times `scale`, one or that of each, rounded to nearest even.

    What is too large becomes the largest number of its sign. An infinity becomes NaN: as the largest number
    it would be hidden.
    """
    wide = values.astype(np.float32)
    with np.errstate(over="ignore"):
        inside = np.clip(wide * np.asarray(scale, np.float32), -form.largest, form.largest)
    return np.where(np.isinf(wide), np.float32(np.nan), inside).astype(form.dtype)


def scale_for(most: float, before: float, form: Format, *, margin: int = 0) -> float:
    """Return the largest power of two by which `most` stays in the range, divided by 2**margin.

    `before` if `most`, the largest magnitude seen, is zero, subnormal or not finite: then it says nothing.
    """
    return float(_scales_for(np.float32(most), np.float32(before), form, margin))


def _scales_for(most: Any, before: Any, form: Format, margin: int = 0) -> Any:
    fraction, exponent = np.frexp(most)
    room, top = np.frexp(np.float32(form.largest))
    power = np.int32(top) - exponent - (fraction > room) - margin
    found = np.ldexp(np.float32(1), np.clip(power, -SCALE_EXPONENT_MOST, SCALE_EXPONENT_MOST))
    return np.where((most >= _TINY) & (most < np.inf), found, before)


def quantised_blocks(values: Array, rows: int) -> tuple[Array, npt.NDArray[np.float32]]:
    """Return a matrix in E4M3, and the scale of each block of `rows` rows and `BLOCK` columns.

    Each is the largest power of two by which the block stays in the range; 1 if its largest magnitude is
    zero, subnormal or not finite.
    """
    (height, width), wide = values.shape, values.astype(np.float32)
    down, across = -(-height // rows), -(-width // BLOCK)
    padded = np.zeros((down * rows, across * BLOCK), np.float32)
    padded[:height, :width] = np.abs(wide)
    most = padded.reshape(down, rows, across, BLOCK).max(axis=(1, 3))
    scales: npt.NDArray[np.float32] = _scales_for(most, np.float32(1), Format.E4M3).astype(np.float32)
    return quantised(wide, spread(scales, rows, values.shape), Format.E4M3), scales


def spread(scales: Array, rows: int, shape: tuple[int, ...]) -> Array:
    """Return the scale of each element of a matrix whose blocks of `rows` rows have these."""
    return np.repeat(np.repeat(scales, rows, axis=0), BLOCK, axis=1)[: shape[0], : shape[1]]


def why_not_in_fp8(depth: int) -> str:
    """Return why there is no kernel for products whose sums are over `depth` elements; empty if there is."""
    if depth % DEPTH_STEP:
        return f"FP8 needs sums over a multiple of {DEPTH_STEP} elements, not {depth}"
    return ""


def product_of_blocks(form: str, a: Array, b: Array) -> npt.NDArray[np.float32]:
    """Return the product of two matrices whose blocks are rounded to E4M3, with float32 sums.

    form: nn, of activations and weights; nt, of a gradient and weights; tn, of activations and a gradient,
    whose sums are over their rows. Each letter says whether a matrix is transposed in memory.
    """
    left, right = a.T if form[0] == "t" else a, b if form[1] == "t" else b.T
    made = list[Array]()
    for matrix, rows in ((left, 1), (right, 1 if form == "tn" else BLOCK)):
        q, scales = quantised_blocks(matrix, rows)
        made.append(q.astype(np.float32) / spread(scales, rows, matrix.shape))
    with np.errstate(invalid="ignore"):
        found: npt.NDArray[np.float32] = made[0] @ made[1].T
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Options of delayed scaling. history: steps that are remembered. margin: powers of two left free."""

    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        """Raises `UserError` for what no scale can follow from."""
        if not 1 <= self.history <= 1024 or not 0 <= self.margin <= 32:
            raise UserError(
                f"expected a history of 1 to 1024 steps and a margin of 0 to 32, got {self.history} and "
                f"{self.margin}"
            )


class DelayedScaling:
    """The scales of some tensors, each from the largest magnitudes that the steps before have seen.

    A tensor is rounded with the scale that is known when a step begins, and its largest magnitude is measured
    on the way, so no tensor is read twice. `state` is float32, (tensors, 1 + history): each row is a scale,
    then the history, in which step s has place s % history. It is a part of the training state: a checkpoint
    has to keep it.
    """

    def __init__(self, formats: Sequence[Format], config: ScalingConfig | None = None) -> None:
        self.formats: Final = tuple(formats)
        self.config: Final = config or ScalingConfig()
        self.step = 0
        self.state: Final = np.zeros((len(self.formats), 1 + self.config.history), np.float32)
        self.state[:, 0] = 1.0

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        """Return the scale of each tensor in the step that comes."""
        return self.state[:, 0].copy()

    def observe(self, most: Sequence[float] | Array) -> None:
        """End a step: enter the largest magnitude of each tensor, and choose the scales of the next.

        A magnitude that is not finite is entered as zero: one bad step must not decide later scales.
        """
        found = np.asarray(most, np.float32)
        if found.shape != (len(self.formats),):
            raise UserError(f"expected {len(self.formats)} largest magnitudes, got shape {found.shape}")
        place = 1 + self.step % self.config.history
        self.state[:, place] = np.where(np.isfinite(found), np.abs(found), np.float32(0))
        for row, form in zip(self.state, self.formats, strict=True):
            row[0] = scale_for(float(row[1:].max()), float(row[0]), form, margin=self.config.margin)
        self.step += 1

    def arrays(self) -> dict[str, Array]:
        """Return copies of all that a checkpoint has to keep."""
        return {"fp8_state": self.state.copy(), "fp8_step": np.array(self.step, np.int64)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take what `arrays` returned. Raises `UserError` for what no machine of this shape has written."""
        missing = {"fp8_state", "fp8_step"} - set(arrays)
        if missing:
            raise UserError(
                f"expected the arrays fp8_state and fp8_step, found no {', '.join(sorted(missing))}"
            )
        state, step = arrays["fp8_state"], arrays["fp8_step"]
        if state.shape != self.state.shape or state.dtype != np.float32 or step.shape:
            raise UserError(
                f"expected FP8 scales of {self.state.shape[0]} tensors with a history of "
                f"{self.config.history} in float32, found {state.shape} in {state.dtype}: use the model and "
                "the history that the checkpoint was written with"
            )
        scales = state[:, 0]
        exponents = np.frexp(scales)
        powers = (exponents[0] == 0.5) & (np.abs(exponents[1] - 1) <= SCALE_EXPONENT_MOST)
        if not powers.all() or not np.isfinite(state).all() or (state < 0).any() or int(step) < 0:
            raise UserError("FP8 scales that are not powers of two, or a history that is not finite: damaged")
        self.state[:] = state
        self.step = int(step)
