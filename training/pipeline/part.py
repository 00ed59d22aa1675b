"""A part of a GPT: some of its layers, from the activations that come in to those that go out.

The layers that are put on parts are the model's units (`GPT.units`): the embedding, its blocks, and the head
with the loss. A part computes its units as the whole model does, so its bits are the same; of a model that is
cut for tensor parallelism it is a part of this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.autograd.tape import GradReady, Tape, Tensor
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT, Batch


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass that waits for its backward pass: all that it holds is needed until then."""

    tape: Tape
    input: Tensor | None
    output: Tensor
    weight_gradients: list[Callable[[], None]]
    """What is left to be done of a backward pass whose halves are apart, in its order."""


def layers_in(config: GPTConfig) -> int:
    """How many layers can be put on parts: the embedding, the blocks, the head."""
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

    def forward(
        self,
        params: Array,
        grads: Array,
        batch: Batch,
        activations: Array | None,
        *,
        on_grad_ready: GradReady | None = None,
        splits: bool = False,
    ) -> Pass:
        """Run the layers on one micro-batch; its backward pass will write the gradient to `grads`.

        params, grads: (layout.size,) of one float dtype; activations: (rows, width), the output of the part
        before, or None for the first. The output has that shape, and is the loss for the last part.
        `on_grad_ready(index)` is called as parameter `index` of this part gets its final gradient. With
        `splits`, `backward` computes the gradient of the input alone, and `weight_gradient` does the rest.
        """
        tape = Tape(self.model.xp)
        parameters = self.model.parameters_in(self.layout, params, grads, on_grad_ready)
        later: list[Callable[[], None]] = []
        if splits:
            for parameter in parameters:
                parameter.deferred = later
        source = None if activations is None else Tensor(activations)
        x = source or Tensor(self.model.xp.zeros(0))
        return Pass(tape, source, self.model.run_units(tape, self.layers, x, parameters, batch), later)

    def evaluate(self, params: Array, batch: Batch, activations: Array | None) -> Array:
        """The output of a forward pass alone."""
        tape = Tape(self.model.xp, recording=False)
        x = Tensor(self.model.xp.zeros(0) if activations is None else activations)
        parameters = self.model.parameters_in(self.layout, params, None, None)
        return self.model.run_units(tape, self.layers, x, parameters, batch).data

    def backward(self, forward: Pass, gradient: Array | None, *, loss_scale: float = 1.0) -> Array | None:
        """Play a forward pass backwards from the gradient of its output, which is used up; None: the loss's.

        The gradient of the loss is `loss_scale`.

        Returns the gradient of its input, (rows, width), or None for the first part. It lies in memory of its
        own: along a residual path it grows in that of `gradient`, and this the caller gives back to whoever
        put it there, who may write it anew while the other is still on its way over a slow link.
        """
        end = forward.output
        if gradient is not None:
            given = gradient

            def pass_on(_: Array) -> None:
                forward.output.accumulate(given)

            end = forward.tape.record(np.zeros((), given.dtype), pass_on)
        forward.tape.play(end, np.full_like(end.data, loss_scale))
        if not forward.weight_gradients:
            forward.tape.check_whole()
        found = None if forward.input is None else forward.input.grad
        if found is not None and gradient is not None and self.model.xp.may_share_memory(found, gradient):
            found = found.copy()
        return found

    def weight_gradient(self, forward: Pass) -> None:
        """Do what `backward` has left: the gradients of the parameters, in the order of a whole pass."""
        for write in forward.weight_gradients:
            write()
        forward.weight_gradients.clear()
        forward.tape.check_whole()
