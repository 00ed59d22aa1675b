"""A part of a GPT: some of its layers, from incoming to outgoing activations, and which stage holds which."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.autograd.tape import GradReady, Parameter, Tape, Tensor
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT, Batch, UnitPass
from zbmd.training.pipeline.program import Shape
from zbmd.training.step.reduction import Buckets
from zbmd.transport.errors import LocalProtocolError, UserError


def layers_of_parts(layers: int, shape: Shape) -> tuple[int, ...]:
    """Return equally many layers for each part. Raises `UserError` if they do not divide."""
    if layers < 1 or layers % shape.parts:
        below = layers // shape.parts * shape.parts
        near = f"{below} or {below + shape.parts}" if below > 0 else f"{shape.parts}"
        chunks = f" of {shape.chunks} chunks" if shape.chunks > 1 else ""
        raise UserError(
            f"{layers} layers do not divide over {shape.stages} stages{chunks}: that makes {shape.parts} "
            f"parts, which need a multiple of {shape.parts} layers, such as {near}."
        )
    return (layers // shape.parts,) * shape.parts


def even_cuts(blocks: int, shape: Shape) -> tuple[range, ...]:
    """Return the layers of each part: equally many blocks, with the embedding first and the head last.

    Raises `UserError` if the blocks do not divide over the parts.
    """
    if shape.parts == 1:
        return (range(blocks + 2),)
    each = layers_of_parts(blocks, shape)[0]
    starts = [0, *range(1 + each, 1 + blocks, each), blocks + 2]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def balanced_cuts(costs: Sequence[float], parts: int) -> tuple[range, ...]:
    """Divide layers of these costs, in order, into `parts` runs so that the most expensive is minimal.

    The linear partition problem, by dynamic programming over prefixes; every run has a layer. Raises
    `UserError` if there are fewer layers than parts.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise UserError(f"cannot divide {count} layers into {parts} parts: use fewer stages or chunks.")
    prefix = [0.0, *accumulate(costs)]
    best, cuts = prefix[:], list[list[int]]()
    for part in range(1, parts):
        row, cut = [0.0] * (count + 1), [0] * (count + 1)
        for end in range(part + 1, count + 1):
            cut[end], row[end] = _last_cut(best, prefix, part, end)
        best = row
        cuts.append(cut)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    bounds = [0, *reversed(ends)]
    return tuple(range(start, end) for start, end in pairwise(bounds))


def _last_cut(best: Sequence[float], prefix: Sequence[float], first: int, end: int) -> tuple[int, float]:
    """Return where the last run of layers [0, end) begins, at `first` or later, and the cost of its maximum.

    The later the cut, the more expensive is what precedes it and the cheaper what follows: the optimum is
    where they cross.
    """
    cross = (
        bisect_left(range(first, end), True, key=lambda cut: best[cut] >= prefix[end] - prefix[cut]) + first
    )
    choices = [cut for cut in (cross - 1, cross) if first <= cut < end]
    return min(
        ((cut, max(best[cut], prefix[end] - prefix[cut])) for cut in choices), key=lambda choice: choice[1]
    )


class OwnParts:
    """The parts of stage `stage` of `model`, divided into the layers `cuts`, one range per part.

    `layout` is that of the stage's flat arrays, `spans` the position of each part in them. A pipeline of one
    stage and one part has those of the model.
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
        """Return the shape of the pipeline with so many micro-batches."""
        return Shape(stages=self.stages, chunks=len(self.every) // self.stages, microbatches=microbatches)

    def cut(self, flat: Array) -> Array:
        """Return what this stage holds of the model's flat array: (layout.size,), a copy."""
        made: Array = np.concatenate([flat[part.span] for part in self.parts.values()])
        return made

    def joined(self, every: Array) -> Array:
        """Return the model's flat array, given what all stages hold, concatenated in stage order."""
        whole: Array = np.zeros(self.every[-1].span.stop, dtype=every.dtype)
        at = 0
        for number in self.order:
            span = self.every[number].span
            whole[span] = every[at : at + span.stop - span.start]
            at += span.stop - span.start
        return whole

    @property
    def order(self) -> list[int]:
        """Return all parts in the order in which stages hold them: those of the first stage, then the
        next's."""
        return [part for stage in range(self.stages) for part in range(stage, len(self.every), self.stages)]

    @property
    def size_most(self) -> int:
        """Return the elements of the flat array of the stage that holds most."""
        return max(
            sum(self.every[part].layout.size for part in range(stage, len(self.every), self.stages))
            for stage in range(self.stages)
        )


@dataclass(frozen=True, slots=True)
class FusedPass:
    """A pass by graphs, and what its second half is to be given."""

    passes: UnitPass
    weights: Sequence[Array]
    grads: Sequence[Array]
    on_grad_ready: GradReady | None
    is_split: bool


@dataclass(slots=True)
class Pass:
    """A forward pass that waits for its backward pass, with everything that this needs."""

    tape: Tape
    parameters: Sequence[Parameter]
    input: Tensor | None
    output: Tensor
    weight_gradients: list[Callable[[], None]]
    """The rest of a backward pass whose halves are apart, in its order."""
    whole: Callable[[], None] | None = None
    """Computes both passes in the place of the tape; see `GPT.whole_step`."""
    fused: FusedPass | None = None
    """Computes each pass in the place of the tape; see `GPT.fused_units`."""

    def let_go(self) -> None:
        """Keep no weights and gradients, and no memory that the next pass may use. Idempotent."""
        for parameter in self.parameters:
            parameter.let_go()
        if self.fused is not None:
            self.fused.passes.leave()


