"""Elementwise optimizers, out of place: version k of the state is read, version k + 1 is written elsewhere.

AdamW: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", 2019, arXiv:1711.05101. Elementwise
updates have the same bits however they are divided into blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Final, Generic, Literal, TypeVar

import msgspec
import numpy as np

from zbmd.training.autograd.array_module import Array, has_kernels, widened
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlot, padded
from zbmd.training.native import _kernels

ConfigT = TypeVar("ConfigT")


class _OneMoment(Generic[ConfigT]):
    """An optimizer for one layout that keeps one moment, `mean`."""

    def __init__(
        self,
        config: ConfigT,
        layout: ParameterLayout,
        *,
        xp: ModuleType = np,
        shard: Shard | None = None,
    ) -> None:
        """If `shard` is given, `update` takes arrays of that shard instead of the whole flat arrays."""
        self.config = config
        self.layout = layout
        self.xp = xp
        self._shard = Shard(layout.size, update_blocks(layout)) if shard is None else shard


# ---- SGD


class SGDConfig(msgspec.Struct, frozen=True, kw_only=True, tag="sgd"):
    """Hyperparameters of SGD; `weight_decay` is multiplied by the learning rate and applies to matrices only.

    B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; Nesterov's form: I.
    Sutskever and others, "On the importance of initialization and momentum in deep learning", 2013; decoupled
    decay: I. Loshchilov, F. Hutter, arXiv:1711.05101 (SGDW).
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0


class SGD(_OneMoment[SGDConfig]):
    """SGD for one layout. It has one moment, `mean`: the velocity."""

    def update(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        learning_rate: float,
        grad_scale: float = 1.0,
    ) -> None:
        """Write to `new` the state that follows `old` by `grad_scale * grads`; see `AdamW.update`."""
        momentum = self.config.momentum
        for array in (old.weights, old.mean, new.weights, new.mean, grads):
            self._shard.check(array)
        for span, decayed in self._shard.blocks:
            decay = learning_rate * self.config.weight_decay if decayed else 0.0
            slope = widened(grads[span]) * grad_scale
            velocity = new.mean[span]
            self.xp.multiply(old.mean[span], momentum, out=velocity)
            velocity += slope
            if self.config.nesterov:
                slope += velocity * momentum
            else:
                slope = velocity * 1.0
            slope *= learning_rate
            weights = new.weights[span]
            self.xp.multiply(old.weights[span], 1.0 - decay, out=weights)
            weights -= slope


# ---- Lion


class LionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="lion"):
    """Hyperparameters of Lion; `weight_decay` is multiplied by the learning rate and applies to matrices
    only.

    X. Chen and others, "Symbolic discovery of optimization algorithms", 2023, arXiv:2302.06675.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1


class Lion(_OneMoment[LionConfig]):
    """Lion for one layout. It has one moment, `mean`."""

    def update(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        learning_rate: float,
        grad_scale: float = 1.0,
    ) -> None:
        """Write to `new` the state that follows `old` by `grad_scale * grads`; see `AdamW.update`."""
        xp, beta1, beta2 = self.xp, self.config.beta1, self.config.beta2
        for array in (old.weights, old.mean, new.weights, new.mean, grads):
            self._shard.check(array)
        for span, decayed in self._shard.blocks:
            decay = learning_rate * self.config.weight_decay if decayed else 0.0
            slope = widened(grads[span]) * grad_scale
            move = old.mean[span] * beta1
            move += slope * (1.0 - beta1)
            xp.sign(move, out=move)
            move *= learning_rate
            weights, mean = new.weights[span], new.mean[span]
            xp.multiply(old.weights[span], 1.0 - decay, out=weights)
            weights -= move
            xp.multiply(old.mean[span], beta2, out=mean)
            slope *= 1.0 - beta2
            mean += slope


# Nine streams of this many float32 fit a 1 MiB second-level cache.
UPDATE_BLOCK = 16_384  # elements


class AdamWConfig(msgspec.Struct, frozen=True, kw_only=True, tag="adamw"):
    """Hyperparameters of AdamW; `weight_decay` is multiplied by the learning rate and applies to matrices
    only.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of the flat arrays: its length, and its spans to update, each with or without weight decay."""

    size: int
    blocks: list[tuple[slice, bool]]

    def check(self, array: Array) -> None:
        """Raise `ValueError` unless `array` is a contiguous 1-D array of `size` elements."""
        if array.shape != (self.size,) or not array.flags.c_contiguous:
            raise ValueError(
                f"a flat array is 1-D, contiguous and here has {self.size} elements; "
                f"this one has shape {array.shape} and strides {array.strides}"
            )


StateArray = Literal["weights", "mean", "square"]
ARRAYS: Final[tuple[StateArray, ...]] = ("weights", "mean", "square")
"""The arrays of a state, in the order in which they lie in memory and in files."""


@dataclass(frozen=True, slots=True)
class AdamWState:
    """Weights and the first and second moments of their gradients: three flat arrays of one layout.

    For an optimizer with one moment, `square` may be empty: (0,).
    """

    weights: Array
    mean: Array
    square: Array

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Return all three."""
        return self.weights, self.mean, self.square

    @classmethod
    def of(cls, flat: Array, size: int, arrays: int) -> AdamWState:
        """Return views of the first `arrays` of `ARRAYS`, of `size` elements each, consecutive in `flat`."""
        every = range(len(ARRAYS))
        return cls(*(flat[k * size : (k + 1) * size] if k < arrays else flat[:0] for k in every))


