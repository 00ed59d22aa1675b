"""One rank's memory and arithmetic under ZeRO: what the machine's actions do. It decides nothing.

Weights and gradients are kept in 16 bits (or in float32), a rank's shard of masters and moments in float32.
A unit that is whole in memory has room for all parts, `ranks * part` elements, so that gathering and
reducing it is one operation over equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zbmd.training.adamw import AdamW, AdamWConfig, AdamWState, Shard, update_blocks
from zbmd.training.gpt import GPT, Batch
from zbmd.training.precision import Storage, storage_dtype
from zbmd.training.tape import Parameter, Tape, Tensor
from zbmd.training.xp import Array
from zbmd.training.zero.accountant import Accountant, Kind
from zbmd.training.zero.layout import ShardLayout, Unit


@dataclass(slots=True)
class _Pass:
    """One unit's forward pass, kept for its backward pass."""

    tape: Tape
    x: Tensor
    y: Tensor
    parameters: list[Parameter]


class ZeroRank:
    """Rank `rank` of `shards.ranks`, with the initial weights of `seed`."""

    def __init__(
        self,
        model: GPT,
        shards: ShardLayout,
        *,
        rank: int,
        stage: int,
        storage: Storage,
        optimizer: AdamWConfig,
        seed: int,
    ) -> None:
        self.model = model
        self.shards = shards
        self.rank = rank
        self.stage = stage
        self.memory = Accountant()
        self.loss = 0.0
        self._dtype = storage_dtype(storage)
        self._passes: dict[int, _Pass] = {}
        self._slope: Array = np.zeros(0)
        size, take = shards.shard_size, self.memory.allocate
        self.state = AdamWState(*(take(Kind.OPTIMIZER, size, np.float32) for _ in range(3)))
        flat = model.init(seed)
        self.state.weights[:] = shards.shard_of(flat, rank)
        self._whole: dict[int, Array] = {}
        self._grads: dict[int, Array] = {}
        self._parts = self._sharded(Kind.WEIGHTS) if stage == 3 else {}
        self._grad_parts = self._sharded(Kind.GRADIENTS) if stage > 1 else {}
        for number, unit in enumerate(shards.units):
            if stage < 3:
                self._whole[number] = take(Kind.WEIGHTS, shards.ranks * unit.part, self._dtype)
                self._whole[number][: unit.size] = flat[unit.span]
                self._parts[number] = self._own(self._whole[number], unit)
            if stage == 1:
                self._grads[number] = take(Kind.GRADIENTS, shards.ranks * unit.part, self._dtype)
                self._grad_parts[number] = self._own(self._grads[number], unit)
        self._keep_rounded()
        blocks = update_blocks(model.layout)
        self._optimizers = [
            AdamW(optimizer, model.layout, shard=Shard(unit.part, self._blocks(unit, blocks)))
            for unit in shards.units
        ]

    def _sharded(self, kind: Kind) -> dict[int, Array]:
        shard = self.memory.allocate(kind, self.shards.shard_size, self._dtype)
        return {number: shard[unit.in_shard] for number, unit in enumerate(self.shards.units)}

    def _own(self, whole: Array, unit: Unit) -> Array:
        return whole[self.rank * unit.part : (self.rank + 1) * unit.part]

    def _blocks(self, unit: Unit, blocks: list[tuple[slice, bool]]) -> list[tuple[slice, bool]]:
        own = unit.of_rank(self.rank)
        cut = ((max(b.start, own.start), min(b.stop, own.stop), decayed) for b, decayed in blocks)
        return [(slice(lo - own.start, hi - own.start), decayed) for lo, hi, decayed in cut if lo < hi]

    # ---- weights

    def part(self, unit: int) -> Array:
        """This rank's part of the weights of `unit`, to be gathered by all: (part,)."""
        return self._parts[unit]

    def room(self, unit: int) -> Array:
        """Where the gathered weights of `unit` go: (ranks * part,), part r from rank r."""
        if unit not in self._whole:
            size = self.shards.ranks * self.shards.units[unit].part
            self._whole[unit] = self.memory.allocate(Kind.WORKING, size, self._dtype)
        return self._whole[unit]

    def release(self, unit: int) -> None:
        """Give the gathered weights of `unit` back."""
        if unit in self._passes:
            for parameter in self._passes[unit].parameters:
                parameter.stored = parameter.stored[:0]
        self.memory.free(Kind.WORKING, self._whole.pop(unit))

    # ---- passes

    def forward(self, unit: int, batch: Batch) -> None:
        """Compute `unit` of what the unit before it returned."""
        x = Tensor(self._passes[unit - 1].y.data if unit else np.zeros(0))
        tape, parameters = (
            Tape(np),
            [Parameter(view, None, i, None) for i, view in self._views(unit, self._whole)],
        )
        y = self.model.unit(tape, unit, x, parameters, batch)
        self._passes[unit] = _Pass(tape, x, y, parameters)
        if unit == len(self.shards.units) - 1:
            self.loss = float(y.data)
            self._slope = np.ones_like(y.data)

    def backward(self, unit: int) -> None:
        """Compute `unit` backwards; its gradient is then whole in memory."""
        if unit not in self._grads:
            size = self.shards.ranks * self.shards.units[unit].part
            self._grads[unit] = self.memory.allocate(Kind.WORKING, size, self._dtype)
        done = self._passes.pop(unit)
        views = zip(self._views(unit, self._whole), self._views(unit, self._grads), strict=True)
        for parameter, ((_, weights), (_, grads)) in zip(done.parameters, views, strict=True):
            parameter.stored, parameter.grad = weights, grads
        done.tape.play(done.y, self._slope)
        if done.x.grad is not None:
            self._slope = done.x.grad

    def _views(self, number: int, whole: dict[int, Array]) -> list[tuple[int, Array]]:
        unit, slots = self.shards.units[number], self.model.layout.slots
        places = range(unit.parameters.start, unit.parameters.stop)
        start = unit.span.start
        return [
            (i, whole[number][slots[i].offset - start :][: slots[i].size].reshape(slots[i].shape))
            for i in places
        ]

    def gradient(self, unit: int) -> Array:
        """The whole gradient of `unit`, to be reduced and scattered by all: (ranks * part,)."""
        return self._grads[unit]

    def take_reduced(self, unit: int, part: Array, *, release: bool) -> None:
        """Keep this rank's part of the summed gradient; with `release`, give the whole one back."""
        self._grad_parts[unit][:] = part
        if release:
            self.memory.free(Kind.WORKING, self._grads.pop(unit))

    # ---- the update

    def squares(self) -> float:
        """The sum of squares of this rank's part of the gradient, in double precision, unit after unit."""
        total = 0.0
        for number in range(len(self.shards.units)):
            part = self._grad_parts[number].astype(np.float64)
            total += float(np.dot(part, part))
        return total

    def update(self, *, step: int, learning_rate: float, grad_scale: float) -> None:
        """Update the shard of masters and moments in place, and round the weights from it."""
        for number, unit in enumerate(self.shards.units):
            own = AdamWState(*(array[unit.in_shard] for array in self._arrays))
            grads = self.memory.allocate(Kind.WORKING, unit.part, np.float32)
            grads[:] = self._grad_parts[number]
            self._optimizers[number].update(
                own, own, grads, step=step, learning_rate=learning_rate, grad_scale=grad_scale
            )
            self.memory.free(Kind.WORKING, grads)
        self._keep_rounded()

    def _keep_rounded(self) -> None:
        for number, unit in enumerate(self.shards.units):
            self._parts[number][:] = self.state.weights[unit.in_shard]

    @property
    def _arrays(self) -> tuple[Array, Array, Array]:
        return self.state.weights, self.state.mean, self.state.square

    # ---- loss of the group

    def abandon(self, units: Sequence[int]) -> None:
        """Drop the step: its passes, the gathered weights of `units`, gradients that are not kept."""
        self._passes.clear()
        for unit in units:
            if unit in self._whole:
                self.release(unit)
        if self.stage > 1:
            for unit in list(self._grads):
                self.memory.free(Kind.WORKING, self._grads.pop(unit))

    def kept(self) -> tuple[Array, Array, Array]:
        """A copy of what this rank alone holds: masters and moments of its shard."""
        weights, mean, square = self._arrays
        return weights.copy(), mean.copy(), square.copy()

    def restore(self, kept: tuple[Array, Array, Array]) -> None:
        """Go back to what `kept` returned. Under stages 1 and 2 weights are to be gathered behind this."""
        for array, old in zip(self._arrays, kept, strict=True):
            array[:] = old
        self._keep_rounded()


def norm_of(squares: Sequence[float]) -> float:
    """The norm of the whole gradient from all ranks' `squares`, added in their order; may not be finite."""
    total = sum(squares)
    return math.sqrt(total) if total >= 0.0 else math.nan
