"""Elastic operations whose members send, or receive, different numbers of rows.

Numbers are by rank: `rows[r]` is of rank r of the job, or of the r-th rank of a sub-group, whichever members
exist by then. Rows addressed to an absent rank are dropped, none are received from it, and
`ElasticOperation.rows` says how many each contributor has. Methods run on the data-plane thread, and raise as
the communicator's do.
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
from zbmd.collectives.programs.reductions import dtype_code, reduction_code
from zbmd.collectives.repair.adoption import AdoptedInput, AdoptedInputs, summed
from zbmd.collectives.repair.events import Call, Inputs, OnLoss
from zbmd.collectives.repair.operations_per_rank import RowOf
from zbmd.collectives.repair.operations_shared import ElasticOperation, OutArray, published_in
from zbmd.transport.errors import UserError
from zbmd.transport.memory.arena import Arena

_COUNT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How many rows each rank has; `row_of` is the index of a rank in `counts`."""

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

    def __init__(self, arena: Arena, x: Any, on_loss: OnLoss, inputs: Inputs) -> None:
        self._given = given = _with_rows(x)
        self.published = published_in(arena, given, inputs)
        text = f"all_gather_v({_row_text(given)}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs)

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

    def __init__(
        self,
        arena: Arena,
        x: Any,
        rows: Sequence[int],
        out: Any,
        op: str,
        on_loss: OnLoss,
        inputs: Inputs,
        row_of: RowOf,
        rank: int,
    ) -> None:
        self._given = given = _with_rows(x)
        self._shares = shares = _shares(rows, "rows", given.shape[0], row_of)
        dtype_code(given.dtype)
        reduction_code(op, given.dtype)
        self._op = op
        shape = (shares.of(rank), *given.shape[1:])
        if out is not None:
            require_size(as_array(out, "out"), given.dtype, int(np.prod(shape, dtype=np.int64)), "out")
        self.value = np.empty(shape, given.dtype) if out is None else out
        self.published = published_in(arena, given, inputs)
        told = xxhash.xxh3_64_hexdigest(np.array(shares.counts, np.int64).tobytes())
        text = f"reduce_scatter_v({_row_text(given)} by {len(shares.counts)} numbers #{told}, {op}, "
        self.call = Call(
            text=f"{text}{on_loss.value}, {inputs.value})", on_loss=on_loss, inputs=inputs, own=True
        )

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
        self,
        arena: Arena,
        x: Any,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        out: Any,
        on_loss: OnLoss,
        inputs: Inputs,
        row_of: RowOf,
        rank: int,
    ) -> None:
        self._given = given = _with_rows(x)
        self._sends = _shares(send_rows, "send_rows", given.shape[0], row_of)
        self._receives = _shares(receive_rows, "receive_rows", None, row_of)
        for shares in (self._sends, self._receives):
            shares.of(rank)
        if out is not None:
            shape = (sum(self._receives.counts), *given.shape[1:])
            self.out = OutArray(out, shape, given.dtype, "as many rows as receive_rows add up to")
        if inputs is Inputs.ADOPT:
            self.published = _with_counts(arena, self._sends.counts, given)
        text = f"all_to_all_v({_row_text(given)}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs, own=True)

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
