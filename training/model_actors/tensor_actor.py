"""State and optimizer of a model as actors: the transactional store, read by parameter name, and its
update."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.model_actors.slot import ActorSlot, RestartsExhausted, SlotActor
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.two_slot_store import SLOTS, Store
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError


class OptimizerActor(SlotActor):
    """Updates out of place, so that an update that failed half-way is repeated from the same state."""

    def __init__(self, slot: ActorSlot[Any], recipe: Recipe) -> None:
        super().__init__(slot)
        self.recipe = recipe

    def update(self, old: AdamWState, new: AdamWState, grads: Array, *, step: int) -> float:
        """Update the state; a direct call. See `Recipe.update`."""
        return self.recipe.update(old, new, grads, step=step)


AXES_MAX: Final = 8
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


class CommitSlot(Contract, id="zbmd.training.commit"):
    """Commit: the slot holds version `version`."""

    version: int
    slot: Annotated[int, msgspec.Meta(ge=0, lt=SLOTS)]


class Committed(Contract, id="zbmd.training.committed"):
    """The committed version."""

    version: int
    slot: int


class ReadTensor(Contract, id="zbmd.training.read_tensor"):
    """Ask for `count` elements of a parameter from element `start` on; the reply is `TensorPart`."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=ELEMENTS_MAX)] = ELEMENTS_MAX


class TensorPart(Contract, id="zbmd.training.tensor_part"):
    """A part of one version of a parameter. `shape`: of the whole; `problem`: empty if the part was found."""

    version: int
    shape: list[int]
    part: ArrayData | None
    problem: str = ""


class TensorActor(SlotActor):
    """Holds weights and moments. They lie in `store`, which outlives the actor: all incarnations hold the
    same.
    """

    def __init__(self, slot: ActorSlot[Any], store: Store) -> None:
        super().__init__(slot)
        self.store = store

    def state(self, slot: int) -> AdamWState:
        """Return the arrays of a slot, by reference; a direct call. Only the step that computes its version
        writes them.
        """
        return self.store.slots[slot].state

    def weights(self) -> Array:
        """Return the committed weights, (layout.size,), by reference; a direct call. They are read-only."""
        return self.store.current.state.weights

    def digest(self, slot: int) -> bytes:
        """Return the digest of a slot; a direct call. See `Store.digest`."""
        return self.store.digest(slot)

    @on(CommitSlot)
    async def commit(self, message: CommitSlot) -> Committed:
        """Commit a slot, between two direct calls."""
        async with self.turn:
            self.store.commit(message.slot, version=message.version)
            return Committed(message.version, message.slot)

    @on(ReadTensor)
    async def read(self, message: ReadTensor) -> TensorPart:
        """Reply with a part of the committed version."""
        async with self.turn:
            store = self.store
            slot = next((s for s in store.layout.slots if s.name == message.name), None)
            if slot is None:
                names = ", ".join(s.name for s in store.layout.slots[:4])
                return TensorPart(
                    store.version, [], None, f"unknown parameter {message.name!r}; there are {names} …"
                )
            flat = store.current.state.weights[slot.span][message.start : message.start + message.count]
            return TensorPart(store.version, list(slot.shape), pack(flat))


async def read_tensor(slot: ActorSlot[TensorActor], name: str, *, timeout: float) -> tuple[int, Array]:
    """Read a whole parameter in parts, all of one version; return the version and the array.

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