def layers_in(config: GPTConfig) -> int:
    """Return how many layers can be assigned to parts: the embedding, the blocks, the head."""
    return config.layers + 2


class GPTPart:
    """Layers `layers` of `model`, a run of 0..`layers_in(config)` - 1.

    `span` is where its parameters lie in the model's flat array; `layout` is their layout in one of their
    own, in the same order with the same padding. Raises `UserError` for some layers of a model with a tied
    head.
    """

    def __init__(self, model: GPT, layers: range) -> None:
        self.model = model
        self.layers = layers
        self.is_first = layers[0] == 0
        self.is_last = layers[-1] == model.config.layers + 1
        slots = model.layout.slots
        if not (self.is_first and self.is_last):
            slots = slots[model.units[layers[0]].start : model.units[layers[-1]].stop]
        self.layout = ParameterLayout.of({slot.name: slot.shape for slot in slots})
        self.span = slice(slots[0].offset, slots[0].offset + self.layout.size)
        self._spans = Buckets(self.layout).spans
        """Runs of the gradient that are handed over as they become final."""

    def forward(
        self,
        params: Array,
        grads: Array,
        batch: Batch,
        activations: Array | None,
        *,
        on_grad_ready: GradReady | None = None,
        splits: bool = False,
        tape: Tape | None = None,
    ) -> Pass:
        """Run the layers on one micro-batch; its backward pass will write the gradient to `grads`.

        params, grads: (layout.size,) of one float dtype; activations: (rows, width), the output of the part
        before, or None for the first. The output has that shape, and is the loss for the last part.
        `on_grad_ready(index)` is called as parameter `index` of this part gets its final gradient. With
        `splits`, `backward` computes the gradient of the input alone, and `weight_gradient` does the rest.
        `tape`: an empty one to use.
        """
        tape, whole_step = tape or Tape(self.model.xp), self.model.whole_step
        if whole_step is not None and self.is_first and self.is_last:
            loss, play = whole_step(params, grads, batch, on_grad_ready)
            return Pass(tape, (), None, Tensor(loss), [], play)
        if self.model.fused_units is not None:
            views = self.layout.views(params), self.layout.views(grads)
            passes = self.model.fused_units.begin(self.layers, batch, splits=splits)
            made = Tensor(passes.forward(batch, views[0], activations))
            fused = FusedPass(passes, *views, on_grad_ready, splits)
            return Pass(tape, (), None, made, [], fused=fused)
        parameters = self.model.parameters_in(self.layout, params, grads, on_grad_ready)
        later: list[Callable[[], None]] = []
        if splits:
            for parameter in parameters:
                parameter.deferred = later
        source = None if activations is None else Tensor(activations)
        x = source or Tensor(self.model.xp.zeros(0))
        output = self.model.run_units(tape, self.layers, x, parameters, batch)
        return Pass(tape, parameters, source, output, later)

    def evaluate(
        self, params: Array, batch: Batch, activations: Array | None, *, tape: Tape | None = None
    ) -> Array:
        """Return the output of a forward pass only."""
        tape = tape or Tape(self.model.xp, recording=False)
        x = Tensor(self.model.xp.zeros(0) if activations is None else activations)
        parameters = self.model.parameters_in(self.layout, params, None, None)
        return self.model.run_units(tape, self.layers, x, parameters, batch).data

    def backward(self, forward: Pass, gradient: Array | None, *, loss_scale: float = 1.0) -> Array | None:
        """Play a forward pass backwards from the gradient of its output, which is used up; None: the loss's.

        The gradient of the loss is `loss_scale`.

        Returns the gradient of its input, (rows, width), or None for the first part. It lies in memory of its
        own: along a residual path it grows in that of `gradient`, and this the caller gives back to whoever
        put it there, who may write it again while the other is still on its way over a slow link.
        """
        if forward.whole is not None:
            if loss_scale != 1.0:
                raise LocalProtocolError(f"a whole step has a loss scale of 1, not {loss_scale:g}")
            with spans.BACKWARD:
                forward.whole()
            return None
        if forward.fused is not None:
            return self._backward_fused(forward.fused, forward.output, gradient, loss_scale)
        end = forward.output
        if gradient is not None:
            given = gradient

            def pass_on(_: Array) -> None:
                forward.output.accumulate(given)

            end = forward.tape.record(np.zeros((), given.dtype), pass_on)
        forward.tape.play(end, self.model.xp.full_like(end.data, loss_scale))
        if not forward.weight_gradients:
            forward.tape.check_whole()
        found = None if forward.input is None else forward.input.grad
        if found is not None and gradient is not None and self.model.xp.may_share_memory(found, gradient):
            found = found.copy()
        return found

    def _backward_fused(
        self, fused: FusedPass, output: Tensor, gradient: Array | None, loss_scale: float
    ) -> Array | None:
        slope = self.model.xp.full_like(output.data, loss_scale) if gradient is None else gradient
        ready = None if fused.is_split else fused.on_grad_ready
        found = fused.passes.backward(fused.weights, fused.grads, slope, ready, self._spans)
        return None if found is None else found.copy()  # the next pass writes there

    def weight_gradient(self, forward: Pass) -> None:
        """Compute what `backward` has deferred: the gradients of the parameters, in the order of a whole
        pass.
        """
        if forward.fused is not None:
            forward.fused.passes.weight_gradient(forward.fused.on_grad_ready, self._spans)
            return
        for write in forward.weight_gradients:
            write()
        forward.weight_gradients.clear()
        forward.tape.check_whole()