class AdamW:
    """AdamW for one layout. It holds scratch blocks, but no training state."""

    def __init__(
        self,
        config: AdamWConfig,
        layout: ParameterLayout,
        *,
        xp: ModuleType = np,
        dtype: type[np.floating] = np.float32,
        skipped: tuple[ParameterSlot, ...] = (),
        shard: Shard | None = None,
    ) -> None:
        """Leave out the parameters `skipped`, which another optimizer updates: they are neither read nor
        written.

        If `shard` is given, the arrays given to `update` are that shard instead of the whole flat arrays.
        """
        self.config = config
        self.layout = layout
        self.xp = xp
        whole = Shard(layout.size, update_blocks(layout, skipped))
        self._shard = whole if shard is None else shard
        self._scratch = xp.empty(UPDATE_BLOCK, dtype=dtype)
        self._scaled = xp.empty(UPDATE_BLOCK, dtype=dtype)

    def update(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        learning_rate: float,
        grad_scale: float = 1.0,
    ) -> None:
        """Write to `new` the state that follows `old` by `grad_scale * grads`.

        All arrays are (layout.size,) of one float dtype, or as long as the shard; `grads` may be 16-bit
        floats, which are widened block by block. `new` shares no memory with `grads`, and either none with
        `old` or all of it: then the update is in place. `step` counts from 0. Padding that is zero stays
        zero.
        """
        for array in (old.weights, old.mean, old.square, new.weights, new.mean, new.square, grads):
            self._shard.check(array)
        correction_1 = 1.0 - self.config.beta1 ** (step + 1)
        correction_2 = 1.0 - self.config.beta2 ** (step + 1)
        step_size = learning_rate * math.sqrt(correction_2) / correction_1
        epsilon = self.config.epsilon * math.sqrt(correction_2)
        for span, decayed in self._shard.blocks:
            decay = learning_rate * self.config.weight_decay if decayed else 0.0
            self._update_block(old, new, grads, span, (grad_scale, step_size, epsilon, 1.0 - decay))

    def _update_block(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        span: slice,
        factors: tuple[float, float, float, float],
    ) -> None:
        xp, beta1, beta2 = self.xp, self.config.beta1, self.config.beta2
        grad_scale, step_size, epsilon, keep = factors
        length, slope = span.stop - span.start, widened(grads[span])
        scratch, scaled = self._scratch[:length], self._scaled[:length]
        mean, square, weights = new.mean[span], new.square[span], new.weights[span]
        olds = (old.weights[span], old.mean[span], old.square[span])
        if has_kernels(xp, weights, mean, square, *olds, slope):
            numbers = np.array([beta1, beta2, *factors])
            _kernels.adamw((weights, mean, square), olds, slope, numbers)
            return

        xp.multiply(slope, grad_scale, out=scaled)
        xp.multiply(scaled, 1.0 - beta1, out=scratch)
        xp.multiply(old.mean[span], beta1, out=mean)
        mean += scratch
        scaled *= scaled
        scaled *= 1.0 - beta2
        xp.multiply(old.square[span], beta2, out=square)
        square += scaled

        xp.sqrt(square, out=scratch)
        scratch += epsilon
        xp.divide(mean, scratch, out=scratch)
        scratch *= step_size
        xp.multiply(old.weights[span], keep, out=weights)
        weights -= scratch


def update_blocks(
    layout: ParameterLayout, skipped: tuple[ParameterSlot, ...] = ()
) -> list[tuple[slice, bool]]:
    """Divide the flat array, padding included, into spans of at most `UPDATE_BLOCK` with equal weight
    decay."""
    return [block for slot in layout.slots if slot not in skipped for block in slot_blocks(slot)]


def slot_blocks(slot: ParameterSlot) -> list[tuple[slice, bool]]:
    """Return the blocks of one parameter, with its padding."""
    stop = slot.offset + padded(slot.size)
    starts = range(slot.offset, stop, UPDATE_BLOCK)
    return [(slice(start, min(start + UPDATE_BLOCK, stop)), slot.decayed) for start in starts]
