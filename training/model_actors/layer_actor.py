"""Layers as actors: one unit of the model per slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model_actors.joint_call import Attempt
from zbmd.training.model_actors.slot import ActorSlot, SlotActor
from zbmd.training.model_actors.tensor_actor import ArrayData, pack, unpack
from zbmd.transport.errors import RemoteProtocolError


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


UnitWeights = Callable[[int], Sequence[Array] | None]
"""Returns the weights of a unit; None if this rank does not have all of them."""


class LayerActor(SlotActor):
    """Computes unit `number` of `model` (see `GPT.units`).

    It holds no state, so its next incarnation computes with the same `weights`. `compute_together`: runs a
    computation of the unit and its operators (`ModelActors.compute`).
    """

    def __init__(
        self,
        slot: ActorSlot[Any],
        number: int,
        model: GPT,
        weights: UnitWeights,
        compute_together: Callable[[Callable[[Attempt], Tensor]], Tensor],
    ) -> None:
        super().__init__(slot)
        self.number = number
        self.model = model
        self.weights = weights
        self.compute_together = compute_together

    def compute(self, tape: Tape, x: Tensor, parameters: list[Parameter], batch: Batch) -> Tensor:
        """Compute the unit; a direct call, on a thread that has the turn of the joint call. See
        `GPT.unit`."""
        return self.model.unit(tape, self.number, x, parameters, batch)

    @on(Forward, pool="thread")
    def activations(self, message: Forward) -> Activations:
        """Compute for a message, between two direct calls."""
        if self.weights(self.number) is None:
            name = self.model.unit_names[self.number]
            return Activations(None, f"the weights of {name} are divided over ranks, or another rank's")
        try:
            x, batch = self._checked(unpack(message.x), message.batch)
        except RemoteProtocolError as error:
            return Activations(None, str(error))

        def work(attempt: Attempt) -> Tensor:
            attempt.tape = tape = Tape(self.model.xp, recording=False)
            views = self.weights(self.number) or ()
            leaves = [Parameter(data, None, i, None) for i, data in enumerate(views)]
            with tape.unit(self.number):
                return self.compute(tape, Tensor(x), leaves, batch)

        return Activations(pack(self.compute_together(work).data))

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
