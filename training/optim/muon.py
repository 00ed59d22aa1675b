"""Muon, out of place: the momentum of a hidden matrix is orthogonalised before it is used as a step.

K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon). The iteration is Newton-Schulz of fifth order, with coefficients that
bring every singular value near 1 in a few rounds, none exactly. Everything that is not a hidden matrix
(embedding, head, gains) is updated by AdamW.

The momentum is elementwise, but orthogonalisation needs the whole matrix. Ranks that hold slices of a matrix
(ZeRO's shards, tensor parallelism's columns and rows) gather it; each of them computes the whole result and
takes its own slice of it. This costs one all-gather per matrix, and the bits are those of an undivided
matrix. (So do J. Liu and others, "Muon is scalable for LLM training", 2025, arXiv:2502.16982.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import msgspec
import numpy as np

from zbmd.training.autograd.array_module import Array, widened
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.optim.elementwise import AdamW, AdamWConfig, AdamWState, Shard

ROUNDS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NORM_LEAST = 1e-7
NOT_HIDDEN = ("embed.weight", "head.weight")


class MuonConfig(msgspec.Struct, frozen=True, kw_only=True, tag="muon"):
    """Hyperparameters of Muon. The learning rate of the AdamW part is `adamw_rate` times Muon's."""

    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_rate: float = 0.1
    adamw: AdamWConfig = msgspec.field(default_factory=AdamWConfig)


def gather_alone(piece: Array) -> Sequence[Array]:
    """Return the pieces of a group of one."""
    return [piece]


