"""A part of a GPT: some of its layers, from the activations that come in to those that go out.

The layers that are put on parts are the model's units (`GPT.units`): the embedding, its blocks, and the head
with the loss. A part computes its units as the whole model does, so its bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbmd.training.config import GPTConfig
from zbmd.training.gpt import GPT, Tokens
from zbmd.training.layout import ParameterLayout
from zbmd.training.tape import Parameter, Tape, Tensor
from zbmd.training.xp import Array
from zbmd.transport.errors import UserError


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass that waits for its backward pass: all that it holds is needed until then."""

    tape: Tape
    input: Tensor | None
    output: Tensor


def layers_in(config: GPTConfig) -> int:
    """How many layers can be put on parts: the embedding, the blocks, the head."""
    return config.layers + 2


class GPTPart(GPT):
    """Layers `layers` of the model of `config`, a run of 0..`layers_in(config)` - 1.

    `span` is where its parameters lie in the model's flat array; `part_layout` is their layout in one of
    their own, in the same order with the same padding.
    """

    def __init__(self, config: GPTConfig, layers: range) -> None:
        if config.dropout > 0.0:
            raise UserError("a pipeline's stages do not drop anything out: give the model dropout 0.")
        super().__init__(config)
        self.layers = layers
        self.is_first = layers[0] == 0
        self.is_last = layers[-1] == config.layers + 1
        slots = self.layout.slots[self.units[layers[0]].start : self.units[layers[-1]].stop]
        self.part_layout = ParameterLayout.of({slot.name: slot.shape for slot in slots})
        self.span = slice(slots[0].offset, slots[0].offset + self.part_layout.size)

    def forward(
        self, params: Array, grads: Array, tokens: Tokens, activations: Array | None, *, global_batch: int
    ) -> Pass:
        """Run the layers on one micro-batch; its backward pass will write the gradient to `grads`.

        params, grads: (part_layout.size,) float32; tokens: as of `GPT.loss_and_grads`; activations:
        (samples * T, width), the output of the part before, or None for the first. The output has that shape,
        and is the loss for the last part.
        """
        tape = Tape(self.xp)
        pairs = zip(self.part_layout.views(params), self.part_layout.views(grads), strict=True)
        parameters = [Parameter(data, grad, i, None) for i, (data, grad) in enumerate(pairs)]
        batch = self.batch(tokens, global_batch=global_batch)
        source = None if activations is None else Tensor(activations)
        first, x = self.units[self.layers[0]].start, source or Tensor(self.xp.zeros(0))
        for layer in self.layers:
            unit = self.units[layer]
            x = self.unit(tape, layer, x, parameters[unit.start - first : unit.stop - first], batch)
        return Pass(tape, source, x)

    def backward(self, forward: Pass, gradient: Array | None) -> Array | None:
        """Play a forward pass backwards from the gradient of its output, which is used up; None: the loss's.

        Returns the gradient of its input, (samples * T, width), or None for the first part.
        """
        end = forward.output
        if gradient is not None:
            given = gradient

            def pass_on(_: Array) -> None:
                forward.output.accumulate(given)

            end = forward.tape.record(np.zeros((), given.dtype), pass_on)
        forward.tape.backward(end)
        return None if forward.input is None else forward.input.grad
