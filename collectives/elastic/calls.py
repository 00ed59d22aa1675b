"""The calls of an elastic group, from being made to their results: one operation at a time, in order.

Arrays of devices land on the host when their operation's turn has come (`device.host_copy`): to what repairs
it, the operation is one of the host's arrays.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar, assert_never

import structlog

from zbmd.collectives.communicator.operations import timeout_ns
from zbmd.collectives.device.arrays import taken
from zbmd.collectives.device.host_copy import Landing, Landings, drained
from zbmd.collectives.elastic.operations import Result
from zbmd.collectives.elastic.subgroups import ElasticServices, ElasticSubgroups, GroupChannels, on_loss_of
from zbmd.collectives.errors import (
    Desynchronised,
    InputsOverwritten,
    MembersLost,
    NotReplaced,
    OperationAborted,
)
from zbmd.collectives.group.group import OPERATIONS_IN_FLIGHT_MAX
from zbmd.collectives.repair import events as rm
from zbmd.collectives.repair.adoption import Publication, RetainedMemory
from zbmd.collectives.repair.events import Inputs
from zbmd.collectives.repair.machine import RepairMachine
from zbmd.collectives.repair.operations_shared import (
    CallContext,
    ElasticOperation,
    PendingCaller,
    deliver_result,
)
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import LocalProtocolError, UserError, ZbmdError
from zbmd.transport.native._native import now_ns

log: Final = structlog.stdlib.get_logger("zbmd.collectives.elastic")
ResultT = TypeVar("ResultT")


class ElasticCalls(ElasticSubgroups):
    """An elastic group, as far as calls are taken. See `zbmd.collectives.elastic.group.ElasticGroup`."""

    def __init__(self, home: ElasticServices, place: GroupChannels) -> None:
        super().__init__(home, place)
        self._worker = home.worker
        self._machine = RepairMachine(rank=home.worker.rank)
        self._publication: Publication | None = None
        self._remains = RetainedMemory()
        self._landings = Landings(home.worker.segment)
        self._turn = asyncio.Lock()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._job: ElasticOperation | None = None
        self._end_ns = 0
        self._repairs = 0
        self._error: Exception | None = None
        self._closed = asyncio.Event()

    @abstractmethod
    async def _wait_for_follower(self, end_ns: int) -> None:
        """Until what nobody asked for is over."""

    @abstractmethod
    async def _drive(self, event: rm.RepairEvent) -> rm.RepairAction:
        """Feed the machine until it has an answer for the caller."""

    @abstractmethod
    async def _end(self) -> None:
        """Nothing can be repaired here, for `_error`."""

    @abstractmethod
    def _move_on(self) -> None:
        """Note that this process has done what the machine decided."""

    def _require_open(self) -> None:
        if self._closed.is_set() or self._error is not None:
            raise OperationAborted(f"{self!r} has ended: {self._error or 'it is closed'}")

    async def _start(
        self,
        kind: type[ElasticOperation],
        x: Any,
        out: Any,
        on_loss: str,
        inputs: str | None,
        timeout: float | None,
        stream: Any = None,
        **arguments: Any,
    ) -> Result:
        context = CallContext(
            arena=self._worker.segment.arena,
            rank=self._job_rank,
            ranks=self._ranks_max,
            row_of=self._row_of,
            on_loss=on_loss_of(on_loss),
            inputs=_inputs_of(inputs, kind, out),
        )
        if "root" in arguments:
            arguments["root"] = self._member("root", arguments["root"])

        def make(x: Any, out: Any) -> ElasticOperation:
            return kind(context, x, out, **arguments)

        x, out = taken(x, stream), taken(out, stream)
        self._require_open()
        landing, end_ns, awaiting = self._landings.of(x, out), now_ns() + timeout_ns(timeout), PendingCaller()
        if landing is None:
            work = self._perform(make(x, out), end_ns, awaiting)
        else:
            work = self._perform_landed(make, landing, end_ns, awaiting)
        return await self._shielded(work, awaiting)

    async def _shielded(
        self, work: Coroutine[Any, Any, ResultT], awaiting: PendingCaller | None = None
    ) -> ResultT:
        """A cancelled await leaves the operation running: it owns its arrays, and peers wait for its part.

        But what would be written behind it is not written any more.
        """
        if len(self._in_flight) >= OPERATIONS_IN_FLIGHT_MAX:
            work.close()
            raise LocalProtocolError(
                f"{OPERATIONS_IN_FLIGHT_MAX} operations are in flight on {self!r}: await some of them first"
            )
        task = asyncio.ensure_future(work)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if awaiting is not None and not awaiting.cancel():
                await asyncio.wait([task])  # it waits for nobody any more
            raise

    async def _perform(self, job: ElasticOperation, end_ns: int, awaiting: PendingCaller) -> Result:
        await self._wait_for_follower(end_ns)
        async with self._turn:
            self._require_open()
            return await self._carry(job, end_ns, awaiting)

    async def _perform_landed(
        self,
        make: Callable[[Any, Any], ElasticOperation],
        landing: Landing,
        end_ns: int,
        awaiting: PendingCaller,
    ) -> Result:
        await self._wait_for_follower(end_ns)
        async with self._turn:
            self._require_open()
            try:
                job = make(*await drained(landing.land))
                landing.require_writeable(job.value)
                done = await self._carry(job, end_ns, awaiting)
                if not awaiting.write():
                    return done
                value = await drained(lambda: landing.bring_home(done.value))
                return replace(done, value=value)
            except CudaFault as fault:  # peers would wait for this rank's part
                self._error = fault
                await self._end()
                raise
            finally:
                await drained(landing.end)

    async def _carry(self, job: ElasticOperation, end_ns: int, awaiting: PendingCaller) -> Result:
        """Bring an operation to its end, in its turn."""
        self._job, self._end_ns, self._repairs = job, end_ns, 0
        if job.published is not None:
            if self._publication is None:
                raise LocalProtocolError("the group has no publication")
            self._publication.publish(self._machine.sequence, job.published)
        try:
            end = await self._drive(rm.Called(call=job.call))
        finally:
            if self._publication is not None:
                self._publication.withdraw()
            self._remains.clear()
            self._job = None
        try:
            if isinstance(end, rm.Return):
                await deliver_result(job, awaiting)
            return self._result(job, end)
        finally:
            self._move_on()

    def _result(self, job: ElasticOperation, end: rm.RepairAction) -> Result:
        match end:
            case rm.Return(contributors=contributors):
                ranks = tuple(member.rank for member in contributors)
                if self._repairs:
                    log.warning(
                        "operation repaired", operation=job.call.text, how=self._machine.reason, of=ranks
                    )
                job.returned(ranks)
                return Result(
                    value=job.value,
                    contributors=ranks,
                    epoch=self.epoch,
                    repairs=self._repairs,
                    rows=job.rows,
                )
            case rm.Raise(failed=failed):
                raise self._error_of(job, failed)
            case _:
                raise LocalProtocolError(f"an operation ended with {end}")

    def _error_of(self, job: ElasticOperation, failed: rm.Failed) -> ZbmdError:
        what = f"{job.call.text} #{failed.sequence}: {failed.reason}"
        match failed.failure:
            case rm.Failure.LOST:
                return MembersLost(failed.ranks or (self._job_rank,), what)
            case rm.Failure.SPOILED:
                return InputsOverwritten(what)
            case rm.Failure.NO_REPLACEMENT:
                return NotReplaced(what)
            case rm.Failure.DESYNCHRONISED:
                return Desynchronised(what, {})
            case _:
                assert_never(failed.failure)


def _inputs_of(name: str | None, kind: type[ElasticOperation], out: Any) -> Inputs:
    """Return the mode of an operation's inputs; None: the default. Raises `UserError` if it has no such."""
    if name is None:
        return Inputs.RECOMPUTE if out is None else Inputs.PRESERVE
    try:
        mode = Inputs(name)
    except ValueError:
        raise UserError(f"inputs={name!r} is not one of {[mode.value for mode in Inputs]}") from None
    if mode is Inputs.RECOMPUTE and not kind.in_place:
        raise UserError(
            'inputs="recompute" is for operations in place, as all_reduce: say "preserve" or "adopt"'
        )
    if mode is Inputs.RECOMPUTE and out is not None:
        raise UserError('inputs="recompute" is for operations in place: leave out `out`')
    return mode
