"""Elastic groups: operations that those who live bring to one end when a member dies in them.

The driver of `zbmd.collectives.repair_machine`. A group is edited in place as views come: links and memory of
those who stay are kept, only the ends of an epoch (counters, descriptors) are made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, assert_never

import numpy as np
import structlog

from zbmd.actors.member import Node
from zbmd.actors.view import Member, View
from zbmd.collectives import repair_messages as rm
from zbmd.collectives.blocking import timeout_ns
from zbmd.collectives.capture_kinds import REPAIR, repair_config
from zbmd.collectives.commit_messages import MemberId
from zbmd.collectives.communicator import Communicator
from zbmd.collectives.elastic_operations import ElasticOperations, Result
from zbmd.collectives.errors import (
    CollectiveError,
    Desynchronised,
    InputsOverwritten,
    MembersLost,
    NotReplaced,
    OperationAborted,
)
from zbmd.collectives.group import OPERATIONS_IN_FLIGHT_MAX, Group, group_of
from zbmd.collectives.repair_adoption import Publication, read_published
from zbmd.collectives.repair_estate import Bequest, Estate
from zbmd.collectives.repair_jobs import Job
from zbmd.collectives.repair_machine import RepairMachine
from zbmd.collectives.repair_messages import Inputs, Outcome
from zbmd.collectives.repair_wire import decode_report, encode_report
from zbmd.transport._native import now_ns
from zbmd.transport.arena import Arena
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import LocalProtocolError, PeerLost, UserError, ZbmdError
from zbmd.transport.segment import PeerSegment

log: Final = structlog.stdlib.get_logger("zbmd.collectives.elastic")

CHANNELS_ELASTIC: Final = 8
"""Channels 0..7 are for groups; a repair of the group on channel c runs on c + 8."""
MEND: Final = CHANNELS_ELASTIC

_CUT = (PeerLost, OperationAborted)
"""How an operation ends that another member's end has cut short."""


@dataclass(frozen=True, slots=True)
class _Remains:
    """What is kept of a peer's memory while an operation that may adopt is under way."""

    arena: memoryview
    base: int
    record_at: int


