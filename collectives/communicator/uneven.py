"""Arrays and blocks of different lengths: small arrays that go together, rows that the ranks agree on.

Which arrays of an `all_reduce_many` go together is a function of their dtypes and sizes, in the order in
which they are given, so all ranks come to the same; a digest of it enters the fingerprint of each operation.
An array's bits are those that the all-reduce of its pack has at its place: by "eager" and "direct", whose
order is the same everywhere, those of an all-reduce of the array alone.

Which rank sends how many rows to which is agreed on before any byte moves: numbers that only their own ranks
know are gathered first (one small operation more), and calls that do not fit end as `Desynchronised` on all
ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.communicator.pieces import sides_of
from zbmd.collectives.communicator.planning import Call, Planner, moved_digest
from zbmd.collectives.communicator.turns import Turns
from zbmd.collectives.device.arrays_in import (
    Array,
    Placed,
    Target,
    as_bytes,
    as_placed,
    output,
    packed,
    require_apart,
)
from zbmd.collectives.programs.layout import (
    Counts,
    all_gather_layout,
    all_to_all_layout,
    reduce_scatter_layout,
)
from zbmd.collectives.programs.program import hash_text
from zbmd.collectives.programs.reductions import dtype_code, itemsize, reduction_code
from zbmd.transport.errors import UserError
from zbmd.transport.memory.segment import Segment

PACK_BYTES_MAX: Final = 1 << 20
"""Arrays are packed up to so many bytes together; a longer one goes alone, in place."""
ARRAYS_MAX: Final = 1 << 16
"""Arrays of one call."""
ROWS_MAX = 1 << 40
"""Rows of one block at most."""

AgreedT = TypeVar("AgreedT")


@dataclass(frozen=True, slots=True)
class Pack:
    """Arrays of one dtype that go together: their numbers, in order, and how many elements each has."""

    dtype: int
    arrays: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements in all."""
        return sum(self.sizes)

    @property
    def digest(self) -> int:
        """64 bits that ranks compare."""
        return hash_text(f"pack of {self.arrays} with {self.sizes}")


def packs_of(dtypes: Sequence[int], sizes: Sequence[int], bytes_max: int = PACK_BYTES_MAX) -> list[Pack]:
    """Return the packs of arrays with these dtype codes and sizes, each filled in order up to `bytes_max`.

    A pack stands where its first array does, and an array goes into the last pack of its dtype if that has
    room.
    """
    found: list[tuple[int, list[int]]] = []
    last: dict[int, tuple[list[int], int]] = {}
    for number, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        nbytes = size * itemsize(dtype)
        pack, used = last.get(dtype, ([], bytes_max))
        if used + nbytes > bytes_max or not pack:
            pack, used = [], 0
            found.append((dtype, pack))
        pack.append(number)
        last[dtype] = pack, used + nbytes
    return [Pack(dtype, tuple(pack), tuple(sizes[k] for k in pack)) for dtype, pack in found]


