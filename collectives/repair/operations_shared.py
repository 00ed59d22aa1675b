"""Elastic operations with one result for all members: how each runs, is repeated by survivors, and copied.

Operations with a different result per member are in `operations_per_rank`. Methods run on the data-plane
thread, and raise as the communicator's do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import xxhash

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.uneven import ARRAYS_MAX
from zbmd.collectives.device.arrays_in import (
    Array,
    as_array,
    as_bytes,
    packed,
    require_size,
    require_writeable,
)
from zbmd.collectives.programs.reductions import dtype_code, reduction_code
from zbmd.collectives.repair.adoption import AdoptedInputs, summed
from zbmd.collectives.repair.events import Call, Inputs, OnLoss
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.memory.arena import Arena

COPIED_ON_LOOP_BYTES_MAX: Final = 64 << 10
"""A longer result is copied to its `out` by another thread than the loop's."""


class PendingCaller:
    """Whether a caller still awaits its operation: after that, its `out` must not be written."""

    def __init__(self) -> None:
        self._cancelled = False
        self._writing = False

    def cancel(self) -> bool:
        """Note that the await is cancelled. Return False if `out` is being written, which ends soon by
        itself.
        """
        self._cancelled = True
        return not self._writing

    def write(self) -> bool:
        """Return whether `out` may be written, from now on until the operation has ended."""
        self._writing = not self._cancelled
        return self._writing


class OutArray:
    """An array that takes a result of `shape` and `dtype`, or the first rows of it for results by rank.

    It is written when the operation has ended, not while it runs: the operation may run several times, over
    fewer members each time, and may fail on all in the end. So `x` may overlap it. Raises `UserError` unless
    `given` is such an array and writeable.
    """

    __slots__ = ("_array", "_given", "_of_rows")

    def __init__(self, given: Any, shape: tuple[int, ...], dtype: np.dtype[Any], rows: str = "") -> None:
        """Check `given`. `rows`: what the first axis counts, if a result may have fewer rows; empty if
        not."""
        array = as_array(given, "out")
        if array.shape != shape or array.dtype != dtype:
            why = rows and f": {rows}, whoever is there, of which the first take the result"
            raise UserError(
                f"out has shape {array.shape} and dtype {array.dtype}; pass one of shape {shape} and dtype "
                f"{dtype}{why}"
            )
        require_writeable(array, "out")
        self._given, self._array, self._of_rows = given, array, bool(rows)

    def take(self, value: Array) -> Any:
        """Write the result; return what the caller gets: the array itself, or the rows that were written."""
        if not self._of_rows:
            self._array[...] = value
            return self._given
        written = self._array[: len(value)]
        written[...] = value
        return written


def out_of_ranks(out: Any, ranks: int, given: Array) -> OutArray | None:
    """Return the `out` of an operation that gathers an array like `given` from up to `ranks` contributors."""
    rows = "a row for each rank of the job, or of the sub-group"
    return None if out is None else OutArray(out, (ranks, *given.shape), given.dtype, rows)


async def deliver_result(job: ElasticOperation, awaiting: PendingCaller) -> None:
    """Copy the result of an operation that has ended to the caller's `out`, if it still waits."""
    out, value = job.out, job.value
    if out is None or value is None or not awaiting.write():
        return
    if value.nbytes <= COPIED_ON_LOOP_BYTES_MAX:
        job.value = out.take(value)
    else:
        job.value = await asyncio.to_thread(out.take, value)


RowOf: TypeAlias = Callable[[int], int]
"""The row of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The group of an operation, and the mode of its call. `ranks`: the number of possible members.

    `rank`: of this process, in the job. `row_of`: the row, in what is given by rank, of a rank of the job.
    """

    arena: Arena
    rank: int
    ranks: int
    row_of: RowOf
    on_loss: OnLoss
    inputs: Inputs

    @property
    def mode(self) -> str:
        """Return the mode as it is in the text of a call."""
        return f"{self.on_loss.value}, {self.inputs.value}"

    def call(self, text: str, *, needs: int = -1, own: bool = False) -> Call:
        """Return the call of this text in the mode."""
        return Call(text=text, on_loss=self.on_loss, inputs=self.inputs, needs=needs, own=own)

    def published(self, given: Array) -> Array | None:
        """Return the input that peers may adopt: `given`, or a copy of it in the arena; None if nothing is
        adopted.
        """
        if self.inputs is not Inputs.ADOPT:
            return None
        return given if self.arena.offset_of(given) is not None else self.arena.from_array(given)


