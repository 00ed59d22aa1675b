"""The actors of a model's parts: state and optimizer, layers, and operators.

Weights are read by name; a layer actor is one unit of the model, and an operator actor one kernel that units
call, forwards and backwards. Each is in a slot of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.actors.core.ref import Reason, ReasonKind
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterSlice
from zbmd.training.autograd.tape import Parameter, Tape, Tensor
from zbmd.training.model.gpt import GPT, Batch, Operator
from zbmd.training.model_actors.device_choice import (
    CheckDevice,
    DeviceAction,
    DeviceChecked,
    DeviceChoice,
    IncarnationStarted,
    MessageFailed,
    MessageHandled,
    UseDevice,
)
from zbmd.training.model_actors.operator_devices import DeviceFault, OperatorDevice
from zbmd.training.model_actors.slot import ActorSlot, Attempt, RestartsExhausted, SlotActor
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError

R = TypeVar("R")


class ComputingActor(SlotActor):
    """Runs what it is given: a model's gradient, or its update. If that fails half-way, it is run again from
    the start, so it must not change what it computes from.
    """

    def run(self, work: Callable[[], R]) -> R:
        """Return `work()`; a direct call."""
        return work()


AXES_MAX: Final = 8
NAMES_TOLD: Final = 4
PART_BYTES_MAX: Final = 512 << 10
"""Array bytes per message: a whole message has less than 1 MiB."""
DTYPES: Final = ("float16", "float32", "float64", "int32", "int64", "uint8", "bool")


class ArrayData(msgspec.Struct, frozen=True, array_like=True):
    """An array of `dtype` (one of `DTYPES`, little-endian), C order, whose bytes are `data`."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]], msgspec.Meta(max_length=AXES_MAX)]
    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES_MAX)]


def pack(array: Array) -> ArrayData:
    """Return a message with an array. Raises `LocalProtocolError` if it is too large or of another dtype."""
    host = np.ascontiguousarray(to_host(array))
    if host.dtype.name not in DTYPES or host.ndim > AXES_MAX or host.nbytes > PART_BYTES_MAX:
        raise LocalProtocolError(
            f"an array of {host.dtype.name}, shape {host.shape}, {host.nbytes} bytes does not fit into a "
            f"message: at most {AXES_MAX} axes and {PART_BYTES_MAX} bytes of {', '.join(DTYPES)}"
        )
    return ArrayData(host.dtype.name, list(array.shape), host.tobytes())


def unpack(packed: ArrayData) -> Array:
    """Return the array of a message, writable. Raises `RemoteProtocolError` if its size is wrong."""
    if packed.dtype not in DTYPES:
        raise RemoteProtocolError(
            f"received an array of dtype {packed.dtype!r:.40}; expected one of {', '.join(DTYPES)}"
        )
    dtype = np.dtype(packed.dtype).newbyteorder("<")
    if math.prod(packed.shape) * dtype.itemsize != len(packed.data):
        raise RemoteProtocolError(
            f"received {len(packed.data)} bytes for an array of {packed.dtype} and shape {packed.shape}"
        )
    return np.frombuffer(bytearray(packed.data), dtype).reshape(packed.shape)


ELEMENTS_MAX: Final = PART_BYTES_MAX // 4
"""float32 elements per `ReadTensor`."""
READS_MAX: Final = 16
"""Attempts to read a whole parameter."""


class ReadTensor(Contract, id="zbmd.training.read_tensor"):
    """Ask for `count` elements of a parameter from element `start` on; the reply is `TensorPart`."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=ELEMENTS_MAX)] = ELEMENTS_MAX


class TensorPart(Contract, id="zbmd.training.tensor_part"):
    """A part of one version of a parameter. `shape`: of what this rank holds of it, `cut`: which slice that
    is, in the terms of `ParameterSlice`; `problem`: empty if the part was found.
    """

    version: int
    shape: list[int]
    part: ArrayData | None
    cut: ParameterSlice | None = None
    problem: str = ""


class HeldTensor(NamedTuple):
    """The slice `cut` of parameter `name`, held by a rank.

    If a state is sharded, and the model divided along `tp`, it is a slice of this rank's slice.
    """

    name: str
    cut: ParameterSlice
    array: Array


class StateSource(Protocol):
    """The owner of the weights: a `Trainer`."""

    step: int
    """The version in use."""

    def tensors(self, version: int) -> Iterable[HeldTensor]:
        """Yield this rank's weights of a version, which is in use or was last."""
        ...