class UnevenOperations:
    """The operations of a communicator whose arrays or blocks may be of different lengths; see there."""

    def __init__(
        self, planner: Planner, turns: Turns, segment: Segment, members: tuple[int, ...], place: int
    ) -> None:
        self._planner = planner
        self._turns = turns
        self._segment = segment
        self._members = members
        self._place = place

    def all_reduce_many(self, arrays: Sequence[Any], op: str, algorithm: str, deadline_ns: int) -> None:
        """Reduce arrays in place, small ones together."""
        if len(arrays) > ARRAYS_MAX:
            raise UserError(f"{len(arrays)} arrays at once; {ARRAYS_MAX} at most")
        given = [as_placed(x, f"array {k}") for k, x in enumerate(arrays)]
        dtypes = [dtype_code(x.dtype) for x in given]
        codes = {code: reduction_code(op, x.dtype) for code, x in zip(dtypes, given, strict=True)}
        targets = [Target(x, f"array {k}", load=True) for k, x in enumerate(given)]
        for pack in packs_of(dtypes, [x.size for x in given]):
            code = codes[pack.dtype]
            call = self._planner.call(
                Operation.ALL_REDUCE, algorithm, pack.size, pack.dtype, code, digest=pack.digest
            )
            self._reduce(call, [targets[k].flat for k in pack.arrays], deadline_ns)
            for k in pack.arrays:
                targets[k].bring_home()

    def _reduce(self, call: Call, flats: list[Placed], deadline_ns: int) -> None:
        """Reduce the arrays of a pack."""
        plan = self._planner.plan(call)
        if len(flats) == 1:
            self._turns.perform_sides(call, plan, sides_of(plan, flats[0], flats[0]), deadline_ns)
            return
        together = self._segment.arena.empty(call.count, flats[0].dtype)
        self._copy(together, flats, inwards=True)
        self._turns.perform_sides(call, plan, sides_of(plan, together, together), deadline_ns)
        self._copy(together, flats, inwards=False)

    def _copy(self, together: Array, flats: list[Placed], *, inwards: bool) -> None:
        """Copy arrays one behind the other, or back."""
        devices, at = self._turns.pieces.devices, 0
        try:
            devices.begin(*flats)
            for flat in flats:
                part = together[at : at + flat.size]
                devices.copy(*(part, flat) if inwards else (flat, part))
                at += flat.size
        finally:
            devices.end()

    def reduce_scatter(
        self, x: Any, rows: Sequence[int], out: Any, op: str, algorithm: str, deadline_ns: int
    ) -> Any:
        """Reduce, and keep `rows[r]` rows on the r-th member."""
        given = as_placed(x, "x")
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        shares = _row_counts(rows, len(self._members), "rows")
        if given.ndim == 0 or sum(shares) != given.shape[0]:
            raise UserError(f"rows add up to {sum(shares)}, but x has the shape {given.shape}")
        result, target = output(out, (shares[self._place], *given.shape[1:]), given)
        source = packed(given)
        require_apart(source, target.flat)
        width = int(np.prod(given.shape[1:], dtype=np.int64))
        layout = reduce_scatter_layout(tuple(count * width for count in shares))
        call = self._planner.call_laid_out(Operation.REDUCE_SCATTER, algorithm, layout, dtype, reduction)
        self._turns.perform(call, source, target, deadline_ns)
        return result

    def all_gather(self, x: Any, algorithm: str, deadline_ns: int) -> tuple[Any, Counts]:
        """Gather everybody's rows; return them and the number of rows of each member."""
        given = as_placed(x, "x")
        width = _row_bytes(given)
        source = as_bytes(packed(given), "x")
        with self._turns.turnstile:
            rows = self._agree((width, given.shape[0]), _rows_of_one_size, deadline_ns)
            result, target = output(None, (sum(rows), *given.shape[1:]), given)
            layout = all_gather_layout(tuple(count * width for count in rows))
            digest = moved_digest(given.dtype)
            call = self._planner.call_laid_out(Operation.ALL_GATHER, algorithm, layout, digest=digest)
            self._turns.perform_in_turn(call, source, as_bytes(target.flat, "out"), deadline_ns)
        return result, rows

    def all_to_all(
        self,
        x: Any,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        out: Any,
        algorithm: str,
        deadline_ns: int,
    ) -> Any:
        """Exchange rows."""
        given, n = as_placed(x, "x"), len(self._members)
        width = _row_bytes(given)
        sends, receives = _row_counts(send_rows, n, "send_rows"), _row_counts(receive_rows, n, "receive_rows")
        if sum(sends) != given.shape[0]:
            raise UserError(f"send_rows add up to {sum(sends)}, but x has {given.shape[0]} rows")
        result, target = output(out, (sum(receives), *given.shape[1:]), given)
        source = as_bytes(packed(given), "x")
        require_apart(source, target.flat)
        with self._turns.turnstile:
            check = partial(_rows_exchanged, members=self._members)
            layout = all_to_all_layout(self._agree((width, *sends, *receives), check, deadline_ns))
            digest = moved_digest(given.dtype)
            call = self._planner.call_laid_out(Operation.ALL_TO_ALL, algorithm, layout, digest=digest)
            self._turns.perform_in_turn(call, source, as_bytes(target.flat, "out"), deadline_ns)
        target.bring_home()
        return result

    def agree_on(self, text: str, deadline_ns: int) -> None:
        """Raise `Desynchronised` on all ranks unless all have given the same text."""
        with self._turns.turnstile:
            self._agree((hash_text(text) >> 1,), _same, deadline_ns)

    def _agree(self, mine: tuple[int, ...], check: Callable[[Array], AgreedT], deadline_ns: int) -> AgreedT:
        """Gather everybody's numbers by a small all-gather in this thread's turn, and check them.

        `check` takes them as int64 (size, len(mine)); where it raises `_RowsDiffer`, all ranks raise
        `Desynchronised`.
        """
        n = len(self._members)
        source, table = np.array(mine, np.int64).view(np.uint8), np.empty((n, len(mine)), np.int64)
        call = self._planner.call(Operation.ALL_GATHER, "auto", source.size)
        flat = table.reshape(-1).view(np.uint8)
        self._turns.perform_in_turn(call, source, flat, deadline_ns, blocks_out=n)
        try:
            return check(table)
        except _RowsDiffer as differ:
            self._turns.give_up_desynchronised(differ.what, differ.calls)