Gather = Callable[[Array], Sequence[Array]]
"""Takes this rank's piece, 1-D, as long as the others'; returns all in rank order. All ranks call it
together.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMatrix:
    """This rank's part of a hidden matrix.

    `shape`: of the whole matrix. `span`: where its piece lies in the arrays that are updated. `cuts`: the
    slices of the ranks that hold the matrix together, by position; None: nothing. `place`: the position of
    this rank. `inner`: if this rank's slice is itself divided, over other ranks, the slices of it that they
    hold, in its memory order, by position; `inner_place`: this rank's position there.
    """

    shape: tuple[int, ...]
    span: slice
    cuts: tuple[ParameterSlice | None, ...]
    place: int = 0
    inner: tuple[ParameterSlice | None, ...] = ()
    inner_place: int = 0

    @property
    def held(self) -> ParameterSlice | None:
        """Return this rank's slice."""
        return self.cuts[self.place]

    @property
    def is_apart(self) -> bool:
        """Whether it must be gathered: several ranks hold slices of it, and none holds all."""
        whole = math.prod(self.shape)
        return all(cut is None or math.prod(cut.shape) < whole for cut in self.cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMatrices:
    """The hidden matrices of which ranks hold slices: the same ones in the same order on all ranks."""

    matrices: tuple[HeldMatrix, ...]
    gather: Gather = gather_alone
    gather_inner: Gather = gather_alone
    """Among the ranks that hold `inner` slices."""

    @classmethod
    def whole(cls, layout: ParameterLayout) -> HeldMatrices:
        """Return those of a rank that holds all of each."""
        return cls(
            matrices=tuple(
                HeldMatrix(shape=slot.shape, span=slot.span, cuts=(flat_slice(slot.size, 0, slot.size),))
                for slot in hidden_matrices(layout)
            )
        )

    def within(self, run: slice) -> HeldMatrices:
        """Return those that lie in this range of the arrays, for an optimizer that updates only the range."""
        found = [one for one in self.matrices if run.start <= one.span.start and one.span.stop <= run.stop]
        return HeldMatrices(
            matrices=tuple(
                replace(one, span=slice(one.span.start - run.start, one.span.stop - run.start))
                for one in found
            ),
            gather=self.gather,
            gather_inner=self.gather_inner,
        )


class Muon:
    """Muon for one layout. For a hidden matrix it has one moment, `mean`: the momentum.

    If `held` is given, the ranks that hold slices of the matrices update together. `shard` as in `AdamW`: the
    part of the arrays that AdamW updates.
    """

    def __init__(
        self,
        config: MuonConfig,
        layout: ParameterLayout,
        *,
        xp: ModuleType = np,
        dtype: type[np.floating] = np.float32,
        held: HeldMatrices | None = None,
        shard: Shard | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.xp = xp
        hidden = hidden_matrices(layout)
        self._held = HeldMatrices.whole(layout) if held is None else held
        self._rest = AdamW(config.adamw, layout, xp=xp, dtype=dtype, skipped=hidden, shard=shard)

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
        """Write to `new` the state that follows `old` by `grad_scale * grads`; see `AdamW.update`.

        Raises what `gather` raises; `new` is undefined then.
        """
        rate = learning_rate * self.config.adamw_rate
        self._rest.update(old, new, grads, step=step, learning_rate=rate, grad_scale=grad_scale)
        for matrix in self._held.matrices:
            slope = self._momentum(old, new, grads, matrix.span, grad_scale)
            move = self._orthogonal(matrix, slope)
            if move is not None:
                self._move(old, new, matrix, move, learning_rate)

    def _momentum(
        self, old: AdamWState, new: AdamWState, grads: Array, span: slice, grad_scale: float
    ) -> Array:
        """Write the new momentum; return Nesterov's look-ahead of it, for this rank's piece."""
        momentum = self.config.momentum
        slope = widened(grads[span]) * grad_scale
        mean = new.mean[span]
        self.xp.multiply(old.mean[span], momentum, out=mean)
        slope *= 1.0 - momentum
        mean += slope
        # momentum * mean + (1 - momentum) * gradient
        slope += mean * momentum
        return slope

    def _orthogonal(self, matrix: HeldMatrix, slope: Array) -> Array | None:
        """Return this rank's slice of the orthogonalised matrix; None if it holds none."""
        if matrix.inner:
            return self._orthogonal_inner(matrix, slope)
        if not matrix.is_apart:
            return None if matrix.held is None else orthogonalized(slope.reshape(matrix.shape), xp=self.xp)
        whole = self._gathered(matrix.cuts, slope, matrix.shape, self._held.gather)
        return None if matrix.held is None else matrix.held.of(orthogonalized(whole, xp=self.xp))

    def _orthogonal_inner(self, matrix: HeldMatrix, slope: Array) -> Array | None:
        """Return the same of a slice that is divided: all ranks take part in both gathers."""
        assert matrix.held is not None, "each rank along the outer axis holds a slice"
        mine = self._gathered(matrix.inner, slope, (math.prod(matrix.held.shape),), self._held.gather_inner)
        whole = self._gathered(matrix.cuts, mine, matrix.shape, self._held.gather)
        own = matrix.inner[matrix.inner_place]
        if own is None:
            return None
        return own.of(self.xp.ascontiguousarray(matrix.held.of(orthogonalized(whole, xp=self.xp))))

    def _gathered(
        self,
        cuts: Sequence[ParameterSlice | None],
        slope: Array,
        shape: tuple[int, ...],
        gather: Gather,
    ) -> Array:
        """Return the whole array of `shape` of which ranks hold the slices `cuts`, this one `slope`."""
        xp, sizes = self.xp, [0 if cut is None else math.prod(cut.shape) for cut in cuts]
        mine = xp.zeros(max(sizes), dtype=slope.dtype)
        mine[: len(slope)] = slope
        whole: Array = xp.empty(shape, dtype=slope.dtype)
        for cut, size, piece in zip(cuts, sizes, gather(mine), strict=True):
            if cut is not None:
                cut.of(whole)[...] = piece[:size].reshape(cut.shape)
        return whole

    def _move(
        self, old: AdamWState, new: AdamWState, matrix: HeldMatrix, move: Array, learning_rate: float
    ) -> None:
        inputs, outputs = matrix.shape
        span, weights = matrix.span, new.weights[matrix.span]
        move *= learning_rate * math.sqrt(max(1.0, outputs / inputs))
        self.xp.multiply(old.weights[span], 1.0 - learning_rate * self.config.weight_decay, out=weights)
        weights -= move.reshape(-1)
        new.square[span] = old.square[span]


def hidden_matrices(layout: ParameterLayout) -> tuple[ParameterSlot, ...]:
    """Return the parameters that are matrices between hidden layers."""
    return tuple(slot for slot in layout.slots if is_hidden(slot.name, slot.shape))


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is a matrix between hidden layers."""
    return len(shape) == 2 and name not in NOT_HIDDEN


def orthogonalized(matrix: Array, *, xp: ModuleType) -> Array:
    """Return `matrix`, 2-D, with its singular values brought near 1 (0.7 to 1.2) and its singular vectors
    kept.
    """
    first, second, third = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x: Array = matrix.T if tall else matrix
    flat = matrix.reshape(-1)
    x = x * (1.0 / (math.sqrt(float(xp.dot(flat, flat))) + NORM_LEAST))
    for _ in range(ROUNDS):
        square = xp.matmul(x, x.T)
        mixed = xp.matmul(square, square)
        mixed *= third
        mixed += square * second
        x = x * first + xp.matmul(mixed, x)
    return x.T.copy() if tall else x
