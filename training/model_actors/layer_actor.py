"""Layers as actors: one unit of the model per slot; the weights are those of the `TensorActor`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import msgspec
import numpy as np

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch, Operator, Operators
from zbmd.training.model_actors.joint_call import JointCall
from zbmd.training.model_actors.slot import ActorSlot, SlotActor
from zbmd.training.model_actors.tensor_actor import ArrayData, TensorActor, pack, unpack
from zbmd.transport.errors import RemoteProtocolError


class DryPass(GPT):
    """Maps a position of the tape to the layer or operator that recorded it, by a pass without computation.

    It covers a forward pass of `model` over `batch`, or its unit `only`. Each op records one node, so the
    number of nodes on the tape identifies the running op, in both directions. A failure between two ops
    counts for the second one; a failure during recomputation counts for the unit.
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
        """Return the name of the op that runs at `position`, or None if it is a unit as a whole."""
        return self._names.get(position)

    def unit_at(self, position: int) -> int:
        """Return the number of the unit that runs at `position`."""
        return self._first + max(0, bisect_right(self._starts, position) - 1)

    def _noting(self, name: str) -> Operator:
        def note(tape: Tape, *_: object, **__: object) -> Tensor:
            if tape is self._tape:
                self._names[tape.position] = name
            return tape.record(np.zeros(0, np.float32), _no_rule)

        return note


def _no_rule(_: Array) -> None:
    """Never played."""


class Forward(Contract, id="zbmd.training.forward"):
    """Ask a layer to compute with the committed weights; the reply is `Activations`.

    x: (batch * positions, width); for the first layer the tokens, (batch * positions,), an integer dtype.
    """

    x: ArrayData
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1


class Activations(Contract, id="zbmd.training.activations"):
    """The output of a layer, (batch * positions, width), of the last one (…, 256). `problem`: why there is
    none.
    """

    y: ArrayData | None
    problem: str = ""


class LayerActor(SlotActor):
    """Computes unit `number` of `model` (see `GPT.units`).

    Its state is in `tensors`, so its next incarnation computes with the same weights. `joint_call`: the
    actors that compute with it, `operators` among them.
    """

    def __init__(
        self,
        slot: ActorSlot[Any],
        number: int,
        model: GPT,
        tensors: ActorSlot[TensorActor],
        joint_call: JointCall,
        operators: Mapping[str, ActorSlot[Any]],
    ) -> None:
        super().__init__(slot)
        self.number = number
        self.model = model
        self.tensors = tensors
        self.joint_call = joint_call
        self.operators = operators

    def compute(self, tape: Tape, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """Compute the unit; a direct call, on a thread that has the turn of the joint call. See
        `GPT.unit`."""
        return self.model.unit(tape, self.number, x, parameters, batch)

    @on(Forward, pool="thread")
    def activations(self, message: Forward) -> Activations:
        """Compute for a message, between two direct calls."""
        try:
            x, batch = self._checked(unpack(message.x), message.batch)
        except RemoteProtocolError as error:
            return Activations(None, str(error))

        def work(tape: Tape) -> Tensor:
            weights = self.tensors.call(TensorActor.weights)
            views = self.model.layout.views(weights)[self.model.units[self.number]]
            leaves = [Parameter(data, None, i, None) for i, data in enumerate(views)]
            return self.compute(tape, Tensor(x), leaves, batch)

        def blame(tape: Tape) -> ActorSlot[Any]:
            dry = DryPass(self.model, batch, recording=False, only=self.number)
            operator = dry.operator_at(tape.position)
            return self.slot if operator is None else self.operators[operator]

        return Activations(pack(self.joint_call.call(work, self._tape, blame).data))

    def _tape(self) -> Tape:
        return Tape(self.model.xp, recording=False)

    def _checked(self, x: Array, samples: int) -> tuple[Array, Batch]:
        """Return x on the device, and its batch. Raises `RemoteProtocolError` for an x that does not fit."""
        model, name, is_first = self.model, self.model.unit_names[self.number], self.number == 0
        fits = x.shape[1:] == (() if is_first else (model.config.width,)) and not len(x) % samples
        positions = len(x) // samples
        if (
            not fits
            or x.dtype.kind not in ("iu" if is_first else "f")
            or not 0 < positions <= model.config.context
        ):
            raise RemoteProtocolError(f"{name}: unexpected {x.dtype} of shape {x.shape}, batch {samples}")
        tokens = model.config.vocabulary
        if is_first and not 0 <= x.min() <= x.max() < tokens:
            raise RemoteProtocolError(f"{name}: expected tokens from 0 to {tokens - 1}")
        shape, on_device = (samples, positions), model.xp.asarray(x)
        inputs = on_device.reshape(shape) if is_first else model.xp.zeros(shape, model.xp.uint8)
        return on_device, Batch(inputs)