class _RowsDiffer(Exception):
    """The ranks do not agree on their rows. what: how, if that is known. calls: of each, as text."""

    def __init__(self, what: str, calls: list[str]) -> None:
        super().__init__(what)
        self.what = what
        self.calls = calls


def _same(table: Array) -> None:
    """Raise `_RowsDiffer` unless all rows are the same."""
    if (table != table[0]).any():
        raise _RowsDiffer("", [f"digest {row[0]:016x}" for row in table.tolist()])


def _row_bytes(x: Placed) -> int:
    """Bytes of a row of `x`. Raises `UserError` if it has no axis."""
    if x.ndim == 0:
        raise UserError("x has no rows: it must have one axis at least")
    return x.itemsize * int(np.prod(x.shape[1:], dtype=np.int64))


def _row_counts(rows: Sequence[int], size: int, name: str) -> Counts:
    """The numbers of rows that a caller gives, one a member. Raises `UserError` if they are out of bounds."""
    counts = tuple(int(count) for count in rows)
    if len(counts) != size or any(not 0 <= count <= ROWS_MAX for count in counts):
        raise UserError(f"{name}={list(counts)} must be {size} numbers of rows, one a member")
    return counts


def _rows_of_one_size(table: Array) -> Counts:
    """The rows of each member, by `table` (bytes of a row, rows). Raises `_RowsDiffer`."""
    sizes = [int(size) for size in table[:, 0]]
    if len(set(sizes)) > 1:
        raise _RowsDiffer("their rows are of different sizes", [f"rows of {b} bytes" for b in sizes])
    return tuple(int(rows) for rows in table[:, 1])


def _rows_exchanged(table: Array, members: Sequence[int]) -> tuple[Counts, ...]:
    """Bytes from s to d, by `table` (bytes of a row, rows sent to each, rows received from each).

    Raises `_RowsDiffer` if one member sends another what that does not expect.
    """
    _rows_of_one_size(table)
    n, width = len(members), int(table[0, 0])
    sends, receives = table[:, 1 : 1 + n], table[:, 1 + n :]
    wrong = np.argwhere(sends != receives.T)
    if wrong.size:
        s, d = (int(place) for place in wrong[0])
        raise _RowsDiffer(
            f"rank {members[s]} sends {sends[s, d]} rows to rank {members[d]}, "
            f"which expects {receives[d, s]}",
            [f"all_to_all_v(sends {list(sends[r])}, receives {list(receives[r])})" for r in range(n)],
        )
    return tuple(tuple(int(count) * width for count in row) for row in sends)
