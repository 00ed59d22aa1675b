"""State and optimizer of a model as actors: weights that are read by name, and what is run by an actor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterSlice
from zbmd.training.model_actors.slot import ActorSlot, RestartsExhausted, SlotActor
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
    """What has the weights: a `Trainer`."""

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