class ElasticGroup(ElasticOperations):
    """The members of a job, through all of its views. Make it with `zbmd.elastic_group(node)`.

    Every rank makes the same calls in the same order. What an operation does when a member dies in it:

    on_loss: "survivors" (those who live finish it), "wait_for_replacement" (it is run again once every rank
    is back), "abort" (it fails on all who live, with `MembersLost`).
    inputs: "recompute" (in place; after a loss that has moved data it fails with `InputsOverwritten` on all),
    "preserve" (out of place: the inputs stay, so survivors can run it again), "adopt" (as preserve, and on
    one host what the dead rank had published still counts).

    Each operation ends alike on all who live, and raises `MembersLost`, `InputsOverwritten`, `NotReplaced` or
    `Desynchronised`, after which the group can be used on; or `DeadlineExceeded` and other errors of one
    rank, after which it cannot.
    """

    def __init__(self, node: Node, channel: int) -> None:
        if not 0 <= channel < CHANNELS_ELASTIC:
            raise UserError(f"channel={channel} is not in 0..{CHANNELS_ELASTIC - 1}")
        self.rank = node.rank
        self._node = node
        self._channel = channel
        machine = self._machine = RepairMachine(rank=node.rank)
        self._tap = Tap(node.recorder, REPAIR, f"elastic{channel}", machine, repair_config(machine))
        self._group: Group | None = None
        self._view = View(epoch=0, members=())
        self._coming: asyncio.Task[View] | None = None
        self._publication: Publication | None = None
        self._records: dict[MemberId, int] = {}
        self._remains: dict[MemberId, _Remains] = {}
        self._turn = asyncio.Lock()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._job: Job | None = None
        self._end_ns = 0
        self._repairs = 0
        self._error: Exception | None = None
        self._closed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ElasticGroup epoch {self.epoch}: rank {self.rank} of {list(self.members)}>"

    @property
    def epoch(self) -> int:
        """Of the view that the group is in."""
        return self._view.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks in it."""
        return self._view.ranks

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._view.members)

    @property
    def sequence(self) -> int:
        """The number of the next operation, the same on all. A replacement comes in with the others' number:
        what it has missed is `sequence - 1` operations."""
        return self._machine.sequence

    @property
    def group(self) -> Group:
        """The plain group of this epoch, for operations that end with it. It lasts until the next loss."""
        assert self._group is not None
        return self._group

    @property
    def _arena(self) -> Arena:
        return self._node.segment.arena

    async def refresh(self, *, timeout: float | None = None) -> int:
        """Enter the newest view that a member knows of, if it is newer than the group's; its epoch.

        So a group grows: a loss is noticed by itself, a member that comes is not. All members must call this.
        """
        newest = np.array([self._node.latest.epoch])
        found = await self.all_reduce(newest, op="max", inputs="preserve", timeout=timeout)
        if int(found.value[0]) > self.epoch:
            await self._shielded(self._follow(timeout))
        return self.epoch

    async def close(self) -> None:
        """Take part in nothing more, and give back memory and threads; idempotent."""
        self._closed.set()
        if self._group is not None:
            self._group.abort()
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        await self._forget_coming()
        if self._group is not None:
            await self._group.close()
        self._remains.clear()

    # ---- driving

    async def found(self, timeout: float | None) -> None:
        """Come in line with the other members, as one that knows nothing yet."""
        self._end_ns = now_ns() + timeout_ns(timeout)
        members = [Member(rank=self.rank, incarnation=self._node.incarnation, address="")]
        for peer in self._node.peers.values():
            members.append(Member(rank=peer.rank, incarnation=peer.incarnation, address=""))
        members.sort(key=lambda member: member.rank)
        view = View(epoch=self._node.epoch, members=tuple(members))
        await self._drive(self._entered(view))

    async def _follow(self, timeout: float | None) -> None:
        async with self._turn:
            self._end_ns, self._job = now_ns() + timeout_ns(timeout), None
            await self._drive(rm.FollowAsked())

    async def _do(self, make: Callable[[], Job], timeout: float | None) -> Result:
        if self._closed.is_set() or self._error is not None:
            raise OperationAborted(f"{self!r} has ended: {self._error or 'it is closed'}")
        job, end_ns = make(), now_ns() + timeout_ns(timeout)
        result: Result = await self._shielded(self._perform(job, end_ns))
        return result

    async def _shielded(self, work: Any) -> Any:
        """A cancelled await leaves the operation running: it owns its arrays, and peers wait for its part."""
        if len(self._in_flight) >= OPERATIONS_IN_FLIGHT_MAX:
            work.close()
            raise LocalProtocolError(
                f"{OPERATIONS_IN_FLIGHT_MAX} operations are in flight on {self!r}: await some of them first"
            )
        task = asyncio.ensure_future(work)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return await asyncio.shield(task)

    async def _perform(self, job: Job, end_ns: int) -> Result:
        async with self._turn:
            if self._closed.is_set() or self._error is not None:
                raise OperationAborted(f"{self!r} has ended: {self._error or 'it is closed'}")
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
            return self._result(job, end)

    def _result(self, job: Job, end: rm.RepairAction) -> Result:
        match end:
            case rm.Return(contributors=contributors):
                ranks = tuple(member.rank for member in contributors)
                if self._repairs:
                    log.warning(
                        "operation repaired", operation=job.call.text, how=self._machine.reason, of=ranks
                    )
                return Result(value=job.value, contributors=ranks, epoch=self.epoch, repairs=self._repairs)
            case rm.Raise(failed=failed):
                raise self._told(job, failed)
            case _:
                raise LocalProtocolError(f"an operation ended with {end}")

    def _told(self, job: Job, failed: rm.Failed) -> ZbmdError:
        what = f"{job.call.text} #{failed.sequence}: {failed.reason}"
        match failed.failure:
            case rm.Failure.LOST:
                return MembersLost(failed.ranks or (self.rank,), what)
            case rm.Failure.SPOILED:
                return InputsOverwritten(what)
            case rm.Failure.NO_REPLACEMENT:
                return NotReplaced(what)
            case rm.Failure.DESYNCHRONISED:
                return Desynchronised(what, {})
            case _:
                assert_never(failed.failure)

    async def _drive(self, event: rm.RepairEvent) -> rm.RepairAction:
        """Feed the machine until it has an answer for the caller."""
        while True:
            (action,) = self._tap.handle(event, now_ns=now_ns())
            self._tap.check_invariants()
            match action:
                case rm.Return() | rm.Raise() | rm.Settled():
                    return action
                case rm.GaveUp():
                    await self._end()
                    assert self._error is not None
                    raise self._error
                case rm.AwaitView(after=after):
                    event = await self._next_view(after)
                case rm.Exchange():
                    event = await self._exchange(action)
                case rm.Run() | rm.Rerun() | rm.CopyResult() | rm.Confirm():
                    event = await self._on_data_plane(action)
                case _:
                    assert_never(action)

    async def _end(self) -> None:
        """Nothing can be repaired here: those who wait for us must learn it."""
        if self._group is not None:
            await self._group.close()

    # ---- views

    async def _next_view(self, after: int) -> rm.RepairEvent:
        self._keep_remains()
        # A peer may not know of a loss that we know of, if it is a link that has ended: it would wait for us.
        self.group.communicator.give_up()
        task = self._coming or asyncio.ensure_future(self._node.view(after=after))
        self._coming = task
        left_s = max(0.0, (self._end_ns - now_ns()) / 1e9)
        if not self._node.segment.lost_mask():  # a member gave up by itself: there may be no other view
            left_s = min(left_s, self._node.deadlines.view_ns / 1e9)
        what = self._job.call.text if self._job else "the group"
        closing = asyncio.ensure_future(self._closed.wait())
        with self._node.progress.doing(f"repair of {what}: the next view after epoch {after}"):
            await asyncio.wait([task, closing], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not task.done():
            await self._forget_coming()
            reason = f"{what}: no view after epoch {after} came within {left_s:.1f} s"
            self._error = OperationAborted(f"{reason}; a member that is not dead has given up, or hangs")
            return rm.NoView()
        self._coming = None
        try:
            view = task.result()
        except ZbmdError as error:
            self._error = error
            return rm.NoView()
        self._repairs += 1
        if self._group is not None:
            await self._group.close()
        return self._entered(view)

    def _entered(self, view: View) -> rm.EpochEntered:
        self._view = view
        self._group = group_of(self._node, view, channel=self._channel)
        if self._publication is None:
            self._publication = Publication(self._node.segment.arena)
        members = tuple(MemberId(rank=m.rank, incarnation=m.incarnation) for m in view.members)
        gone = (*view.finished, *view.lost)
        readable = tuple(member for member in self._remains if self._read(member) is not None)
        return rm.EpochEntered(epoch=view.epoch, members=members, gone=gone, readable=readable)

    async def _forget_coming(self) -> None:
        task, self._coming = self._coming, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _exchange(self, action: rm.Exchange) -> rm.RepairEvent:
        """Exchange reports, unless another view comes first: a member may never come to this one."""
        group, epoch = self.group, action.epoch
        encoded = encode_report(action.report, self._publication.at if self._publication else 0)
        gathered = asyncio.wrap_future(
            group.submit(lambda c: c.all_gather(encoded, deadline_ns=self._end_ns))
        )
        if not self._node.alone:
            self._coming = asyncio.ensure_future(self._node.view(after=epoch))
        waited: set[asyncio.Future[Any]] = {gathered} if self._coming is None else {gathered, self._coming}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not gathered.done():
            group.abort()
            await asyncio.wait([gathered])
        try:
            rows = gathered.result()
        except _CUT:
            return rm.ExchangeCut(epoch=epoch)
        if self._coming is not None and not self._coming.done():
            await self._forget_coming()
        if self._coming is not None:
            return rm.ExchangeCut(epoch=epoch)
        reports: list[rm.Report] = []
        for member, row in zip(self._machine.members, rows, strict=True):
            report, self._records[member] = decode_report(row, member.rank)
            reports.append(report)
        return rm.Exchanged(epoch=epoch, reports=tuple(reports))

    # ---- what the dead have left

    def _keep_remains(self) -> None:
        """Keep the memory of the members of this epoch: who of them is dead will be known later."""
        if self._job is None or self._job.published is None:
            return
        for peer in self._node.peers.values():
            member = MemberId(rank=peer.rank, incarnation=peer.incarnation)
            memory = peer.memory
            if isinstance(memory, PeerSegment) and member not in self._remains and self._records.get(member):
                arena = memory.arena_view(memory.arena_offset, memory.nbytes - memory.arena_offset)
                self._remains[member] = _Remains(arena, memory.arena_offset, self._records[member])

    def _read(self, member: MemberId) -> memoryview | None:
        """What a dead member published for the operation under way."""
        remains, job = self._remains.get(member), self._job
        if remains is None or job is None or job.published is None or member in self._living():
            return None
        return read_published(
            remains.arena,
            remains.base,
            remains.record_at,
            self._machine.sequence,
            job.published.nbytes,
        )

    def _left(self, adoption: rm.Adoption) -> Bequest:
        """What is brought in of a dead member, with its memory where this rank is to bring it."""
        memory = self._read(adoption.member) if adoption.carrier == self.rank else None
        if memory is None and adoption.carrier == self.rank:
            raise CollectiveError(f"what {adoption.member} has left could be read, and has gone")
        return Bequest(adoption.member, adoption.carrier, memory)

    def _living(self) -> set[MemberId]:
        return {MemberId(rank=m.rank, incarnation=m.incarnation) for m in self._view.members}

    # ---- the data plane

    async def _on_data_plane(self, action: rm.Run | rm.Rerun | rm.CopyResult | rm.Confirm) -> rm.RepairEvent:
        mend = None if isinstance(action, rm.Run | rm.Confirm) else self._mender(action)
        outcome = await self.group.run(lambda c: self._carry_out(c, action, mend))
        return rm.Ended(epoch=action.epoch, outcome=outcome)

    def _mender(self, action: rm.Rerun | rm.CopyResult) -> Communicator:
        """The communicator of those who run it again, or copy."""
        ranks = action.runners if isinstance(action, rm.Rerun) else (action.source, *action.to)
        members = tuple(sorted(ranks))
        return Communicator(
            segment=self._node.segment,
            peers={rank: self._node.peers[rank].memory for rank in members if rank != self.rank},
            members=members,
            rank=self.rank,
            epoch=action.epoch,
            channel=self._channel + MEND,
        )

    def _carry_out(
        self,
        c: Communicator,
        action: rm.Run | rm.Rerun | rm.CopyResult | rm.Confirm,
        mend: Communicator | None,
    ) -> Outcome:
        """On the data-plane thread: bring the result about, then commit it."""
        worker = c if mend is None else mend
        since = worker.sequence
        holds = isinstance(action, rm.Confirm)
        try:
            self._bring_about(worker, action)
            holds = True
            c.barrier(deadline_ns=self._end_ns)
        except _CUT:
            if holds:
                return Outcome.HELD
            job = self._job
            in_place = job is not None and job.call.inputs is Inputs.RECOMPUTE
            return Outcome.SPOILED if in_place and worker.has_moved(since) else Outcome.INTACT
        except (ZbmdError, ValueError) as error:
            self._error = error
            return Outcome.BROKEN
        finally:
            if mend is not None:
                mend.close()
        return Outcome.COMMITTED

    def _bring_about(self, c: Communicator, action: rm.Run | rm.Rerun | rm.CopyResult | rm.Confirm) -> None:
        job, end_ns = self._job, self._end_ns
        if isinstance(action, rm.Confirm):
            return
        if job is None:
            raise LocalProtocolError(f"{action} without an operation")
        match action:
            case rm.Run():
                job.run(c, end_ns)
            case rm.CopyResult(source=source):
                job.copy(c, source, len(self._machine.contributors), end_ns)
            case rm.Rerun(adopted=()):
                job.run(c, end_ns)
            case rm.Rerun(adopted=adopted):
                bequests = tuple(self._left(a) for a in adopted)
                job.adopt(c, Estate(bequests, self._machine.contributors), end_ns)


async def elastic_group(node: Node, *, channel: int = 0, timeout: float | None = None) -> ElasticGroup:
    """The elastic group of the job that `node` has joined; returns once this rank is in line with the others.

    A replacement comes in while they are in the midst of an operation, and takes part from the next one on.
    timeout: seconds, as of an operation. channel: 0..7, another for each elastic group of a process; plain
    groups beside it take others, and not those plus 8.
    """
    made = ElasticGroup(node, channel)
    try:
        await made.found(timeout)
    except BaseException:
        await made.close()
        raise
    return made
