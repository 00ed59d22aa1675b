"""The parts of a model that one stage holds, in flat arrays of its own: one part behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.model.gpt import GPT
from zbmd.training.pipeline.part import GPTPart
from zbmd.training.pipeline.program import Shape


class OwnParts:
    """The parts of stage `stage` of `model`, cut into the layers `cuts`, one range a part.

    `layout` is that of the stage's flat arrays, `spans` where each part lies in them. A pipeline of one stage
    and one part has those of the model.
    """

    def __init__(self, model: GPT, cuts: Sequence[range], *, stages: int, stage: int) -> None:
        self.stages = stages
        self.stage = stage
        self.every = tuple(GPTPart(model, layers) for layers in cuts)
        self.numbers = range(stage, len(cuts), stages)
        self.parts = {number: self.every[number] for number in self.numbers}
        slots = [slot for part in self.parts.values() for slot in part.layout.slots]
        self.layout = ParameterLayout.of({slot.name: slot.shape for slot in slots})
        self.spans: dict[int, slice] = {}
        at = 0
        for number, part in self.parts.items():
            self.spans[number] = slice(at, at + part.layout.size)
            at += part.layout.size

    def shape(self, microbatches: int) -> Shape:
        """The pipeline of so many micro-batches."""
        return Shape(stages=self.stages, chunks=len(self.every) // self.stages, microbatches=microbatches)

    def cut(self, flat: Array) -> Array:
        """What this stage holds of the model's flat array: (layout.size,), a copy."""
        made: Array = np.concatenate([flat[part.span] for part in self.parts.values()])
        return made

    def joined(self, every: Array) -> Array:
        """The model's flat array, of what all stages hold, one behind the other in their order."""
        whole: Array = np.zeros(self.every[-1].span.stop, dtype=every.dtype)
        at = 0
        for number in self.order:
            span = self.every[number].span
            whole[span] = every[at : at + span.stop - span.start]
            at += span.stop - span.start
        return whole

    @property
    def order(self) -> list[int]:
        """All parts in the order in which stages hold them: those of the first stage, then the next's."""
        return [part for stage in range(self.stages) for part in range(stage, len(self.every), self.stages)]

    @property
    def size_most(self) -> int:
        """Elements of the flat array of the stage that holds most."""
        return max(
            sum(self.every[part].layout.size for part in range(stage, len(self.every), self.stages))
            for stage in range(self.stages)
        )
