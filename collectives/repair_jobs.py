"""The operations of an elastic group: how each is run, made again by the survivors, and copied.

Methods run on the data-plane thread, and raise as the communicator's do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from zbmd.collectives.arrays import Array, as_array
from zbmd.collectives.communicator import Communicator
from zbmd.collectives.reductions import dtype_code, reduction_code
from zbmd.collectives.repair_messages import Call, Inputs, OnLoss
from zbmd.transport.arena import Arena
from zbmd.transport.errors import UserError

_COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


class Job(ABC):
    """One operation: its call and its arrays. `value` is its result, once it has one."""

    call: Call
    value: Any = None
    published: Array | None = None
    """In the arena, what peers may adopt."""

    @abstractmethod
    def run(self, c: Communicator, deadline_ns: int) -> None:
        """Run it over all of `c`, whoever they are."""

    @abstractmethod
    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """Get the result of rank `source`, that of so many contributors, or give it if that is this rank."""

    def adopt(self, c: Communicator, mine: Sequence[memoryview], contributors: int, deadline_ns: int) -> None:
        """Run it over `c`, and bring in the contributions `mine` of dead ranks."""
        raise UserError(f"{self.call.text} cannot adopt")


class AllReduce(Job):
    """`Communicator.all_reduce`. In place (`recompute`) without an `out`."""

    def __init__(
        self, arena: Arena, x: Any, out: Any, op: str, on_loss: OnLoss, inputs: Inputs, algorithm: str
    ) -> None:
        given = as_array(x, "x")
        dtype_code(given.dtype)
        reduction_code(op, given.dtype)
        if inputs is not Inputs.RECOMPUTE and out is None:
            out = np.empty(given.shape, given.dtype)
        if inputs is Inputs.ADOPT:
            self.published = given if arena.offset_of(given) is not None else arena.from_array(given)
        self._x, self._out, self._op, self._algorithm = x, out, op, algorithm
        self._given = given
        text = f"all_reduce({given.dtype}[{given.size}], {op}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs)
        self.value = x if out is None else out

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `Job`."""
        x = self._x if self.published is None else self.published.reshape(self._given.shape)
        c.all_reduce(x, self._out, op=self._op, algorithm=self._algorithm, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `Job`."""
        c.broadcast(self.value, source, deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, mine: Sequence[memoryview], contributors: int, deadline_ns: int) -> None:
        """See `Job`. 16-bit floats are added up in float32 and rounded once."""
        dtype = self._given.dtype
        wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
        total = self._given.astype(wide).reshape(-1)
        combine = _COMBINE[self._op]
        for memory in mine:
            combine(total, np.frombuffer(memory, dtype), out=total)
        c.all_reduce(total, op="sum" if self._op == "avg" else self._op, deadline_ns=deadline_ns)
        if self._op == "avg":
            total /= contributors
        as_array(self._out, "out")[...] = total.reshape(self._given.shape).astype(dtype)


class AllGather(Job):
    """`Communicator.all_gather`, into a new array with a row for each contributor."""

    def __init__(self, x: Any, on_loss: OnLoss) -> None:
        self._given = as_array(x, "x")
        text = f"all_gather({self._given.dtype}{list(self._given.shape)}, {on_loss.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=Inputs.PRESERVE)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `Job`."""
        self.value = c.all_gather(self._given, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `Job`."""
        if c.rank != source:
            self.value = np.empty((contributors, *self._given.shape), self._given.dtype)
        c.broadcast(self.value, source, deadline_ns=deadline_ns)


class Broadcast(Job):
    """`Communicator.broadcast`."""

    def __init__(self, x: Any, root: int, on_loss: OnLoss) -> None:
        given = as_array(x, "x")
        text = f"broadcast({given.dtype}[{given.size}], root={root}, {on_loss.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=Inputs.PRESERVE, needs=root)
        self._root = root
        self.value = x

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `Job`."""
        c.broadcast(self.value, self._root, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `Job`."""
        c.broadcast(self.value, source, deadline_ns=deadline_ns)


class Barrier(Job):
    """`Communicator.barrier`."""

    def __init__(self, on_loss: OnLoss) -> None:
        self.call = Call(text=f"barrier({on_loss.value})", on_loss=on_loss, inputs=Inputs.PRESERVE)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `Job`."""
        c.barrier(deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `Job`."""
        c.barrier(deadline_ns=deadline_ns)
