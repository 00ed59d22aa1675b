"""The operations of an elastic group, declared once: for coroutines (`ElasticGroup`) and for threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zbmd.collectives.repair.operations_per_rank import (
    AllGatherV,
    AllToAll,
    AllToAllV,
    Gather,
    Reduce,
    ReduceScatter,
    ReduceScatterV,
    Scatter,
)
from zbmd.collectives.repair.operations_shared import (
    AllGather,
    AllReduce,
    AllReduceMany,
    Barrier,
    Broadcast,
    ElasticOperation,
)

CalledT = TypeVar("CalledT", covariant=True)
"""The return type of a call: a coroutine of the result, or the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A complete operation. `contributors`: the ranks whose inputs `value` holds, each once; the same on all.

    `repairs`: how many views came while it was under way. `rows`: of `all_gather_v` and `all_to_all_v`, how
    many rows of `value` each contributor has, in their order.
    """

    value: Any
    contributors: tuple[int, ...]
    epoch: int
    repairs: int
    rows: tuple[int, ...] = ()


class ElasticOperations(ABC, Generic[CalledT]):
    """The operations of an elastic group: `ElasticGroup` returns coroutines of a `Result`, `ElasticBlocking`
    returns a `Result`.

    `on_loss` and `inputs` as in `ElasticGroup`, timeouts in seconds. Arrays may lie on a device
    (`device.host_copy`), `x` and `out` independently; the operation comes after the work that was queued on
    `stream` before the call. A result without `out` is a new array where `x` lies.

    A `root` is a rank of the group: one of the job, or, in a sub-group, an index of its `ranks`.
    """

    @abstractmethod
    def _start(
        self,
        kind: type[ElasticOperation],
        x: Any,
        out: Any,
        on_loss: str,
        inputs: str | None,
        timeout: float | None,
        stream: Any = None,
        **arguments: Any,
    ) -> CalledT:
        """Bring an operation of this kind, made of `x`, `out` and the arguments, to its end."""

    def all_reduce(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str = "sum",
        on_loss: str = "survivors",
        inputs: str | None = None,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Reduce `x` over the contributors. `inputs`: by default "preserve" with `out`, else "recompute".

        With "preserve" or "adopt" and no `out` the result is a new array. "adopt" reads `x` in the arena
        (`zbmd.empty`), and copies one that lies elsewhere there first.
        """
        return self._start(AllReduce, x, out, on_loss, inputs, timeout, stream, op=op, algorithm=algorithm)

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        *,
        op: str = "sum",
        on_loss: str = "survivors",
        inputs: str = "recompute",
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Reduce every array over the contributors at once; small ones travel together (`uneven`).

        All members give arrays of the same dtypes and sizes in the same order. In place, and the value is
        `arrays`; with "preserve" or "adopt" it is a list of new ones. "adopt" copies them into the arena.
        """
        return self._start(
            AllReduceMany, arrays, None, on_loss, inputs, timeout, stream, op=op, algorithm=algorithm
        )

    def reduce(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        op: str = "sum",
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Reduce `x` over the contributors at rank `root`, in `out` or in a new array; elsewhere the value is
        None, and `out` is not used.

        out: like `x`. It is written once the operation is over; after an error it is as it was. So `x`
        may be it, or lie in it. Fails with `MembersLost` if the root died in it.
        """
        return self._start(Reduce, x, out, on_loss, inputs, timeout, stream, root=root, op=op)

    def reduce_scatter(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str = "sum",
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Reduce `x`, (ranks, …), over the contributors: rank r gets row r in `out`, (…).

        Here and below, `ranks` are those of the job, or, of a sub-group, the r-th of its `ranks` has row r.

        The rows of absent ranks are dropped. Without `out` the result is a new array.
        """
        return self._start(ReduceScatter, x, out, on_loss, inputs, timeout, stream, op=op)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Return a new array, (contributors, *x.shape): each one's `x`, in rank order.

        out: (ranks, *x.shape), with a row for each rank (see `reduce_scatter`), present or absent, so that it
        always fits; `UserError`, before anything has moved, if it does not. The contributors' rows are its
        first ones, in rank order, and the value is those, a view of it; the rows behind stay as they are. It
        is written once the operation is over; after an error it is as it was. So `x` may lie in it.
        """
        return self._start(AllGather, x, out, on_loss, inputs, timeout, stream)

    def gather(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Collect as `all_gather`, at rank `root` alone; elsewhere the value is None, and `out` is not used.

        Fails with `MembersLost` if the root died in it.
        """
        return self._start(Gather, x, out, on_loss, inputs, timeout, stream, root=root)

    def scatter(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Give rank r row r of the `x`, (ranks, …), of rank `root` in `out`, (…).

        The root may leave out `out`; the others pass None for `x`. Fails with `MembersLost` if the root died
        before all had their rows.
        """
        return self._start(Scatter, x, out, on_loss, "preserve", timeout, stream, root=root)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Send row d of `x`, (ranks, …), to rank d.

        The value is a new array, (contributors, …), by rank; with `out`, (ranks, …), its first rows, as in
        `all_gather`.
        """
        return self._start(AllToAll, x, out, on_loss, inputs, timeout, stream)

    def all_gather_v(
        self,
        x: Any,
        *,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Return a new array of all rows `x`, (rows, …), in rank order; `Result.rows` counts each one's."""
        return self._start(AllGatherV, x, None, on_loss, inputs, timeout, stream)

    def reduce_scatter_v(
        self,
        x: Any,
        rows: Sequence[int],
        *,
        out: Any = None,
        op: str = "sum",
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Reduce `x`, (sum(rows), …), over the contributors: rank r gets its `rows[r]` rows, in `out` or in a
        new array.

        rows: one number for each of `ranks` (see `reduce_scatter`), the same on all members. The rows of
        absent ranks are dropped.
        """
        return self._start(ReduceScatterV, x, out, on_loss, inputs, timeout, stream, rows=rows, op=op)

    def all_to_all_v(
        self,
        x: Any,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        *,
        out: Any = None,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Send `send_rows[d]` rows of `x` to rank d, and return a new array of the rows that came, by rank:
        `receive_rows[s]` of rank s; `Result.rows` has those of the contributors.

        Both have one number for each of `ranks` (see `reduce_scatter`). Rows addressed to an absent rank are
        dropped; none are received from it. "adopt" copies `x` into the arena, wherever it lies.
        out: (sum(receive_rows), …), whoever is there: its first rows are those that came, as in `all_gather`.
        """
        return self._start(
            AllToAllV,
            x,
            out,
            on_loss,
            inputs,
            timeout,
            stream,
            send_rows=send_rows,
            receive_rows=receive_rows,
        )

    def broadcast(
        self,
        x: Any,
        root: int,
        *,
        on_loss: str = "survivors",
        timeout: float | None = None,
        stream: Any = None,
    ) -> CalledT:
        """Copy `x` of rank `root` to every `x`; fails with `MembersLost` if the root died and none has it."""
        return self._start(Broadcast, x, None, on_loss, "preserve", timeout, stream, root=root)

    def barrier(self, *, on_loss: str = "survivors", timeout: float | None = None) -> CalledT:
        """Return once every contributor has called it."""
        return self._start(Barrier, None, None, on_loss, "preserve", timeout)
