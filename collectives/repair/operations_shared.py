"""The operations of an elastic group with one result for all: how each is run, made again by the survivors,
and copied. Those whose members have results of their own: `operations_per_rank`.

Methods run on the data-plane thread, and raise as the communicator's do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.device.arrays_in import Array, as_array, require_size
from zbmd.collectives.programs.reductions import dtype_code, reduction_code
from zbmd.collectives.repair.estate import Estate, summed
from zbmd.collectives.repair.events import Call, Inputs, OnLoss
from zbmd.collectives.repair.out import Out, out_of_ranks
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.memory.arena import Arena


class Job(ABC):
    """One operation: its call and its arrays. `value` is its result, once it has one.

    rows: of an uneven one, how many rows of the result each contributor has.
    """

    call: Call
    value: Any = None
    rows: tuple[int, ...] = ()
    published: Array | None = None
    """In the arena, what peers may adopt."""
    out: Out | None = None
    """Where the result goes once the operation is over, if that is not where it was made."""

    def returned(self, contributors: tuple[int, ...]) -> None:  # noqa: B027
        """All have the result of these ranks, and the caller is about to. On the loop."""

    def adoptable(self, left: memoryview) -> bool:
        """Whether what a dead member has published, whose bytes are not trusted, fits this operation."""
        return self.published is not None and len(left) == self.published.nbytes

    @abstractmethod
    def run(self, c: Communicator, deadline_ns: int) -> None:
        """Run it over all of `c`, whoever they are."""

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """Get the result of rank `source`, that of so many contributors, or give it if that is this rank."""
        raise LocalProtocolError(f"{self.call.text}: each member's result is its own")

    def adopt(self, c: Communicator, estate: Estate, deadline_ns: int) -> None:
        """Run it over `c`, and bring in what the dead have left."""
        raise UserError(f"{self.call.text} cannot adopt")


def published_in(arena: Arena, given: Array, inputs: Inputs) -> Array | None:
    """What peers may adopt: `given`, or a copy of it in the arena; None if nothing is adopted."""
    if inputs is not Inputs.ADOPT:
        return None
    return given if arena.offset_of(given) is not None else arena.from_array(given)


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
        elif out is not None:
            require_size(as_array(out, "out"), given.dtype, given.size, "out")
        self.published = published_in(arena, given, inputs)
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

    def adopt(self, c: Communicator, estate: Estate, deadline_ns: int) -> None:
        """See `Job`. 16-bit floats are added up in float32 and rounded once."""
        total = estate.added_to(self._given, self._op)
        c.all_reduce(total, op=summed(self._op), deadline_ns=deadline_ns)
        as_array(self._out, "out")[...] = estate.finished(total, self._op, self._given.dtype)


class AllGather(Job):
    """`Communicator.all_gather`, into a new array with a row for each contributor.

    out: of which a row is for each of the `ranks` that may be contributors.
    """

    def __init__(
        self, arena: Arena, x: Any, on_loss: OnLoss, inputs: Inputs, out: Any = None, ranks: int = 0
    ) -> None:
        self._given = as_array(x, "x")
        self.out = out_of_ranks(out, ranks, self._given)
        self.published = published_in(arena, self._given, inputs)
        what = f"{self._given.dtype}{list(self._given.shape)}"
        text = f"all_gather({what}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `Job`."""
        self.value = c.all_gather(self._given, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `Job`."""
        if c.rank != source:
            self.value = np.empty((contributors, *self._given.shape), self._given.dtype)
        c.broadcast(self.value, source, deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: Estate, deadline_ns: int) -> None:
        """See `Job`."""
        living = c.all_gather(self._given, deadline_ns=deadline_ns)
        self.value = estate.rows_with(living)
        estate.bring(c, self._given, self.value, deadline_ns)


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
