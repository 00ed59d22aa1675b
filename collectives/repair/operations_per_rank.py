"""Elastic operations with a different result, or a different number of rows, per member.

Rows and numbers of rows are by rank, not by position: row r of an `x`, or `rows[r]`, is of rank r of the job,
or of the r-th rank of a sub-group, whichever members exist by then, so survivors can repeat the operation
from unchanged inputs. Rows addressed to an absent rank are dropped, none are received from it, and
`ElasticOperation.rows` has the number of rows of each contributor. Methods run on the data-plane thread, and
raise as the communicator's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.uneven import ROWS_MAX
from zbmd.collectives.device.arrays_in import Array, as_array, as_bytes, packed, require_size
from zbmd.collectives.programs.layout import Counts
from zbmd.collectives.repair.adoption import AdoptedInput, AdoptedInputs, summed
from zbmd.collectives.repair.events import Inputs
from zbmd.collectives.repair.operations_shared import (
    CallContext,
    ElasticOperation,
    OutArray,
    RowOf,
    described,
    out_of_ranks,
    require_reducible,
)
from zbmd.transport.errors import UserError
from zbmd.transport.memory.arena import Arena

_COUNT_BYTES: Final = 8


class Reduce(ElasticOperation):
    """`Communicator.reduce`, into a new array at the root."""

    def __init__(self, context: CallContext, x: Any, out: Any, *, root: int, op: str) -> None:
        self._given = given = as_array(x, "x")
        require_reducible(given, op)
        at_root = context.rank == root
        if out is not None and at_root:
            self.out = OutArray(out, given.shape, given.dtype)
        self.published = context.published(given)
        self._op, self._root = op, root
        self.value = np.empty(given.shape, given.dtype) if at_root else None
        text = f"reduce({given.dtype}[{given.size}], root={root}, {op}, {context.mode})"
        self.call = context.call(text, needs=root, own=True)

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

    def __init__(self, context: CallContext, x: Any, out: Any, *, op: str) -> None:
        self._given = given = _rows(x, context)
        self._row_of = context.row_of
        require_reducible(given, op)
        self.published = context.published(given)
        self._op = op
        self.value = np.empty(given.shape[1:], given.dtype) if out is None else out
        self.call = context.call(f"reduce_scatter({described(given)}, {op}, {context.mode})", own=True)

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

    def __init__(self, context: CallContext, x: Any, out: Any, *, root: int) -> None:
        self._given = given = as_array(x, "x")
        self.out = out_of_ranks(out, context.ranks, given) if context.rank == root else None
        self.published = context.published(given)
        self._root = root
        text = f"gather({described(given)}, root={root}, {context.mode})"
        self.call = context.call(text, needs=root, own=True)

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

    def __init__(self, context: CallContext, x: Any, out: Any, *, root: int) -> None:
        self._given: Array | None = None
        self._row_of, self._root = context.row_of, root
        if context.rank == root:
            self._given = _rows(x, context)
            out = np.empty(self._given.shape[1:], self._given.dtype) if out is None else out
        elif out is None:
            raise UserError(
                f"rank {context.rank} is not the root: pass the array that takes its row as `out`"
            )
        self.value = out
        text = f"scatter({described(as_array(out, 'out'))}, root={root}, {context.on_loss.value})"
        self.call = context.call(text, needs=root, own=True)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        given = None if self._given is None else _of_members(self._given, c, self._row_of)
        c.scatter(given, c.members.index(self._root), self.value, deadline_ns=deadline_ns)


class AllToAll(ElasticOperation):
    """`Communicator.all_to_all` of rows by rank, into a new array with a row from each contributor.

    `out`: as in `AllGather`.
    """

    def __init__(self, context: CallContext, x: Any, out: Any) -> None:
        self._given = given = _rows(x, context)
        self.out = out_of_ranks(out, context.ranks, given[0, ...])
        self._row_of = context.row_of
        self.published = context.published(given)
        self.call = context.call(f"all_to_all({described(given)}, {context.mode})", own=True)

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


def _rows(x: Any, context: CallContext) -> Array:
    """Return `x` as an array; raise `UserError` unless it has a row for this rank."""
    given, mine = as_array(x, "x"), context.row_of(context.rank)
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


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The number of rows of each rank; `row_of` is the index of a rank in `counts`."""

    counts: Counts
    row_of: RowOf

    def of(self, rank: int) -> int:
        """Return the number of rows of `rank`. Raises `UserError` if there is none."""
        place = self.row_of(rank)
        if place >= len(self.counts):
            raise UserError(
                f"{list(self.counts)} has no number of rows for rank {rank}: give one for each rank of the "
                "job, or of the sub-group in its order"
            )
        return self.counts[place]

    def block(self, given: Array, rank: int) -> Array:
        """Return the rows of `given` that belong to this rank."""
        place, count = self.row_of(rank), self.of(rank)
        begin = sum(self.counts[:place])
        return given[begin : begin + count]

    def blocks(self, given: Array, ranks: tuple[int, ...]) -> Array:
        """Return the rows of these ranks, in order; without a copy if those are all."""
        if [self.row_of(rank) for rank in ranks] == list(range(len(self.counts))):
            return given
        return np.concatenate([self.block(given, rank) for rank in ranks])


