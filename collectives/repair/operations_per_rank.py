"""Elastic operations with a different result per member.

Rows are by rank, not by position: row r of an `x` is for rank r of the job, or for the r-th rank of a
sub-group, whichever members exist by then, so survivors can repeat the operation from unchanged inputs. Rows
addressed to an absent rank are dropped. Methods run on the data-plane thread, and raise as the communicator's
do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.device.arrays_in import Array, as_array
from zbmd.collectives.programs.reductions import dtype_code, reduction_code
from zbmd.collectives.repair.adoption import AdoptedInputs, summed
from zbmd.collectives.repair.events import Call, Inputs, OnLoss
from zbmd.collectives.repair.operations_shared import ElasticOperation, OutArray, out_of_ranks, published_in
from zbmd.transport.errors import UserError
from zbmd.transport.memory.arena import Arena

RowOf: TypeAlias = Callable[[int], int]
"""The row of a rank."""


class Reduce(ElasticOperation):
    """`Communicator.reduce`, into a new array at the root."""

    def __init__(
        self,
        arena: Arena,
        x: Any,
        root: int,
        out: Any,
        op: str,
        on_loss: OnLoss,
        inputs: Inputs,
        rank: int,
    ) -> None:
        self._given = given = as_array(x, "x")
        dtype_code(given.dtype)
        reduction_code(op, given.dtype)
        if out is not None and rank == root:
            self.out = OutArray(out, given.shape, given.dtype)
        self.published = published_in(arena, given, inputs)
        self._op, self._root = op, root
        self.value = np.empty(given.shape, given.dtype) if rank == root else None
        text = f"reduce({given.dtype}[{given.size}], root={root}, {op}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs, needs=root, own=True)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        c.reduce(self._given, c.members.index(self._root), self.value, op=self._op, deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`. 16-bit floats are summed in float32 and rounded once."""
        total = estate.added_to(self._given, self._op)
        c.reduce(total, c.members.index(self._root), op=summed(self._op), deadline_ns=deadline_ns)
        if self.value is not None:
            self.value[...] = estate.finished(total, self._op, self._given.dtype)


class ReduceScatter(ElasticOperation):
    """`Communicator.reduce_scatter` of rows by rank, into `out` or a new array."""

    def __init__(
        self,
        arena: Arena,
        x: Any,
        out: Any,
        op: str,
        on_loss: OnLoss,
        inputs: Inputs,
        row_of: RowOf,
        rank: int,
    ) -> None:
        self._given = given = _rows(x, row_of(rank))
        self._row_of = row_of
        dtype_code(given.dtype)
        reduction_code(op, given.dtype)
        self.published = published_in(arena, given, inputs)
        self._op = op
        self.value = np.empty(given.shape[1:], given.dtype) if out is None else out
        text = f"reduce_scatter({_what(given)}, {op}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs, own=True)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        given = self._given if self.published is None else self.published.reshape(self._given.shape)
        c.reduce_scatter(
            _of_members(given, c, self._row_of), self.value, op=self._op, deadline_ns=deadline_ns
        )

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`. 16-bit floats are summed in float32 and rounded once."""
        total = _of_members(estate.added_to(self._given, self._op), c, self._row_of)
        mine = c.reduce_scatter(total, op=summed(self._op), deadline_ns=deadline_ns)
        as_array(self.value, "out")[...] = estate.finished(mine, self._op, self._given.dtype)


class Gather(ElasticOperation):
    """`Communicator.gather`, into a new array at the root with a row for each contributor.

    `out`: at the root, as in `AllGather`.
    """

    def __init__(
        self,
        arena: Arena,
        x: Any,
        root: int,
        out: Any,
        on_loss: OnLoss,
        inputs: Inputs,
        ranks: int,
        rank: int,
    ) -> None:
        self._given = given = as_array(x, "x")
        self.out = out_of_ranks(out, ranks, given) if rank == root else None
        self.published = published_in(arena, given, inputs)
        self._root = root
        text = f"gather({_what(given)}, root={root}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs, needs=root, own=True)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        self.value = c.gather(self._given, c.members.index(self._root), deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        living = c.gather(self._given, c.members.index(self._root), deadline_ns=deadline_ns)
        self.value = None if living is None else estate.rows_with(living)
        estate.bring(c, self._given, self.value, deadline_ns)


class Scatter(ElasticOperation):
    """`Communicator.scatter` of the root's rows by rank, into `out`, or a new array at the root."""

    def __init__(self, x: Any, out: Any, root: int, on_loss: OnLoss, row_of: RowOf, rank: int) -> None:
        self._given: Array | None = None
        self._row_of = row_of
        self._root = root
        if rank == root:
            self._given = _rows(x, row_of(rank))
            out = np.empty(self._given.shape[1:], self._given.dtype) if out is None else out
        elif out is None:
            raise UserError(f"rank {rank} is not the root: pass the array that takes its row as `out`")
        self.value = out
        text = f"scatter({_what(as_array(out, 'out'))}, root={root}, {on_loss.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=Inputs.PRESERVE, needs=root, own=True)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        given = None if self._given is None else _of_members(self._given, c, self._row_of)
        c.scatter(given, c.members.index(self._root), self.value, deadline_ns=deadline_ns)


class AllToAll(ElasticOperation):
    """`Communicator.all_to_all` of rows by rank, into a new array with a row from each contributor.

    `out`: as in `AllGather`.
    """

    def __init__(
        self,
        arena: Arena,
        x: Any,
        out: Any,
        on_loss: OnLoss,
        inputs: Inputs,
        row_of: RowOf,
        ranks: int,
        rank: int,
    ) -> None:
        self._given = given = _rows(x, row_of(rank))
        self.out = out_of_ranks(out, ranks, given[0, ...])
        self._row_of = row_of
        self.published = published_in(arena, given, inputs)
        text = f"all_to_all({_what(given)}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs, own=True)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        self.value = c.all_to_all(_of_members(self._given, c, self._row_of), deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        living = c.all_to_all(_of_members(self._given, c, self._row_of), deadline_ns=deadline_ns)
        self.value = estate.rows_with(living)
        for each in estate.bequests:
            theirs = each.like(self._given)
            rows = None if theirs is None else _of_members(theirs, c, self._row_of)
            carrier = c.members.index(each.carrier)
            c.scatter(rows, carrier, estate.row_of(each, self.value), deadline_ns=deadline_ns)


def _rows(x: Any, mine: int) -> Array:
    """Return `x` as an array; raise `UserError` unless it has row `mine`, for this rank."""
    given = as_array(x, "x")
    if given.ndim == 0 or given.shape[0] <= mine:
        raise UserError(
            f"x of shape {given.shape} has no row for rank {mine}: give one for each rank of the job, or of "
            "the sub-group in its order"
        )
    return given


def _of_members(given: Array, c: Communicator, row_of: RowOf) -> Array:
    """Return the rows for the members of `c`, in member order; without a copy if those are all."""
    rows = [row_of(member) for member in c.members]
    if given.shape[0] <= max(rows):
        raise UserError(f"x of shape {given.shape} has no row {max(rows)}, whose rank has come since")
    if rows == list(range(given.shape[0])):
        return given
    return given[rows]


def _what(given: Array) -> str:
    return f"{given.dtype}{list(given.shape)}"
