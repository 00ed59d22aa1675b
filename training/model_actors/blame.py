"""Whose op is at work at a place of the tape: found by going through the pass once more without computing."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import fields

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch, Operator, Operators


class DryPass(GPT):
    """The ops of a forward pass of `model` over `batch`, or of its unit `only`, by their place on the tape.

    Each op records one node, so that how many are on the tape tells which one is at work, in both directions.
    What fails between two ops counts as the latter's, what is computed again on the way back as its unit's.
    """

    def __init__(self, model: GPT, batch: Batch, *, recording: bool, only: int | None = None) -> None:
        vars(self).update(vars(model))
        self.operators = Operators(**{field.name: self._noting(field.name) for field in fields(Operators)})
        self._tape = Tape(np, recording=recording)
        self._names: dict[int, str] = {}
        self._starts: list[int] = []
        self._first = 0 if only is None else only
        parameters = [
            Parameter(np.zeros(0, np.float32), None, i, None) for i in range(len(self.layout.slots))
        ]
        if only is None:
            self.run(self._tape, parameters, batch)
        else:
            self.unit(self._tape, only, Tensor(np.zeros(0, np.float32)), parameters[self.units[only]], batch)

    def unit(self, tape: Tape, number: int, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """See `GPT`."""
        self._starts.append(self._tape.position)
        return super().unit(tape, number, x, parameters, batch)

    def operator_at(self, position: int) -> str | None:
        """The name of the op that is at work there, or None if a unit as a whole is."""
        return self._names.get(position)

    def unit_at(self, position: int) -> int:
        """The number of the unit that is at work there."""
        return self._first + max(0, bisect_right(self._starts, position) - 1)

    def _noting(self, name: str) -> Operator:
        def note(tape: Tape, *_: object, **__: object) -> Tensor:
            if tape is self._tape:
                self._names[tape.position] = name
            return tape.record(np.zeros(0, np.float32), _no_rule)

        return note


def _no_rule(_: Array) -> None:
    """Never played."""
