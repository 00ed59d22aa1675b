"""The state of a training as an actor: the transactional store, read by its name, changed by a commit."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.training.autograd.array_module import Array
from zbmd.training.model_actors.arrays import PART_BYTES_MAX, ArrayData, pack, unpack
from zbmd.training.model_actors.slot import GivenUp, Seat, SeatedActor
from zbmd.training.optim.adamw import AdamWState
from zbmd.training.run.two_slot_store import SLOTS, Store
from zbmd.transport.errors import UserError

ELEMENTS_MAX: Final = PART_BYTES_MAX // 4
"""float32 of one `ReadTensor`."""
READS_MAX: Final = 16
"""How often a whole parameter is read from its beginning again."""


class CommitSlot(Contract, id="zbmd.training.commit"):
    """The slot holds version `version`, which is the committed one from now on."""

    version: int
    slot: Annotated[int, msgspec.Meta(ge=0, lt=SLOTS)]


class Committed(Contract, id="zbmd.training.committed"):
    """What the committed version is."""

    version: int
    slot: int


class ReadTensor(Contract, id="zbmd.training.read_tensor"):
    """Ask for `count` elements of a parameter from element `start` on; answered by `TensorPart`."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=ELEMENTS_MAX)] = ELEMENTS_MAX


class TensorPart(Contract, id="zbmd.training.tensor_part"):
    """A part of one version of a parameter. shape: of the whole; problem: empty if it is there."""

    version: int
    shape: list[int]
    part: ArrayData | None
    problem: str = ""


class TensorActor(SeatedActor):
    """Holds weights and moments. They lie in `store`, which outlives it: its next life holds the same."""

    def __init__(self, seat: Seat[Any], store: Store) -> None:
        super().__init__(seat)
        self.store = store

    def state(self, slot: int) -> AdamWState:
        """A direct call: the arrays of a slot, by reference. Only who computes its version writes them."""
        return self.store.slots[slot].state

    def weights(self) -> Array:
        """A direct call: the committed weights, (layout.size,), by reference; nobody writes them."""
        return self.store.current.state.weights

    def digest(self, slot: int) -> bytes:
        """A direct call: see `Store.digest`."""
        return self.store.digest(slot)

    @on(CommitSlot)
    async def commit(self, message: CommitSlot) -> Committed:
        """Between two direct calls: the slots change places."""
        async with self.turn:
            self.store.commit(message.slot, version=message.version)
            return Committed(message.version, message.slot)

    @on(ReadTensor)
    async def read(self, message: ReadTensor) -> TensorPart:
        """A part of the committed version."""
        async with self.turn:
            store = self.store
            slot = next((s for s in store.layout.slots if s.name == message.name), None)
            if slot is None:
                names = ", ".join(s.name for s in store.layout.slots[:4])
                return TensorPart(
                    store.version, [], None, f"there is no {message.name!r}; there are {names} …"
                )
            flat = store.current.state.weights[slot.span][message.start : message.start + message.count]
            return TensorPart(store.version, list(slot.shape), pack(flat))


async def read_tensor(seat: Seat[TensorActor], name: str, *, timeout: float) -> tuple[int, Array]:
    """Read a whole parameter, part by part, all of one version; returns the version and the array.

    timeout: seconds for each part. Raises `UserError` for a name that is not there, `GivenUp` also if commits
    keep coming between the parts, and what `Seat.ask` raises.
    """
    for _ in range(READS_MAX):
        parts: list[Array] = []
        message = ReadTensor(name)
        first = part = await seat.ask(message, reply=TensorPart, timeout=timeout)
        size = math.prod(first.shape)
        while part.version == first.version:
            if part.part is None:
                raise UserError(f"{seat.name}: {part.problem}.")
            parts.append(unpack(part.part))
            if (start := sum(map(len, parts))) >= size:
                return first.version, np.concatenate(parts).reshape(first.shape)
            part = await seat.ask(ReadTensor(name, start), reply=TensorPart, timeout=timeout)
    raise GivenUp(f"{seat.name}: {READS_MAX} times a commit came before all of {name} had been read")
