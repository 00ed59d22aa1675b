"""One rank's memory and arithmetic under ZeRO: what the machine's actions do. It decides nothing.

Weights and gradients are kept in 16 bits (or in float32), a rank's shard of masters and moments in float32.
A unit that is whole in memory has room for all parts, `ranks * part` elements, so that gathering and
reducing it is one operation over equal parts.

A rank computes its logical shards one after the other, unit by unit, and adds their gradients up along the
shard tree (`shard_sum`), where 16-bit ones are rounded at each node. So the sums have the bits of one process
that has all shards, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import NonFiniteProbe, ProbePoint, active_probe
from zbmd.training.autograd.op_watch import watched
from zbmd.training.autograd.parameter_layout import ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.checkpoint.sharded import Piece, SavedState
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model_actors.actors import HeldTensor
from zbmd.training.optim import (
    Gather,
    HeldMatrices,
    HeldMatrix,
    Optimizer,
    OptimizerConfig,
    arrays_of,
    gather_alone,
    optimizer_for,
    saved_arrays,
    whole_parameters,
)
from zbmd.training.optim.elementwise import AdamWState, Shard, update_blocks
from zbmd.training.optim.mixed_precision import SCALE_FIRST, LossScale, Storage, storage_dtype
from zbmd.training.redundancy.cut_events import Resharding, Span
from zbmd.training.redundancy.stamped import StampedSlots
from zbmd.training.redundancy.state_file import Paging, StateFile, run_shards, state_in
from zbmd.training.step.reduction import ShardSum
from zbmd.training.zero.layout import Accountant, MemoryKind, ShardLayout, Unit
from zbmd.training.zero.unit_passes import UnitPasses

Walk = Callable[[Array, list[Array], Sequence[Batch], float], Mapping[int, float]]
"""Does all passes of a step with these weights, buffers for gradients, batches and loss scale.

Returns the losses that are known here, by logical shard. Arrays may be longer than the shards' layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfModel:
    """The part of a model, divided along `pp` or `tp`, that is sharded.

    initial: returns its weights of the seed, in the shards' layout. cuts: of each of its parameters, the slot
    in the whole model and the slice of it. matrices: slices of hidden matrices that ranks along `tp` share,
    by name; gather: collects pieces of these. walk: does the passes, if all is one unit. places: returns the
    places of those that shard the same part in a world of so many ranks, in the order of their shards.
    replica: if the shards are the same in any world, returns the place of one with this shard in that world.
    """

    initial: Callable[[], Array]
    cuts: Sequence[tuple[ParameterSlot, ParameterSlice]]
    matrices: Mapping[str, HeldMatrix]
    gather: Gather
    walk: Walk | None
    places: Callable[[int], Sequence[int]] = range
    replica: Callable[[int], int] | None = None


class _Run(NamedTuple):
    """Elements that are updated at once: `at` of the part of a unit, `in_shard` of the shard."""

    unit: int
    at: slice
    in_shard: slice
    optimizer: Optimizer