class ElasticOperation(ABC):
    """One operation: its call and its arrays. `value` is its result, once it has one.

    `rows`: of an uneven operation, how many rows of the result each contributor has.
    """

    in_place: ClassVar[bool] = False
    """Whether it may overwrite its inputs (`Inputs.RECOMPUTE`)."""
    call: Call
    value: Any = None
    rows: tuple[int, ...] = ()
    published: Array | None = None
    """The input in the arena that peers may adopt."""
    out: OutArray | None = None
    """Takes the result once the operation has ended, if it was computed elsewhere."""

    @abstractmethod
    def __init__(self, context: CallContext, x: Any, out: Any, **arguments: Any) -> None:
        """Check the arguments of a call, as landed on the host. Raises `UserError`, `ArenaFull`."""

    def returned(self, contributors: tuple[int, ...]) -> None:  # noqa: B027
        """Called on the loop when all members have the result of these ranks, before the caller gets it."""

    def adoptable(self, left: memoryview) -> bool:
        """Return whether the published bytes of a dead member, which are untrusted, fit this operation."""
        return self.published is not None and len(left) == self.published.nbytes

    @abstractmethod
    def run(self, c: Communicator, deadline_ns: int) -> None:
        """Run it over all members of `c`."""

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """Receive the result of rank `source`, of `contributors` members, or send it if that is this rank."""
        raise LocalProtocolError(f"{self.call.text}: each member's result is its own")

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """Run it over `c`, with the inputs of dead members."""
        raise UserError(f"{self.call.text} cannot adopt")


def require_reducible(given: Array, op: str) -> None:
    """Raise `UserError` unless `op` can reduce arrays of this dtype."""
    dtype_code(given.dtype)
    reduction_code(op, given.dtype)


def described(given: Array) -> str:
    """Return the dtype and the shape of an array, as they are in the text of a call."""
    return f"{given.dtype}{list(given.shape)}"


