"""The operations of an elastic group, as its callers see them. See `zbmd.collectives.elastic.group`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbmd.collectives.device.arrays import CallersArray, given_back, taken
from zbmd.collectives.device.host_copy import taken_all
from zbmd.collectives.repair.events import Inputs, OnLoss
from zbmd.collectives.repair.operations_per_rank import AllToAll, Gather, Reduce, ReduceScatter, Scatter
from zbmd.collectives.repair.operations_shared import (
    AllGather,
    AllReduce,
    AllReduceMany,
    Barrier,
    Broadcast,
    ElasticOperation,
)
from zbmd.collectives.repair.operations_uneven import AllGatherV, AllToAllV, ReduceScatterV
from zbmd.transport.errors import UserError
from zbmd.transport.memory.arena import Arena


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


class ElasticOperations(ABC):
    """What an elastic group offers. `on_loss` and `inputs` as in `ElasticGroup`, timeouts in seconds.

    Arrays may lie on a device (`device.host_copy`), `x` and `out` each where it likes; what `stream` was
    asked before the call comes before the operation. A result without `out` is a new array where `x` lies.

    A `root` is a rank of the group: one of the job, or, in a sub-group, an index of its `ranks`.
    """

    rank: int
    """This one's, in the group."""
    _job_rank: int

    @abstractmethod
    def _member(self, name: str, rank: int) -> int:
        """Return the job's rank of a rank of the group. Raises `UserError`, which names the argument."""

    @property
    @abstractmethod
    def _arena(self) -> Arena:
        """Where what may be adopted is published."""

    @abstractmethod
    def _row_of(self, rank: int) -> int:
        """Which row of what is given by rank is for this one."""

    @property
    @abstractmethod
    def _ranks_max(self) -> int:
        """How many ranks may be members, there or not: so many rows has what is given by rank."""

    @abstractmethod
    async def _do(
        self,
        make: Callable[[Any, Any], ElasticOperation],
        timeout: float | None,
        x: Any = None,
        out: Any = None,
    ) -> Result:
        """Bring the operation to its end that `make` gives of `x` and `out`, which lie on the host then.

        x, out: as `taken` gives them; `x` may be a list.
        """

    async def all_reduce(
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
    ) -> Result:
        """Reduce `x` over the contributors. `inputs`: by default "preserve" with `out`, else "recompute".

        With "preserve" or "adopt" and no `out` the result is a new array. "adopt" reads `x` in the arena
        (`zbmd.empty`), and copies one that lies elsewhere there first.
        """
        mode = _inputs(inputs, in_place=out is None)
        if mode is Inputs.RECOMPUTE and out is not None:
            raise UserError('inputs="recompute" is for operations in place: leave out `out`')
        return await self._do(
            lambda x, out: AllReduce(self._arena, x, out, op, on_loss_of(on_loss), mode, algorithm),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def all_reduce_many(
        self,
        arrays: Sequence[Any],
        *,
        op: str = "sum",
        on_loss: str = "survivors",
        inputs: str = "recompute",
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """`all_reduce` of every array in one operation; small ones travel together (`coalescing`).

        All members give arrays of the same dtypes and sizes in the same order. In place, and the value is
        `arrays`; with "preserve" or "adopt" it is a list of new ones. "adopt" copies them into the arena.
        """
        mode = _inputs(inputs, in_place=True)
        done = await self._do(
            lambda given, _: AllReduceMany(self._arena, given, op, on_loss_of(on_loss), mode, algorithm),
            timeout,
            taken_all(arrays, stream),
        )
        if mode is not Inputs.RECOMPUTE:
            return done
        by_thread = any(isinstance(x, CallersArray) for x in arrays)  # see `ElasticBlocking`
        return replace(done, value=[given_back(x) for x in arrays] if by_thread else arrays)

    async def reduce(
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
    ) -> Result:
        """Reduce `x` over the contributors at rank `root`, in `out` or in a new array; elsewhere the value is
        None, and `out` is not used.

        out: like `x`. It is written once the operation is over; after an error it is as it was. So `x`
        may be it, or lie in it. Fails with `MembersLost` if the root died in it.
        """
        mode, member = _kept(inputs), self._member("root", root)
        return await self._do(
            lambda x, out: Reduce(self._arena, x, member, out, op, on_loss_of(on_loss), mode, self._job_rank),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def reduce_scatter(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str = "sum",
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """Reduce `x`, (ranks, …), over the contributors: rank r gets row r in `out`, (…).

        Here and below, `ranks` are those of the job, or, of a sub-group, the r-th of its `ranks` has row r.

        The rows of ranks that are not there are given to nobody. Without `out` the result is a new array.
        """
        mode = _kept(inputs)
        return await self._do(
            lambda x, out: ReduceScatter(
                self._arena, x, out, op, on_loss_of(on_loss), mode, self._row_of, self._job_rank
            ),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """A new array, (contributors, *x.shape): each one's `x`, in rank order.

        out: (ranks, *x.shape), with a row for each rank (see `reduce_scatter`), there or not, so that it
        always fits; `UserError`, before anything has moved, if it does not. The contributors' rows are its
        first ones, in rank order, and the value is those, a view of it; the rows behind stay as they are. It
        is written once the operation is over; after an error it is as it was. So `x` may lie in it.
        """
        mode = _kept(inputs)
        return await self._do(
            lambda x, out: AllGather(self._arena, x, on_loss_of(on_loss), mode, out, self._ranks_max),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def gather(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """As `all_gather`, at rank `root` alone; elsewhere the value is None, and `out` is not used.

        Fails with `MembersLost` if the root died in it.
        """
        mode, member = _kept(inputs), self._member("root", root)
        return await self._do(
            lambda x, out: Gather(
                self._arena, x, member, out, on_loss_of(on_loss), mode, self._ranks_max, self._job_rank
            ),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def scatter(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """Rank r gets row r of the `x`, (ranks, …), of rank `root` in `out`, (…).

        The root may leave out `out`; the others pass None for `x`. Fails with `MembersLost` if the root died
        before all had their rows.
        """
        member = self._member("root", root)
        return await self._do(
            lambda x, out: Scatter(x, out, member, on_loss_of(on_loss), self._row_of, self._job_rank),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """Row d of `x`, (ranks, …), goes to rank d. A new array, (contributors, …), by rank; with `out`,
        (ranks, …), its first rows, as in `all_gather`.
        """
        mode = _kept(inputs)
        return await self._do(
            lambda x, out: AllToAll(
                self._arena, x, out, on_loss_of(on_loss), mode, self._row_of, self._ranks_max, self._job_rank
            ),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def all_gather_v(
        self,
        x: Any,
        *,
        on_loss: str = "survivors",
        inputs: str = "preserve",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """A new array of each contributor's rows `x`, (rows, …), in rank order; `Result.rows` counts them."""
        mode = _kept(inputs)
        return await self._do(
            lambda x, _: AllGatherV(self._arena, x, on_loss_of(on_loss), mode), timeout, taken(x, stream)
        )

    async def reduce_scatter_v(
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
    ) -> Result:
        """Reduce `x`, (sum(rows), …), over the contributors: rank r gets its `rows[r]` rows, in `out` or in a
        new array.

        rows: one number for each of `ranks` (see `reduce_scatter`), the same on all members. The rows of
        ranks that are not there are given to nobody.
        """
        mode = _kept(inputs)
        return await self._do(
            lambda x, out: ReduceScatterV(
                self._arena, x, rows, out, op, on_loss_of(on_loss), mode, self._row_of, self._job_rank
            ),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def all_to_all_v(
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
    ) -> Result:
        """Send `send_rows[d]` rows of `x` to rank d: a new array of the rows that came, by rank, of rank s
        `receive_rows[s]`; `Result.rows` has those of the contributors.

        Both have one number for each of `ranks` (see `reduce_scatter`). Rows for ranks that are not there go
        to nobody, and of them come none. "adopt" copies `x` into the arena, wherever it lies.
        out: (sum(receive_rows), …), whoever is there: its first rows are those that came, as in `all_gather`.
        """
        mode = _kept(inputs)
        return await self._do(
            lambda x, out: AllToAllV(
                self._arena,
                x,
                send_rows,
                receive_rows,
                out,
                on_loss_of(on_loss),
                mode,
                self._row_of,
                self._job_rank,
            ),
            timeout,
            taken(x, stream),
            taken(out, stream),
        )

    async def broadcast(
        self,
        x: Any,
        root: int,
        *,
        on_loss: str = "survivors",
        timeout: float | None = None,
        stream: Any = None,
    ) -> Result:
        """Every `x` becomes that of rank `root`; fails with `MembersLost` if that died and nobody has it."""
        member = self._member("root", root)
        return await self._do(
            lambda x, _: Broadcast(x, member, on_loss_of(on_loss)), timeout, taken(x, stream)
        )

    async def barrier(self, *, on_loss: str = "survivors", timeout: float | None = None) -> Result:
        """Return once every contributor has called it."""
        return await self._do(lambda *_: Barrier(on_loss_of(on_loss)), timeout)


def on_loss_of(name: str) -> OnLoss:
    """The mode of this name. Raises `UserError` if there is none."""
    try:
        return OnLoss(name)
    except ValueError:
        raise UserError(f"on_loss={name!r} is not one of {[mode.value for mode in OnLoss]}") from None


def _inputs(name: str | None, *, in_place: bool) -> Inputs:
    if name is None:
        return Inputs.RECOMPUTE if in_place else Inputs.PRESERVE
    try:
        return Inputs(name)
    except ValueError:
        raise UserError(f"inputs={name!r} is not one of {[mode.value for mode in Inputs]}") from None


def _kept(name: str) -> Inputs:
    """Of an operation that is never in place."""
    mode = _inputs(name, in_place=False)
    if mode is Inputs.RECOMPUTE:
        raise UserError(
            'inputs="recompute" is for operations in place, as all_reduce: say "preserve" or "adopt"'
        )
    return mode
