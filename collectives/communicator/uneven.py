"""Operations whose blocks may be of different lengths: all-to-all, and the `_v` forms of gather and scatter.

Who gives how much to whom is agreed on before any byte moves: lengths that only their own ranks know are
gathered first (one small operation more), and what does not fit ends as `Desynchronised` on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.communicator.calls import Calls
from zbmd.collectives.communicator.pieces import Job, Side, shape_of
from zbmd.collectives.communicator.runs import NO_ROOT, Said
from zbmd.collectives.device.arrays_in import Array, as_bytes, as_placed, packed, require_apart
from zbmd.collectives.errors import Desynchronised
from zbmd.collectives.programs.layout import (
    Counts,
    all_gather_layout,
    all_to_all_layout,
    reduce_scatter_layout,
)
from zbmd.collectives.programs.program import IN, OUT, PUB
from zbmd.collectives.programs.reductions import BYTES_CODE, dtype_code, reduction_code
from zbmd.transport.errors import UserError

_ALL_TO_ALL: Final = Operation.ALL_TO_ALL.value
ROWS_MAX = 1 << 40
"""Rows of one block at most."""


class UnevenOperations(Calls):
    """See `Communicator`."""

    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Send block d of `x`, shape (size, …), to the d-th member; block s of `out` comes from the s-th.

        Any dtype without objects. `algorithm`: auto, eager or direct. Returns `out`, of the shape of `x`.
        """
        if out is None:
            out = self._new(x, lambda shape: shape)
        done = self.fast_path.run(_ALL_TO_ALL, x, out, "sum", algorithm, NO_ROOT, deadline_ns)
        if done is not None:
            return out if done else self.fast_path_failed()
        given = self._blocks_of(as_placed(x, "x"))
        result, target = self._output(out, given.shape, given)
        source, flat = as_bytes(packed(given), "x"), as_bytes(target.flat, "out")
        require_apart(source, flat)
        layout = all_to_all_layout(((source.size // self.size,) * self.size,) * self.size)
        job = self._laid_out(Operation.ALL_TO_ALL, algorithm, layout, source, flat)
        self._perform(job, deadline_ns, Said(x, out, "sum", algorithm, NO_ROOT))
        target.bring_home()
        return result

    def all_to_all_v(
        self,
        x: Any,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        out: Any = None,
        *,
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Any:
        """Send `send_rows[d]` rows of `x` to the d-th member, one block after the other, and receive
        `receive_rows[s]` rows from the s-th into `out`, shape (sum(receive_rows), *x.shape[1:]).

        All ranks raise `Desynchronised` if what one sends is not what the other expects, or rows differ in
        size.
        """
        given = as_placed(x, "x")
        if given.ndim == 0:
            raise UserError("x has no rows: it must have one axis at least")
        sends, receives = self._rows(send_rows, "send_rows"), self._rows(receive_rows, "receive_rows")
        if sum(sends) != given.shape[0]:
            raise UserError(f"send_rows add up to {sum(sends)}, but x has {given.shape[0]} rows")
        result, target = self._output(out, (sum(receives), *given.shape[1:]), given)
        source, flat = as_bytes(packed(given), "x"), as_bytes(target.flat, "out")
        require_apart(source, flat)
        row_bytes = given.itemsize * int(np.prod(given.shape[1:], dtype=np.int64))
        with self._turnstile:
            table = self._exchange_rows((row_bytes, *sends, *receives), deadline_ns)
            counts = self._matched(table)
            layout = all_to_all_layout(counts)
            job = self._laid_out(Operation.ALL_TO_ALL, algorithm, layout, source, flat)
            self._perform_in_turn(job, deadline_ns)
        target.bring_home()
        return result

    def all_gather_v(self, x: Any, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Every rank's `x`, shape (rows, …) with a number of rows of its own, one after the other: a new
        array.
        """
        return self.all_gather_rows(x, algorithm=algorithm, deadline_ns=deadline_ns)[0]

    def all_gather_rows(
        self, x: Any, *, algorithm: str = "auto", deadline_ns: int = 0
    ) -> tuple[Any, tuple[int, ...]]:
        """As `all_gather_v`, with the number of rows of each member, in their order."""
        given = as_placed(x, "x")
        if given.ndim == 0:
            raise UserError("x has no rows: it must have one axis at least")
        source = as_bytes(packed(given), "x")
        row_bytes = given.itemsize * int(np.prod(given.shape[1:], dtype=np.int64))
        with self._turnstile:
            table = self._exchange_rows((row_bytes, given.shape[0]), deadline_ns)
            self._require_one_size(table)
            rows = tuple(int(rows) for rows in table[:, 1])
            result, target = self._output(None, (sum(rows), *given.shape[1:]), given)
            flat = as_bytes(target.flat, "out")
            layout = all_gather_layout(tuple(count * row_bytes for count in rows))
            job = self._laid_out(Operation.ALL_GATHER, algorithm, layout, source, flat)
            self._perform_in_turn(job, deadline_ns)
        return result, rows

    def reduce_scatter_v(
        self,
        x: Any,
        rows: Sequence[int],
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Any:
        """Combine every rank's `x`, and keep this rank's rows of it in `out`: `rows[r]` for the r-th member.

        `rows` is the same on all ranks and adds up to the first extent of `x`.
        """
        given = as_placed(x, "x")
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        shares = self._rows(rows, "rows")
        if given.ndim == 0 or sum(shares) != given.shape[0]:
            raise UserError(f"rows add up to {sum(shares)}, but x has the shape {given.shape}")
        result, target = self._output(out, (shares[self.place], *given.shape[1:]), given)
        source = packed(given)
        require_apart(source, target.flat)
        width = int(np.prod(given.shape[1:], dtype=np.int64))
        layout = reduce_scatter_layout(tuple(count * width for count in shares))
        job = self._laid_out(
            Operation.REDUCE_SCATTER, algorithm, layout, source, target.flat, dtype=dtype, reduction=reduction
        )
        self._perform(job, deadline_ns)
        target.bring_home()
        return result

    def _rows(self, rows: Sequence[int], name: str) -> Counts:
        counts = tuple(int(count) for count in rows)
        if len(counts) != self.size or any(not 0 <= count <= ROWS_MAX for count in counts):
            raise UserError(f"{name}={list(counts)} must be {self.size} numbers of rows, one a member")
        return counts

    def _exchange_rows(self, mine: tuple[int, ...], deadline_ns: int) -> Array:
        """Everybody's numbers, int64 (size, len(mine)), by a small all-gather in this thread's turn."""
        source = np.array(mine, np.int64).view(np.uint8)
        table = np.empty((self.size, len(mine)), np.int64)
        flat = table.reshape(-1).view(np.uint8)
        shape = shape_of(self._ask(Operation.ALL_GATHER, "auto", source.size, BYTES_CODE))
        first = (PUB,) if shape.plan.eager else (IN,)
        sides = [Side(first, source, 1, source), Side((OUT,), flat, self.size, None, flat)]
        self._perform_in_turn(Job(shape=shape, sides=sides, count=source.size, dtype=BYTES_CODE), deadline_ns)
        return table

    def _require_one_size(self, table: Array) -> None:
        """All rows are of one size, in bytes (column 0). Raises `Desynchronised`, on all ranks."""
        sizes = [int(size) for size in table[:, 0]]
        if len(set(sizes)) > 1:
            self._give_up_desynchronised(
                "their rows are of different sizes", [f"rows of {b} bytes" for b in sizes]
            )

    def _matched(self, table: Array) -> tuple[Counts, ...]:
        """Bytes from s to d, if all agree on them. Raises `Desynchronised`, on all ranks."""
        self._require_one_size(table)
        n, width = self.size, int(table[0, 0])
        sends, receives = table[:, 1 : 1 + n], table[:, 1 + n :]
        wrong = np.argwhere(sends != receives.T)
        if wrong.size:
            s, d = (int(place) for place in wrong[0])
            told = (
                f"rank {self.members[s]} sends {sends[s, d]} rows to rank {self.members[d]}, "
                f"which expects {receives[d, s]}"
            )
            calls = [f"all_to_all_v(sends {list(sends[r])}, receives {list(receives[r])})" for r in range(n)]
            self._give_up_desynchronised(told, calls)
        return tuple(tuple(int(count) * width for count in row) for row in sends)

    def _give_up_desynchronised(self, what: str, calls: list[str]) -> None:
        told = dict(zip(self.members, calls, strict=True))
        self._ended = self._ended or f"the ranks' calls do not fit: {what}"
        self._executor.give_up()
        raise Desynchronised(f"operation #{self.sequence} of epoch {self.epoch}: {what}", told)
