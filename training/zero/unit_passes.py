"""The passes of units in turn: each is computed for all of a rank's logical shards before the next one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch, FusedUnits, UnitPass
from zbmd.training.model_actors.collective_log import Log, Recorder
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.model_actors.slot import Attempt
from zbmd.training.zero.layout import ShardLayout

R = TypeVar("R")


@dataclass(slots=True)
class _Pass:
    """One unit's forward pass of one logical shard, kept for its backward pass."""

    tape: Tape
    x: Tensor
    y: Tensor
    parameters: list[Parameter]
    log: Log
    """Results of collectives along `tp`, if actors compute."""


class UnitPasses:
    """Runs units of `model`, whose flat arrays are those of `shards.layout`. It holds no weights."""

    def __init__(self, model: GPT, shards: ShardLayout) -> None:
        self.model, self.shards = model, shards
        self.indices = {slot.name: index for index, slot in enumerate(model.layout.slots)}
        """Places of parameters in the model, by name: a stage has some of them."""
        self.actors: ModelActors | None = None
        """Compute units, if this thread does not by itself."""
        self.slopes: list[Array] = []
        """The gradients that the last backward pass gave to the unit before it, by logical shard."""
        self._passes: dict[int, list[_Pass]] = {}
        self._fused: dict[int, list[tuple[UnitPass, Array]]] = {}
        """Passes and outputs by unit, if the model has fused ones."""
        self._batches: Sequence[Batch] = ()

    def views(self, number: int, whole: Array) -> list[tuple[int, Array]]:
        """Return each parameter of a unit: its index in the model, and its view of the unit's array."""
        unit = self.shards.units[number]
        start, slots = unit.span.start, self.shards.layout.slots[unit.parameters]
        return [
            (self.indices[slot.name], whole[slot.offset - start :][: slot.size].reshape(slot.shape))
            for slot in slots
        ]

    def begin(self, batches: Sequence[Batch]) -> None:
        """Take what the next step computes."""
        self._batches = batches

    def forward(self, unit: int, weights: Array) -> list[Array]:
        """Compute `unit` of what the unit before it returned; return its output by logical shard."""
        if self.model.fused_units is not None:
            return self._forward_fused(unit, weights, self.model.fused_units)
        self._passes[unit] = [
            self._compute(partial(self._forward, unit, leaf, weights, Log()))
            for leaf in range(len(self._batches))
        ]
        return [one.y.data for one in self._passes[unit]]

    def backward(self, unit: int, leaf: int, weights: Array, grads: Array) -> None:
        """Play the pass of a logical shard backwards, from its slope; if that fails, do both passes again."""
        if unit in self._fused:
            stored, into = ([view for _, view in self.views(unit, flat)] for flat in (weights, grads))
            found = self._fused[unit][leaf][0].backward(stored, into, self.slopes[leaf])
            self.slopes[leaf] = self.slopes[leaf] if found is None else found
            return
        done = self._passes[unit][leaf]
        given = None if self.actors is None else self.slopes[leaf].copy()

        def work(attempt: Attempt) -> _Pass:
            now, slope = done, self.slopes[leaf]
            with self._recording(done.log, again=attempt.number > 0):
                if attempt.number and given is not None:
                    now, slope = self._run(unit, leaf, weights, done.log, attempt), given.copy()
                attempt.tape = now.tape
                views = zip(self.views(unit, weights), self.views(unit, grads), strict=True)
                for parameter, ((_, stored), (_, into)) in zip(now.parameters, views, strict=True):
                    parameter.stored, parameter.grad = stored, into
                now.tape.play(now.y, slope)
            return now

        played = self._compute(work)
        if played.x.grad is not None:
            self.slopes[leaf] = played.x.grad

    def evaluate(self, unit: int, weights: Array, x: Tensor, batch: Batch) -> Tensor:
        """Run `unit` forwards only, from what the unit before it returned."""
        parameters, log = self._leaves(unit, weights), Log()

        def work(attempt: Attempt) -> Tensor:
            tape = attempt.tape = Tape(self.model.xp, recording=False)
            with self._recording(log, again=True):
                return self.model.run_unit(tape, unit, x, parameters, batch)

        return self._compute(work)

    def let_go(self, unit: int) -> None:
        """Keep no weights or gradients of `unit`: `backward` is given them again."""
        for one in self._passes.get(unit, ()):
            for parameter in one.parameters:
                parameter.let_go()

    def drop(self, unit: int) -> None:
        """Drop the passes of `unit`, which are over."""
        self.let_go(unit)
        self._passes.pop(unit, None)
        for one, _ in self._fused.pop(unit, ()):
            one.leave()

    def clear(self) -> None:
        """Drop all passes."""
        for unit in [*self._passes, *self._fused]:
            self.drop(unit)

    def _forward_fused(self, unit: int, weights: Array, fused: FusedUnits) -> list[Array]:
        views, every = [view for _, view in self.views(unit, weights)], list[tuple[UnitPass, Array]]()
        self._fused[unit] = every
        for leaf, batch in enumerate(self._batches):
            one = fused.begin(range(unit, unit + 1), batch)
            came = self._fused[unit - 1][leaf][1] if unit else None
            every.append((one, one.forward(batch, views, came)))
        return [made for _, made in every]

    def _forward(self, unit: int, leaf: int, weights: Array, log: Log, attempt: Attempt) -> _Pass:
        with self._recording(log, again=True):
            return self._run(unit, leaf, weights, log, attempt)

    def _run(self, unit: int, leaf: int, weights: Array, log: Log, attempt: Attempt) -> _Pass:
        x = Tensor(self._passes[unit - 1][leaf].y.data if unit else np.zeros(0))
        tape, parameters = Tape(self.model.xp), self._leaves(unit, weights)
        attempt.tape = tape
        y = self.model.run_unit(tape, unit, x, parameters, self._batches[leaf])
        return _Pass(tape, x, y, parameters, log)

    def _leaves(self, unit: int, weights: Array) -> list[Parameter]:
        slots = self.model.layout.slots
        return [
            self.model.leaf(slots[index].name, Parameter(view, None, index, None))
            for index, view in self.views(unit, weights)
        ]

    def _recording(self, log: Log, *, again: bool) -> Recorder | nullcontext[None]:
        return nullcontext() if self.actors is None else self.actors.recording(log, again=again)

    def _compute(self, work: Callable[[Attempt], R]) -> R:
        return work(Attempt(0)) if self.actors is None else self.actors.compute(work)