class AllReduce(ElasticOperation):
    """`Communicator.all_reduce`. In place (`recompute`) without an `out`."""

    in_place = True

    def __init__(self, context: CallContext, x: Any, out: Any, *, op: str, algorithm: str) -> None:
        given = as_array(x, "x")
        require_reducible(given, op)
        if context.inputs is not Inputs.RECOMPUTE and out is None:
            out = np.empty(given.shape, given.dtype)
        elif out is not None:
            require_size(as_array(out, "out"), given.dtype, given.size, "out")
        self.published = context.published(given)
        self._x, self._out, self._op, self._algorithm = x, out, op, algorithm
        self._given = given
        self.call = context.call(f"all_reduce({given.dtype}[{given.size}], {op}, {context.mode})")
        self.value = x if out is None else out

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        x = self._x if self.published is None else self.published.reshape(self._given.shape)
        c.all_reduce(x, self._out, op=self._op, algorithm=self._algorithm, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        c.broadcast(self.value, c.members.index(source), deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`. 16-bit floats are summed in float32 and rounded once."""
        total = estate.added_to(self._given, self._op)
        c.all_reduce(total, op=summed(self._op), deadline_ns=deadline_ns)
        as_array(self._out, "out")[...] = estate.finished(total, self._op, self._given.dtype)


class AllGather(ElasticOperation):
    """`Communicator.all_gather`, into a new array with a row for each contributor.

    `out`: has a row for each rank that may contribute.
    """

    def __init__(self, context: CallContext, x: Any, out: Any) -> None:
        self._given = as_array(x, "x")
        self.out = out_of_ranks(out, context.ranks, self._given)
        self.published = context.published(self._given)
        self.call = context.call(f"all_gather({described(self._given)}, {context.mode})")

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        self.value = c.all_gather(self._given, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        if c.rank != source:
            self.value = np.empty((contributors, *self._given.shape), self._given.dtype)
        c.broadcast(self.value, c.members.index(source), deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        living = c.all_gather(self._given, deadline_ns=deadline_ns)
        self.value = estate.rows_with(living)
        estate.bring(c, self._given, self.value, deadline_ns)


class Broadcast(ElasticOperation):
    """`Communicator.broadcast`."""

    def __init__(self, context: CallContext, x: Any, out: None, *, root: int) -> None:
        given = as_array(x, "x")
        text = f"broadcast({given.dtype}[{given.size}], root={root}, {context.on_loss.value})"
        self.call = context.call(text, needs=root)
        self._root = root
        self.value = x

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        c.broadcast(self.value, c.members.index(self._root), deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        c.broadcast(self.value, c.members.index(source), deadline_ns=deadline_ns)


class Barrier(ElasticOperation):
    """`Communicator.barrier`."""

    def __init__(self, context: CallContext, x: None, out: None) -> None:
        self.call = context.call(f"barrier({context.on_loss.value})")

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        c.barrier(deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        c.barrier(deadline_ns=deadline_ns)


class AllReduceMany(ElasticOperation):
    """`Communicator.all_reduce_many`: in place (`recompute`), or into new arrays."""

    in_place = True

    def __init__(
        self, context: CallContext, arrays: Sequence[Any], out: None, *, op: str, algorithm: str
    ) -> None:
        if len(arrays) > ARRAYS_MAX:
            raise UserError(f"{len(arrays)} arrays at once; {ARRAYS_MAX} at most")
        self._given = [as_array(x, f"array {k}") for k, x in enumerate(arrays)]
        for given in self._given:
            require_reducible(given, op)
        self._op, self._algorithm = op, algorithm
        self._in_place = context.inputs is Inputs.RECOMPUTE
        self._results = self._given if self._in_place else [np.empty(x.shape, x.dtype) for x in self._given]
        self.value = arrays if self._in_place else self._results
        if context.inputs is Inputs.ADOPT:
            self.published = context.arena.empty(sum(x.nbytes for x in self._given), np.uint8)
            _pack(self.published, self._given)
        digest = xxhash.xxh3_64_hexdigest(" ".join(f"{x.dtype}[{x.size}]" for x in self._given).encode())
        self.call = context.call(f"all_reduce_many({len(arrays)} arrays #{digest}, {op}, {context.mode})")

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        if not self._in_place:
            for result, given in zip(self._results, self._given, strict=True):
                result[...] = given
        c.all_reduce_many(self._results, op=self._op, algorithm=self._algorithm, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `ElasticOperation`. All arrays are sent together."""
        together = np.empty(sum(result.nbytes for result in self._results), np.uint8)
        if c.rank == source:
            _pack(together, self._results)
        c.broadcast(together, c.members.index(source), deadline_ns=deadline_ns)
        if c.rank != source:
            for result, (begin, end) in zip(self._results, _places(self._results), strict=True):
                result[...] = together[begin:end].view(result.dtype).reshape(result.shape)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`. 16-bit floats are summed in float32 and rounded once."""
        estates = [self._part(estate, begin, end) for begin, end in _places(self._given)]
        totals = [each.added_to(given, self._op) for each, given in zip(estates, self._given, strict=True)]
        c.all_reduce_many(totals, op=summed(self._op), deadline_ns=deadline_ns)
        for result, total in zip(self._results, totals, strict=True):
            result[...] = estate.finished(total, self._op, result.dtype)

    def _part(self, estate: AdoptedInputs, begin: int, end: int) -> AdoptedInputs:
        """Return the adopted inputs of one array."""
        parts = (
            replace(each, memory=None if each.memory is None else each.memory[begin:end])
            for each in estate.bequests
        )
        return AdoptedInputs(tuple(parts), estate.contributors)


def _places(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    """Return where the bytes of each array begin and end when packed."""
    ends = np.cumsum([x.nbytes for x in arrays], dtype=np.int64)
    return [(int(end) - x.nbytes, int(end)) for x, end in zip(arrays, ends, strict=True)]


def _pack(together: Array, arrays: Sequence[Array]) -> None:
    for x, (begin, end) in zip(arrays, _places(arrays), strict=True):
        together[begin:end] = as_bytes(packed(x), "x")