class TensorActor(SlotActor):
    """Reads weights for whoever asks. They lie in `source`, which outlives the actor: all incarnations read
    the same.
    """

    def __init__(self, slot: ActorSlot[Any], source: StateSource) -> None:
        super().__init__(slot)
        self.source = source

    @on(ReadTensor)
    async def read(self, message: ReadTensor) -> TensorPart:
        """Reply with a part of the committed version."""
        version = self.source.step
        for _ in range(READS_MAX):
            found = self._read(message, version)
            if self.source.step == version:  # else a step may have begun to overwrite it
                return found
            version = self.source.step
        return TensorPart(version, [], None, problem="steps follow each other faster than it can be read")

    def _read(self, message: ReadTensor, version: int) -> TensorPart:
        names = list[str]()
        for held in self.source.tensors(version):
            if held.name == message.name:
                flat = held.array.reshape(-1)[message.start : message.start + message.count]
                return TensorPart(version, list(held.array.shape), pack(flat.copy()), held.cut)
            names.append(held.name)
        known = ", ".join(names[:NAMES_TOLD])
        return TensorPart(
            version, [], None, problem=f"unknown parameter {message.name!r}; there are {known} …"
        )


async def read_tensor(slot: ActorSlot[TensorActor], name: str, *, timeout: float) -> tuple[int, Array]:
    """Read all that a rank holds of a parameter, of one version; return the version and the array.

    `timeout`: seconds for each part. Raises `UserError` for an unknown name, `RestartsExhausted` also if
    commits keep arriving between the parts, and what `ActorSlot.ask` raises.
    """
    for _ in range(READS_MAX):
        parts: list[Array] = []
        message = ReadTensor(name)
        first = part = await slot.ask(message, reply=TensorPart, timeout=timeout)
        size = math.prod(first.shape)
        while part.version == first.version:
            if part.part is None:
                raise UserError(f"{slot.name}: {part.problem}.")
            parts.append(unpack(part.part))
            if (start := sum(map(len, parts))) >= size:
                return first.version, np.concatenate(parts).reshape(first.shape)
            part = await slot.ask(ReadTensor(name, start), reply=TensorPart, timeout=timeout)
    raise RestartsExhausted(
        f"{slot.name}: a commit interrupted the reading of {name} {READS_MAX} times in a row"
    )


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


log: Final = structlog.stdlib.get_logger("zbmd.training.actors")


class OperatorPlacement:
    """The devices on which an operator may compute, and the current one; outlives the operator.

    `neighbours`: the live operators of the model; each hears of a fault of a shared device.
    """

    def __init__(self, devices: Sequence[OperatorDevice], neighbours: set[OperatorActor]) -> None:
        self._devices = {device.name: device for device in devices}
        self.choice = DeviceChoice([device.name for device in devices])
        self.neighbours = neighbours

    async def settle(self, name: str) -> OperatorDevice:
        """Return the device of the operator's next incarnation."""
        actions = self.choice.handle(IncarnationStarted())
        while True:
            match self._only(actions):
                case CheckDevice(device=device):
                    problem = await asyncio.to_thread(self._devices[device].check)
                    actions = self.choice.handle(DeviceChecked(device=device, problem=problem))
                case UseDevice() as use:
                    if use.moved_from:
                        log.warning(
                            "operator moved",
                            slot=name,
                            moved_from=use.moved_from,
                            device=use.device,
                            reason=use.reason,
                            moves=self.choice.moves,
                        )
                    return self._devices[use.device]

    def _only(self, actions: list[DeviceAction]) -> DeviceAction:
        self.choice.check_invariants()
        (action,) = actions
        return action


class OperatorActor(SlotActor):
    """Runs `op(tape, …)`, one of `zbmd.training.ops`, on one of the devices of its `where`.

    A device that raises `DeviceFault`, or fails one message too often, is abandoned for the next healthy one.
    `install`: puts its kernel where units find it.
    """

    def __init__(
        self,
        slot: ActorSlot[Any],
        op: Operator,
        where: OperatorPlacement,
        install: Callable[[Operator], None],
    ) -> None:
        super().__init__(slot)
        self.op = op
        self.where = where
        self._device = ""
        self._install = install

    async def ready(self) -> None:
        """Choose a device and install the kernel."""
        device = await self.where.settle(self.slot.name)
        self._device = device.name
        self._install(device.kernel(self.op))
        self.where.neighbours.add(self)

    @property
    def place(self) -> str:
        """See `SlotActor`."""
        return self.where.choice.device

    @property
    def moves(self) -> int:
        """See `SlotActor`."""
        return self.where.choice.moves

    def failed(self, error: Exception) -> None:
        """See `SlotActor`."""
        if self._device != self.where.choice.device:
            return  # the next actor is elsewhere already
        fault = isinstance(error, DeviceFault)
        self.where.choice.handle(MessageFailed(fault=fault, reason=f"{type(error).__name__}: {error}"))
        if fault:
            self.where.neighbours.discard(self)
            for other in [n for n in self.where.neighbours if n._device == self._device]:
                other.leave_device(str(error))

    def leave_device(self, reason: str) -> None:
        """Leave the device because another operator has met a fault of it."""
        self.where.neighbours.discard(self)
        self.where.choice.handle(MessageFailed(fault=True, reason=reason))
        self._running_cell().request_stop(Reason(ReasonKind.FAILED, reason))

    def ended(self, reason: Reason) -> None:
        """See `SlotActor`."""
        self.where.neighbours.discard(self)

    def worked(self) -> None:
        """See `SlotActor`."""
        self.where.choice.handle(MessageHandled())