class ZeroRank:
    """Rank `rank` of `shards.ranks`, with the initial weights of `seed`. `memory` makes and counts arrays.

    `part`: what `shards` divides, if it is not the whole model.
    `loss_scale` is what float16 begins with. With `keep_previous` there are two slots of the shard, and an
    update writes the one that is not in use. With `offload`, the two slots lie in that file, of
    `slot_elements`. Either way they hold the initial state only after `begin_anew`: a predecessor or a
    replica may have a later one. An optimizer that needs whole matrices calls `gather` in `update`, on all
    ranks together.
    """

    def __init__(
        self,
        model: GPT,
        shards: ShardLayout,
        sums: ShardSum,
        *,
        rank: int,
        stage: int,
        storage: Storage,
        optimizer: OptimizerConfig,
        seed: int,
        memory: Accountant | None = None,
        keep_previous: bool = False,
        loss_scale: float = SCALE_FIRST,
        offload: StateFile | None = None,
        kept: StampedSlots | None = None,
        gather: Gather = gather_alone,
        part: PartOfModel | None = None,
    ) -> None:
        self.model = model
        self._part = _whole(model, seed) if part is None else part
        self.passes = UnitPasses(model, shards)
        self.shards, self.rank, self.stage = shards, rank, stage
        self.divide(sums)
        self.memory = Accountant() if memory is None else memory
        self._losses: Mapping[int, Any] = {}
        """Of the last forward pass; a device may still compute them."""
        self.dtype = storage_dtype(storage)
        self._batches: list[Batch] = []
        self._loss_scale = 1.0
        self.initial_scale = LossScale.of(self.dtype, first=loss_scale)
        """That of the first step, before the state has one."""
        self.arrays, self._config = arrays_of(optimizer), optimizer
        size, take = slot_elements(shards, optimizer, self.dtype), self.memory.allocate
        self._offload, self._paging = offload, Paging(offload, self.arrays)
        if offload is not None:
            self.slots = offload.slots
            for slot in self.slots:
                self.memory.count(MemoryKind.OFFLOADED, slot)
        elif kept is not None:
            self.slots = kept.slots
            for kind, slot in zip((MemoryKind.OPTIMIZER, MemoryKind.MIRROR), self.slots, strict=True):
                self.memory.count(kind, slot)
        else:
            self.slots = [self.memory.reserve(MemoryKind.OPTIMIZER, size, np.float32)]
        """Masters and moments of the shard, one behind the other, and the loss scale, if it changes:
        what this rank alone holds."""
        if keep_previous and offload is None and kept is None:
            self.slots.append(self.memory.reserve(MemoryKind.MIRROR, size, np.float32))
        self.slot = 0
        """The one in use."""
        self._whole: dict[int, Array] = {}
        self._grads: dict[int, Array] = {}
        self._outgoing: dict[int, list[Array]] = {}
        self._parts = self._sharded(MemoryKind.WEIGHTS) if stage == 3 else {}
        self._grad_parts = self._sharded(MemoryKind.GRADIENTS) if stage > 1 else {}
        for number, unit in enumerate(shards.units):
            if stage < 3:
                self._whole[number] = take(MemoryKind.WEIGHTS, shards.ranks * unit.part, self.dtype)
                self._parts[number] = self._own(self._whole[number], unit)
            if stage == 1:
                self._grads[number] = take(MemoryKind.GRADIENTS, shards.ranks * unit.part, self.dtype)
                self._grad_parts[number] = self._own(self._grads[number], unit)
        self._runs = list(self._runs_of(optimizer, gather))
        self.first = 0
        self._initial: Array | None = None
        self._saved: SavedState | None = None
        self._begins_later = keep_previous or offload is not None
        if not self._begins_later:
            self.begin_anew()

    def divide(self, sums: ShardSum) -> None:
        """Compute this rank's logical shards of `sums` from now on, and reduce gradients along its tree."""
        self.sums, self._plan = sums, sums.plan(self.rank)

    def _runs_of(self, config: OptimizerConfig, gather: Gather) -> Iterator[_Run]:
        """Yield what `update` writes at once: each unit, or less of it if the state is in a file.

        A unit with matrices that are gathered is not divided: all ranks gather them in one order.
        """
        layout = self.shards.layout
        whole = whole_parameters(config, layout)
        blocks = update_blocks(layout, whole)
        for number, unit in enumerate(self.shards.units):
            own, held = self._blocks(unit, blocks), self._matrices(unit, whole, gather)
            runs = [(slice(0, unit.part), Shard(unit.part, own))]
            if self._offload is not None and not held.matrices:
                runs = list(run_shards(unit.part, own))
            for at, shard in runs:
                optimizer = optimizer_for(config, layout, shard=shard, held=held)
                in_shard = slice(unit.shard_start + at.start, unit.shard_start + at.stop)
                yield _Run(number, at, in_shard, optimizer)

    def begin_anew(self) -> None:
        """Take the initial state, in the slot of `first`: a checkpoint's, or weights of the seed.

        If the stage keeps weights whole, gather those of a checkpoint after this.
        """
        saved, self.slot = self._saved, self.first % len(self.slots)
        self.memory.ready(self.state_flat)
        self.state_flat[:] = 0
        scale = self.initial_scale
        if saved is not None:
            scale = scale.read(np.array(saved.loss_scale))
            for index, cut, at in self._held():
                slot, own = self._part.cuts[index]
                for name in saved_arrays(self._config, slot.name, slot.shape):
                    flat = getattr(self.state, name)
                    held = cut.of(own.of(saved.parameter(name, slot)).reshape(-1))
                    flat[at : at + cut.stop - cut.start] = held.reshape(-1)
        else:
            flat = self._part.initial() if self._initial is None else self._initial
            self.state.weights[:] = self.shards.shard_of(flat, self.rank)
            for number, unit in enumerate(self.shards.units if self.stage < 3 else ()):
                self._whole[number][: unit.size] = flat[unit.span]
        scale.write(self._scale_room)
        self.round_weights()

    def begin_with(self, weights: Array) -> None:
        """Begin with these weights, in the layout of the shards, not with the seed's."""
        self._initial = weights
        if not self._begins_later:
            self.begin_anew()

    def begin_from(self, saved: SavedState) -> None:
        """Begin with the state in a checkpoint, of any mesh. Raises `UserError` for damage."""
        self._saved, self.first = saved, saved.version
        self.slot = saved.version % len(self.slots)
        if not self._begins_later:
            self.begin_anew()

    def reshard(self, parts: int) -> Resharding:
        """See `ResizableState`."""
        if self._part.replica is not None:
            elements = self.slots[0].size
            return Resharding(elements, [Span(self._part.replica(parts), 0, elements, 0)])
        places = self._part.places(parts)
        old, arrays = self.shards.recut(len(places)), range(len(self.arrays))
        size, before = self.shards.shard_size, old.shard_size
        spans = list(self.shards.spans_from(old, self.rank))
        every = [
            Span(places[part], at * before + start, count, at * size + into)
            for at in arrays
            for part, start, count, into in spans
        ]
        scale = self.slots[0].size - len(arrays) * size
        if scale:  # it is the same in all parts
            every.append(Span(places[0], len(arrays) * before, scale, len(arrays) * size))
        return Resharding(len(arrays) * before + scale, every)

    def tensors(self, version: int) -> Iterator[HeldTensor]:
        """See `StateSource`."""
        weights = self._state_in(version % len(self.slots)).weights
        for index, cut, at in self._held():
            name = self.shards.layout.slots[index].name
            yield HeldTensor(name, cut, weights[at : at + cut.stop - cut.start])

    def pieces(self) -> list[Piece]:
        """Return this rank's share of a checkpoint: its shard, of parameters that are whole along `tp`."""
        state, slots = self.state, self.shards.layout.slots
        return [
            Piece(
                slots[index].name,
                cut,
                tuple(
                    getattr(state, name)[at : at + cut.stop - cut.start]
                    for name in saved_arrays(self._config, slots[index].name, slots[index].shape)
                ),
            )
            for index, cut, at in self._held()
        ]

    def _held(self) -> Iterator[tuple[int, ParameterSlice, int]]:
        """Each parameter that this rank holds a part of, which part, and where in the shard it lies."""
        for unit in self.shards.units:
            for index, cut, at in self._held_in(unit):
                yield index, cut, unit.shard_start + at

    def _held_in(self, unit: Unit) -> Iterator[tuple[int, ParameterSlice, int]]:
        """The same of one unit, and where in this rank's part of it."""
        slots, own = self.shards.layout.slots, unit.of_rank(self.rank)
        for index in range(unit.parameters.start, unit.parameters.stop):
            cut = unit.cut_of(slots[index], self.rank)
            if cut is not None:
                yield index, cut, slots[index].offset + cut.start - own.start

    def _matrices(self, unit: Unit, slots: Sequence[ParameterSlot], gather: Gather) -> HeldMatrices:
        """Return the parts, on all ranks, of those of these parameters that are in a unit."""
        layout, found = self.shards.layout, list[HeldMatrix]()
        at = {
            layout.slots[index].name: slice(at, at + cut.stop - cut.start)
            for index, cut, at in self._held_in(unit)
        }
        for slot in slots:
            if unit.span.start <= slot.offset < unit.span.stop:
                span, beside = at.get(slot.name, slice(0, 0)), self._part.matrices.get(slot.name)
                cuts = tuple(unit.cut_of(slot, rank) for rank in range(self.shards.ranks))
                found.append(
                    HeldMatrix(shape=slot.shape, span=span, cuts=cuts, place=self.rank)
                    if beside is None
                    else replace(beside, span=span, inner=cuts, inner_place=self.rank)
                )
        if not self._part.matrices:
            return HeldMatrices(matrices=tuple(found), gather=gather)
        return HeldMatrices(matrices=tuple(found), gather=self._part.gather, gather_inner=gather)

    def mirror_copies(self, elements: int | None = None) -> list[Array]:
        """Return room for both versions of another rank's shard: of `elements`, or as large as this."""
        size = self.slots[0].size if elements is None else elements
        return [self.memory.room(MemoryKind.MIRROR, size, np.float32) for _ in self.slots]

    @property
    def state_flat(self) -> Array:
        """The slot in use."""
        return self.slots[self.slot]

    @property
    def _scale_room(self) -> Array:
        return self.state_flat[len(self.arrays) * self.shards.shard_size :]

    @property
    def loss_scale(self) -> LossScale:
        """That of the next step, the same on all ranks. Raises `UserError` for a state that is damaged."""
        return self.initial_scale.read(self._scale_room)

    @property
    def state(self) -> AdamWState:
        """Masters and moments of the shard, in the slot in use."""
        return self._state_in(self.slot)

    def parts_in(self, slot: int) -> Iterator[Sequence[Array]]:
        """Views that together are all of a slot, run by run, the loss scale last."""
        for run in self._runs:
            yield self._paging.arrays(state_in(self._state_in(slot), run.in_shard))
        yield [self.slots[slot][len(self.arrays) * self.shards.shard_size :]]

    def _state_in(self, slot: int) -> AdamWState:
        return AdamWState.of(self.slots[slot], self.shards.shard_size, len(self.arrays))

    def _sharded(self, kind: MemoryKind) -> dict[int, Array]:
        shard = self.memory.allocate(kind, self.shards.shard_size, self.dtype)
        return {number: shard[unit.in_shard] for number, unit in enumerate(self.shards.units)}

    def _own(self, whole: Array, unit: Unit) -> Array:
        return whole[self.rank * unit.part : (self.rank + 1) * unit.part]

    @property
    def gradients(self) -> list[Array]:
        """This rank's parts of the summed gradient, by unit: (part,)."""
        return [self._grad_parts[number] for number in range(len(self.shards.units))]

    def _blocks(self, unit: Unit, blocks: list[tuple[slice, bool]]) -> list[tuple[slice, bool]]:
        own = unit.of_rank(self.rank)
        cut = ((max(b.start, own.start), min(b.stop, own.stop), decayed) for b, decayed in blocks)
        return [(slice(lo - own.start, hi - own.start), decayed) for lo, hi, decayed in cut if lo < hi]

    def _gradient(self, unit: int) -> Array:
        """Return room for a gradient of `unit`, to be overwritten; what follows its parameters is zero."""
        whole, held = self._unit_room(unit), self.shards.units[unit]
        ends = [slot.span.stop for slot in self.shards.layout.slots[held.parameters]]
        starts = [slot.offset for slot in self.shards.layout.slots[held.parameters]][1:]
        for end, start in zip(ends, [*starts, held.span.start + len(whole)], strict=True):
            whole[end - held.span.start : start - held.span.start] = 0
        return whole

    def _unit_room(self, unit: int) -> Array:
        return self.memory.take(
            MemoryKind.WORKING, self.shards.ranks * self.shards.units[unit].part, self.dtype
        )

    # ---- weights

    def part(self, unit: int) -> Array:
        """This rank's part of the weights of `unit`, to be gathered by all: (part,)."""
        return self._parts[unit]

    def room(self, unit: int) -> Array:
        """Return room for the gathered weights of `unit`: (ranks * part,), part r from rank r."""
        if unit not in self._whole:
            self._whole[unit] = self._unit_room(unit)
        return self._whole[unit]

    def release(self, unit: int) -> None:
        """Give the gathered weights of `unit` back."""
        self.passes.let_go(unit)
        self.memory.free(MemoryKind.WORKING, self._whole.pop(unit))

    # ---- passes

    @property
    def leaves(self) -> tuple[int, ...]:
        """The logical shards that this rank computes, in their order."""
        return tuple(leaf.shard for leaf in self._plan.leaves)

    @property
    def losses(self) -> dict[int, float]:
        """Return those of the logical shards of the last forward pass."""
        return {shard: float(loss) for shard, loss in self._losses.items()}

    def begin(self, batches: Sequence[Batch], *, loss_scale: float = 1.0) -> None:
        """Take what is computed in the next step: a batch for each of `leaves`.

        Gradients, not losses, are multiplied by `loss_scale`.
        """
        assert len(batches) == len(self._plan.leaves), "a batch a logical shard"
        self._batches, self._losses, self._loss_scale = list(batches), {}, loss_scale
        self.passes.begin(self._batches)

    def forward(self, unit: int) -> None:
        """Compute `unit` of what the unit before it returned. A walk has passes backwards in between."""
        if self._part.walk is not None:
            return
        made = self.passes.forward(unit, self._whole[unit])
        if unit == len(self.shards.units) - 1:
            self._losses = dict(zip(self.leaves, made, strict=True))
            self.passes.slopes = [self.model.xp.full_like(loss, self._loss_scale) for loss in made]

    def backward(self, unit: int) -> None:
        """Compute `unit` backwards; the partial sums of its gradient are then whole in memory."""
        buffers = self._buffers(unit)
        size = self.shards.units[unit].size
        self._outgoing[unit] = buffers  # to be dropped, if the passes are cut short
        if self._part.walk is not None:
            self._losses = dict(self._part.walk(self._whole[unit], buffers, self._batches, self._loss_scale))
            self._hand_out(unit, buffers)
            return
        for number, leaf in enumerate(self._plan.leaves):
            self.passes.backward(unit, number, self._whole[unit], buffers[leaf.buffer])
            self._plan.perform(leaf.additions, buffers, slice(0, size))
        self.passes.drop(unit)
        self._hand_out(unit, buffers)

    def _buffers(self, unit: int) -> list[Array]:
        """Return buffers for the gradients of shards: the one that is kept, if any, and others."""
        count = max(1, self._plan.buffers)
        kept = self._grads.get(unit)
        if kept is None:
            return [self._gradient(unit) for _ in range(count)]
        first = next(iter(self._plan.partials.values()), 0)
        return [kept if place == first else self._gradient(unit) for place in range(count)]

    def _hand_out(self, unit: int, buffers: list[Array]) -> None:
        """Keep the partial sums for the group; give back what is not sent."""
        out = [buffers[place] for place in self._plan.partials.values()] or buffers[:1]
        watching = active_probe()
        if watching is not None:
            self._look(watching, unit, [buffers[place] for place in self._plan.partials.values()])
        sent = {id(array) for array in out}
        for array in buffers:
            if id(array) not in sent and array is not self._grads.get(unit):
                self.memory.free(MemoryKind.WORKING, array)
        self._outgoing[unit] = out

    def _look(self, watching: NonFiniteProbe, unit: int, partials: list[Array]) -> None:
        """Look at what `unit` passes back, and at its gradients, the last parameter's first."""
        for slope in self.passes.slopes:
            watching.look(slope)
        for every in reversed(
            list(zip(*(self.passes.views(unit, grads) for grads in partials), strict=True))
        ):
            for index, view in every:
                watching.at(ProbePoint.GRADIENT, index)
                watching.look(view)

    def look_at_weights(self, watching: NonFiniteProbe) -> None:
        """Look at this rank's own weights, and at what it has of others' between steps."""
        for number, unit in enumerate(self.shards.units):
            for index, cut, at in self._held_in(unit):
                watching.at(ProbePoint.WEIGHTS, self.passes.indices[self.shards.layout.slots[index].name])
                watching.look(self._parts[number][at : at + cut.stop - cut.start])
        for number in sorted(self._whole):
            self.look_at_gathered(watching, number)

    def look_at_gathered(self, watching: NonFiniteProbe, unit: int) -> None:
        """Look at the weights of `unit` that came from all ranks."""
        for index, view in self.passes.views(unit, self._whole[unit]):
            watching.at(ProbePoint.WEIGHTS, index)
            watching.look(view, received=True)

    def outgoing(self, unit: int) -> list[Array]:
        """The partial sums of the gradient of `unit`, each (ranks * part,): `sums.width` of them.

        Those that this rank does not have are repeats of its first, which nobody reads.
        """
        own = self._outgoing[unit]
        return own + own[:1] * (self.sums.width - len(own))

    def take_reduced(self, unit: int, part: Array) -> None:
        """Keep this rank's part of the summed gradient, (part,); give back what the stage does not keep."""
        self._grad_parts[unit][:] = part
        self._drop(unit)

    def _drop(self, unit: int) -> None:
        for array in self._outgoing.pop(unit):
            if array is not self._grads.get(unit):
                self.memory.free(MemoryKind.WORKING, array)

    # ---- the update

    def update(
        self, *, step: int, learning_rate: float, grad_scale: float, loss_scale: LossScale | None = None
    ) -> None:
        """Update the shard of masters and moments, in place or into the other slot, and round the weights.

        `loss_scale` is that of the step behind this one, if it may have changed.
        """
        scale = self.loss_scale if loss_scale is None else loss_scale
        target = (self.slot + 1) % len(self.slots)
        self.memory.ready(self.slots[target])
        write = partial(self._write, target, step=step, learning_rate=learning_rate, grad_scale=grad_scale)
        actors = self.passes.actors
        write() if actors is None else actors.update(write)
        self.slot = target
        scale.write(self._scale_room)
        self._paging.wrote(self._scale_room)

    def _write(self, target: int, *, step: int, learning_rate: float, grad_scale: float) -> None:
        """Write the next version into a slot, and round its weights."""
        for number, run in enumerate(self._runs):
            old, new = (state_in(self._state_in(slot), run.in_shard) for slot in (self.slot, target))
            for ahead in self._runs[number + 1 : number + 2]:
                self._paging.bring_in(state_in(self._state_in(self.slot), ahead.in_shard))
            grads = self._grad_parts[run.unit][run.at]
            with watched("update", *old.arrays, *new.arrays, grads):
                run.optimizer.update(
                    old,
                    new,
                    grads,
                    step=step,
                    learning_rate=learning_rate,
                    grad_scale=grad_scale,
                )
            self._parts[run.unit][run.at] = new.weights
            self._paging.let_go(old, new)

    def round_weights(self) -> None:
        """Make this rank's parts of the weights from its masters, as behind every change of `state_flat`.

        Under stages 1 and 2 weights are to be gathered behind this.
        """
        weights = self.state.weights
        for number, unit in enumerate(self.shards.units):
            self._parts[number][:] = weights[unit.in_shard]

    # ---- loss of the group

    def abandon(self, units: Sequence[int]) -> None:
        """Drop the step: its passes, the gathered weights of `units`, gradients that are not kept.

        Of stage 3, units that were to be released and are not yet are released as well.
        """
        self.passes.clear()
        for unit in {*units, *(self._whole if self.stage == 3 else ())}:
            if unit in self._whole:
                self.release(unit)
        for unit in list(self._outgoing):
            self._drop(unit)


def _whole(model: GPT, seed: int) -> PartOfModel:
    cuts = [(slot, flat_slice(slot.size, 0, slot.size)) for slot in model.layout.slots]
    return PartOfModel(
        initial=lambda: model.init(seed), cuts=cuts, matrices={}, gather=gather_alone, walk=None
    )


def slot_elements(shards: ShardLayout, optimizer: OptimizerConfig, dtype: np.dtype[np.generic]) -> int:
    """Float32 numbers of what one rank alone holds: masters, moments, and the loss scale, if it changes."""
    return len(arrays_of(optimizer)) * shards.shard_size + LossScale.of(dtype).numbers