class AllGatherV(ElasticOperation):
    """`Communicator.all_gather_v`, of the contributors' rows in rank order."""

    def __init__(self, context: CallContext, x: Any, out: None) -> None:
        self._given = given = _with_rows(x)
        self.published = context.published(given)
        self.call = context.call(f"all_gather_v({_row_text(given)}, {context.mode})")

    def adoptable(self, left: memoryview) -> bool:
        """See `ElasticOperation`: whole rows, whose number is known only if they have bytes."""
        row_bytes = _row_bytes(self._given)
        return bool(row_bytes) and len(left) % row_bytes == 0

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        self.value, self.rows = c.all_gather_rows(self._given, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `ElasticOperation`. The number of rows of each contributor is sent first."""
        rows = np.array(self.rows if c.rank == source else (0,) * contributors, np.int64)
        c.broadcast(rows, c.members.index(source), deadline_ns=deadline_ns)
        self.rows = tuple(int(count) for count in rows)
        if c.rank != source:
            self.value = np.empty((sum(self.rows), *self._given.shape[1:]), self._given.dtype)
        c.broadcast(self.value, c.members.index(source), deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`. A carrier sends the rows of dead members after its own."""
        left = [self._rows_of(each) for each in estate.bequests]
        mine = np.array([len(self._given), *(len(theirs) for theirs in left)], np.int64)
        table = c.all_gather(mine, deadline_ns=deadline_ns)
        came = c.all_gather_v(np.concatenate([self._given, *left]), deadline_ns=deadline_ns)
        counts = {each.member: int(table[:, 1 + k].sum()) for k, each in enumerate(estate.bequests)}
        for member in estate.contributors:
            if member not in counts:
                counts[member] = int(table[c.members.index(member.rank), 0])
        self.value = estate.in_order(came, c.members, counts)
        self.rows = tuple(counts[member] for member in estate.contributors)

    def _rows_of(self, bequest: AdoptedInput) -> Array:
        """Return the input of a dead member if this rank carries it; otherwise no rows."""
        memory = b"" if bequest.memory is None else bequest.memory
        return np.frombuffer(memory, self._given.dtype).reshape(-1, *self._given.shape[1:])


class ReduceScatterV(ElasticOperation):
    """`Communicator.reduce_scatter_v` of rows by rank, into `out` or a new array."""

    def __init__(self, context: CallContext, x: Any, out: Any, *, rows: Sequence[int], op: str) -> None:
        self._given = given = _with_rows(x)
        self._shares = shares = _shares(rows, "rows", given.shape[0], context.row_of)
        require_reducible(given, op)
        self._op = op
        shape = (shares.of(context.rank), *given.shape[1:])
        if out is not None:
            require_size(as_array(out, "out"), given.dtype, int(np.prod(shape, dtype=np.int64)), "out")
        self.value = np.empty(shape, given.dtype) if out is None else out
        self.published = context.published(given)
        digest = xxhash.xxh3_64_hexdigest(np.array(shares.counts, np.int64).tobytes())
        text = f"reduce_scatter_v({_row_text(given)} by {len(shares.counts)} numbers #{digest}, {op}, "
        self.call = context.call(f"{text}{context.mode})", own=True)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        given = self._given if self.published is None else self.published.reshape(self._given.shape)
        self._scatter(c, given, self.value, self._op, deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`. 16-bit floats are summed in float32 and rounded once."""
        total = estate.added_to(self._given, self._op)
        mine = self._scatter(c, total, None, summed(self._op), deadline_ns)
        as_array(self.value, "out")[...] = estate.finished(mine, self._op, self._given.dtype)

    def _scatter(self, c: Communicator, given: Array, out: Any, op: str, deadline_ns: int) -> Any:
        rows = [self._shares.of(member) for member in c.members]
        return c.reduce_scatter_v(
            self._shares.blocks(given, c.members), rows, out, op=op, deadline_ns=deadline_ns
        )


class AllToAllV(ElasticOperation):
    """`Communicator.all_to_all_v` of rows by rank, into a new array of the contributors' rows, by rank.

    `out`: large enough for all of `receive_rows`.
    """

    def __init__(
        self, context: CallContext, x: Any, out: Any, *, send_rows: Sequence[int], receive_rows: Sequence[int]
    ) -> None:
        self._given = given = _with_rows(x)
        self._sends = _shares(send_rows, "send_rows", given.shape[0], context.row_of)
        self._receives = _shares(receive_rows, "receive_rows", None, context.row_of)
        for shares in (self._sends, self._receives):
            shares.of(context.rank)
        if out is not None:
            shape = (sum(self._receives.counts), *given.shape[1:])
            self.out = OutArray(out, shape, given.dtype, "as many rows as receive_rows add up to")
        if context.inputs is Inputs.ADOPT:
            self.published = _with_counts(context.arena, self._sends.counts, given)
        self.call = context.call(f"all_to_all_v({_row_text(given)}, {context.mode})", own=True)

    def adoptable(self, left: memoryview) -> bool:
        """See `ElasticOperation`: as many numbers as this rank sends, and the rows that they count."""
        return blocks_of(left, self._sends.counts, row_bytes=_row_bytes(self._given)) is not None

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `ElasticOperation`."""
        sends = [self._sends.of(member) for member in c.members]
        self.rows = tuple(self._receives.of(member) for member in c.members)
        given = self._sends.blocks(self._given, c.members)
        self.value = c.all_to_all_v(given, sends, self.rows, deadline_ns=deadline_ns)

    def adopt(self, c: Communicator, estate: AdoptedInputs, deadline_ns: int) -> None:
        """See `ElasticOperation`. A carrier sends each member the rows of dead members after its own."""
        givers = [(self._sends, self._given), *self._left(estate)]
        blocks = [shares.block(given, to) for to in c.members for shares, given in givers]
        sends = [sum(shares.of(to) for shares, _ in givers) for to in c.members]
        counts = {member: self._receives.of(member.rank) for member in estate.contributors}
        receives = [
            self._receives.of(source)
            + sum(counts[each.member] for each in estate.bequests if each.carrier == source)
            for source in c.members
        ]
        came = c.all_to_all_v(np.concatenate(blocks), sends, receives, deadline_ns=deadline_ns)
        self.value = estate.in_order(came, c.members, counts)
        self.rows = tuple(counts[member] for member in estate.contributors)

    def _left(self, estate: AdoptedInputs) -> list[tuple[RowCounts, Array]]:
        """Return the inputs of dead members that this rank carries, with their row counts."""
        found: list[tuple[RowCounts, Array]] = []
        for each in estate.bequests:
            if each.memory is None:
                continue
            left = blocks_of(each.memory, self._sends.counts, row_bytes=_row_bytes(self._given))
            assert left is not None, "it was looked at before"
            counts, rows = left
            given = rows.view(self._given.dtype).reshape(sum(counts), *self._given.shape[1:])
            found.append((RowCounts(counts, self._sends.row_of), given))
        return found


def blocks_of(left: memoryview, like: Counts, *, row_bytes: int) -> tuple[Counts, Array] | None:
    """Return the published row counts, as many as `like` has, and the rows, flat, uint8, of an `AllToAllV`.

    None if the bytes, which are untrusted, cannot be that.
    """
    begin = _COUNT_BYTES * len(like)
    if len(left) < begin:
        return None
    counts = tuple(int(count) for count in np.frombuffer(left[:begin], np.int64))
    if any(not 0 <= count <= ROWS_MAX for count in counts) or sum(counts) * row_bytes != len(left) - begin:
        return None
    return counts, np.frombuffer(left[begin:], np.uint8)


def _with_counts(arena: Arena, counts: Counts, given: Array) -> Array:
    """Return the array that `blocks_of` reads: the numbers, followed by a copy of the rows. Raises
    `ArenaFull`.
    """
    begin = _COUNT_BYTES * len(counts)
    published = arena.empty(begin + given.nbytes, np.uint8)
    published[:begin] = np.array(counts, np.int64).view(np.uint8)
    published[begin:] = as_bytes(packed(given), "x")
    return published


def _with_rows(x: Any) -> Array:
    given = as_array(x, "x")
    if given.ndim == 0:
        raise UserError("x has no rows: it must have one axis at least")
    if given.dtype.hasobject:
        raise UserError(f"x has dtype {given.dtype}, which holds Python objects")
    return given


def _shares(rows: Sequence[int], name: str, total: int | None, row_of: RowOf) -> RowCounts:
    """Return row counts by rank that add up to `total` if it is given. Raises `UserError`."""
    counts = tuple(int(count) for count in rows)
    if any(not 0 <= count <= ROWS_MAX for count in counts):
        raise UserError(f"{name}={list(counts)} must be numbers of rows, one for each rank")
    if total is not None and sum(counts) != total:
        raise UserError(f"{name} add up to {sum(counts)}, but x has {total} rows")
    return RowCounts(counts, row_of)


def _row_bytes(given: Array) -> int:
    return given.itemsize * int(np.prod(given.shape[1:], dtype=np.int64))


def _row_text(given: Array) -> str:
    """Describe what is equal in all members' arrays."""
    return f"{given.dtype}[rows, {', '.join(map(str, given.shape[1:]))}]".replace(", ]", "]")
