"""Layers as actors: a unit of the model on a seat; its weights are the tensors'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model_actors.arrays import ArrayData, pack, unpack
from zbmd.training.model_actors.blame import DryPass
from zbmd.training.model_actors.joint_call import Crew
from zbmd.training.model_actors.slot import Seat, SeatedActor
from zbmd.training.model_actors.tensor_actor import TensorActor
from zbmd.transport.errors import RemoteProtocolError


class Forward(Contract, id="zbmd.training.forward"):
    """Have a layer compute with the committed weights; answered by `Activations`.

    x: (batch * positions, width), for the first layer the tokens, (batch * positions,), an integer dtype.
    """

    x: ArrayData
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1


class Activations(Contract, id="zbmd.training.activations"):
    """What a layer has made, (batch * positions, width), the last one (…, 256). problem: why it has not."""

    y: ArrayData | None
    problem: str = ""


class LayerActor(SeatedActor):
    """Computes unit `number` of `model` (see `GPT.units`).

    Its state is the tensors', so that its next life computes with the same. crew: who computes with it, the
    `operators` among them.
    """

    def __init__(
        self,
        seat: Seat[Any],
        number: int,
        model: GPT,
        tensors: Seat[TensorActor],
        crew: Crew,
        operators: Mapping[str, Seat[Any]],
    ) -> None:
        super().__init__(seat)
        self.number = number
        self.model = model
        self.tensors = tensors
        self.crew = crew
        self.operators = operators

    def compute(self, tape: Tape, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """A direct call, on a thread that has the crew's turn: see `GPT.unit`."""
        return self.model.unit(tape, self.number, x, parameters, batch)

    @on(Forward, pool="thread")
    def activations(self, message: Forward) -> Activations:
        """Compute for whoever asks, between two direct calls."""
        try:
            x, batch = self._checked(unpack(message.x), message.batch)
        except RemoteProtocolError as error:
            return Activations(None, str(error))

        def work(tape: Tape) -> Tensor:
            weights = self.tensors.call(TensorActor.weights)
            views = self.model.layout.views(weights)[self.model.units[self.number]]
            leaves = [Parameter(data, None, i, None) for i, data in enumerate(views)]
            return self.compute(tape, Tensor(x), leaves, batch)

        def who(tape: Tape) -> Seat[Any]:
            dry = DryPass(self.model, batch, recording=False, only=self.number)
            operator = dry.operator_at(tape.position)
            return self.seat if operator is None else self.operators[operator]

        return Activations(pack(self.crew.call(work, self._tape, who).data))

    def _tape(self) -> Tape:
        return Tape(self.model.xp, recording=False)

    def _checked(self, x: Array, samples: int) -> tuple[Array, Batch]:
        """x on the device, and its batch. Raises `RemoteProtocolError` for an x that does not fit."""
        model, name, is_first = self.model, self.model.unit_names[self.number], self.number == 0
        fits = x.shape[1:] == (() if is_first else (model.config.width,)) and not len(x) % samples
        positions = len(x) // samples
        if (
            not fits
            or x.dtype.kind not in ("iu" if is_first else "f")
            or not 0 < positions <= model.config.context
        ):
            raise RemoteProtocolError(f"{name} takes no {x.dtype} of shape {x.shape}, batch {samples}")
        tokens = model.config.vocabulary
        if is_first and not 0 <= x.min() <= x.max() < tokens:
            raise RemoteProtocolError(f"{name} takes tokens from 0 to {tokens - 1}")
        shape, on_device = (samples, positions), model.xp.asarray(x)
        inputs = on_device.reshape(shape) if is_first else model.xp.zeros(shape, model.xp.uint8)
        return on_device, Batch(inputs)
