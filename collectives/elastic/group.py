"""Elastic groups: operations that those who live bring to one end when a member dies in them.

The driver of `zbmd.collectives.repair.machine`. A group is edited in place as views come: links and memory of
those who stay are kept, only what belongs to an epoch (counters, descriptors) is made again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, assert_never

import numpy as np
import structlog

from zbmd.actors.rank.member import Worker
from zbmd.actors.view import MemberId, View
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.group_trials import NOT_TRIED, Reading
from zbmd.collectives.communicator.operations import timeout_ns
from zbmd.collectives.device.arrays import taken
from zbmd.collectives.elastic.calls import ElasticCalls
from zbmd.collectives.elastic.operations import ElasticOperations, Result
from zbmd.collectives.elastic.subgroups import ElasticServices, GroupChannels, open_asks
from zbmd.collectives.elastic.views import views_of
from zbmd.collectives.errors import (
    CollectiveError,
    OperationAborted,
)
from zbmd.collectives.group.group import Group, hosts_of, make_group
from zbmd.collectives.group.subgroup_driver import open_subgroups
from zbmd.collectives.p2p.actor import tagged_groups
from zbmd.collectives.p2p.on_loop import OnLoop
from zbmd.collectives.programs.channels import SUBGROUP_CHANNEL_FIRST, Agreed
from zbmd.collectives.repair import events as rm
from zbmd.collectives.repair.adoption import AdoptedInput, AdoptedInputs, Publication
from zbmd.collectives.repair.events import Inputs, Outcome
from zbmd.collectives.repair.machine import REPAIR, RepairState, repair_config
from zbmd.collectives.repair.operations_shared import ElasticOperation
from zbmd.collectives.repair.splits import Split
from zbmd.collectives.repair.wire import ExchangedReport, MeasuredModel, decode_report, encode_report, pinned
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.patience import PATIENCE
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, UserError, ZbmdError
from zbmd.transport.native._native import now_ns


class Met(NamedTuple):
    """The members' agreement on a view: their reports in order, the cost model, who reads whom."""

    reports: list[ExchangedReport]
    measured: MeasuredModel | None
    reading: Reading


def meet(c: Communicator, mine: ExchangedReport, known: Reading, *, ranks: int, deadline_ns: int) -> Met:
    """Exchange the reports of a view's members before its first operation; on the data-plane thread of all.

    `known`: the trial of reading whose number is in `mine`. `ranks`: of the job. Raises as an all-gather, and
    `RemoteProtocolError`.
    """
    rows = c.all_gather(encode_report(mine, ranks=ranks), deadline_ns=deadline_ns)
    reports = [decode_report(row, rank) for rank, row in zip(c.members, rows, strict=True)]
    # Members that have tried it together need not try again, whoever is lost: a repair is no time for it.
    if known.number and all(one.reading == known.number for one in reports):
        c.read_peers(known)
    else:
        c.try_reading(deadline_ns=deadline_ns)
    return Met(reports, pinned(c, (one.measured for one in reports), deadline_ns), c.reading)


P = ParamSpec("P")
T = TypeVar("T")
log: Final = structlog.stdlib.get_logger("zbmd.collectives.elastic")

CHANNELS_ELASTIC: Final = SUBGROUP_CHANNEL_FIRST
"""Channels below it are for groups of all ranks; a repair of the one on channel c runs on c + 8."""

_CUT = (PeerLost, OperationAborted)
"""The errors of an operation that the end of another member has cut short."""


class ElasticGroup(ElasticCalls):
    """The members of a job, or some ranks of it, through all of its views.

    Ranks in its calls are ranks of the group, and so is `rank`: those of the job, or, in a sub-group, indices
    of its `ranks`. `ranks`, `members` and `Result.contributors` are ranks of the job.

    Make it with `zbmd.elastic_group(worker)`, and groups of some ranks with its `split` or `subgroup`.

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

    def __init__(
        self, home: ElasticServices, place: GroupChannels, on_close: Callable[[ElasticGroup], None]
    ) -> None:
        super().__init__(home, place)
        worker, machine = home.worker, self._machine
        self._on_close = on_close
        self._tap = Tap(worker.recorder, REPAIR, f"elastic{place.channel}", machine, repair_config(machine))
        self._group: Group | None = None
        self._view = View(epoch=0, members=())
        self._mend: Communicator | None = None
        self._measured: MeasuredModel | None = None
        self._reading = NOT_TRIED
        self._follower: asyncio.Task[None] | None = None
        """Comes to a view that nobody has asked for here."""
        self._due = 0
        self._elders: tuple[int, ...] = ()
        """The ranks that were in the group before this process."""
        self._reached = 0
        """All operations below it are over here."""
        self._moved = asyncio.Event()
        self.blocking: Final = ElasticBlocking(self, self._tagged.on_loop)
        """Its calls for threads that may wait."""
        self._number = home.views.register(self)
        self._stay = worker.on_leave(self.close)
        home.asks.add((place.channel, place.base), self)

    def __repr__(self) -> str:
        return f"<ElasticGroup epoch {self.epoch}: rank {self._job_rank} of {list(self.members)}>"

    @property
    def epoch(self) -> int:
        """Of the view that the group is in."""
        return self._view.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks in it."""
        return tuple(member.rank for member in self._machine.members)

    @property
    def _present(self) -> tuple[MemberId, ...]:
        return self._machine.members

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self._machine.members)

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

    async def refresh(self, *, timeout: float | None = None) -> int:
        """Enter the newest view that a member knows of, if it is newer than the group's; its epoch.

        So a group grows: a loss is noticed by itself, a member that comes is not. All members must call this.
        """
        newest = np.array([self._worker.latest.epoch])
        found = await self.all_reduce(newest, op="max", inputs="preserve", timeout=timeout)
        if int(found.value[0]) > self.epoch:
            await self._shielded(self._follow(int(found.value[0]), timeout))
        return self.epoch

    async def close(self) -> None:
        """Take part in nothing more, and give back memory and threads; idempotent."""
        self._closed.set()
        if self._group is not None:
            self._group.abort()
        self._moved.set()
        if self._follower is not None:
            await asyncio.wait([self._follower])
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._group is not None:
            await self._group.close()
        await self._tagged.close()
        self._landings.close()
        self._remains.clear()
        self._home.views.closed(self._number)
        self._home.asks.remove((self._place.channel, self._place.base))
        self._stay()
        on_close, self._on_close = self._on_close, lambda _: None
        on_close(self)

    # ---- driving

    async def found(self, timeout: float | None) -> None:
        """Come in line with the other members, as one that knows nothing yet."""
        async with self._turn:
            self._end_ns = now_ns() + timeout_ns(timeout)
            await self._drive(self._entered())
            self._move_on()
        if self._elders:
            await self._learn(now_ns() + timeout_ns(timeout))

    async def _learn(self, end_ns: int) -> None:
        """Hear from those who were here before how the group was split.

        They say so once they are where this process is; if a further loss is in between, that takes us too.
        """
        key, views = (self._place.channel, self._place.base), self._home.views
        asked = self._home.asks.ask(key, self._machine.sequence, self._elders, end_ns)
        asking = asyncio.ensure_future(asked)
        while not asking.done():
            newer = asyncio.ensure_future(views.after(max(self.epoch, self._due)))
            await asyncio.wait([asking, newer], return_when=asyncio.FIRST_COMPLETED)
            if newer.done() and newer.exception() is None:
                self.follow(newer.result().epoch)
            elif newer.done():
                await asyncio.wait([asking])  # there are no more views: the caller's time bounds this
            newer.cancel()
        self._ledger.learn(asking.result(), self._job_rank)

    async def splits_before(self, sequence: int) -> tuple[Split, ...]:
        """See `zbmd.collectives.elastic.subgroups.Elder`. Raises `OperationAborted` once the group
        has ended."""
        while self._reached < sequence or self._ledger.unknown:
            if self._ledger.unknown:
                raise OperationAborted(self._ledger.unknown)
            if self._closed.is_set() or self._error is not None:
                raise OperationAborted(f"{self!r} has ended: {self._error or 'it is closed'}")
            self._moved.clear()
            await self._moved.wait()
        return tuple(self._ledger.splits)

    def _move_on(self) -> None:
        """Note that this process has done what the machine decided."""
        self._reached = self._machine.sequence
        self._moved.set()

    def follow(self, epoch: int) -> None:
        """Come to the view of `epoch` once what is under way has ended, if that has not led there."""
        self._due = max(epoch, self._due)
        if self._follower is None:
            self._follower = asyncio.ensure_future(self._follow_due())

    async def _follow_due(self) -> None:
        try:
            async with self._turn:
                idle = self._machine.state is RepairState.IDLE and not self._closed.is_set()
                if self._error is None and idle and self.epoch < self._due:
                    await self._come(None)
        except ZbmdError as error:
            self._error = self._error or error
            self._moved.set()
            log.warning("a view could not be followed", group=repr(self), reason=str(error))
        finally:
            self._follower = None

    async def _wait_for_follower(self, end_ns: int) -> None:
        """Until what nobody asked for is over, but no longer than a call may take."""
        follower = self._follower
        if follower is None:
            return
        left_s = max(0.0, PATIENCE.left_ns(end_ns) / 1e9)
        await asyncio.wait([follower], timeout=left_s)
        if not follower.done():
            late = f"not all members of {self!r} came to the view of epoch {self._due} in time"
            self._error = DeadlineExceeded(late)
            self.group.abort()
            raise self._error

    async def _follow(self, epoch: int, timeout: float | None) -> None:
        async with self._turn:
            if self.epoch >= epoch:
                return  # what had to follow anyway had the turn before
            await self._come(timeout)

    async def _come(self, timeout: float | None) -> None:
        """To the next view; in this group's turn, with nothing under way."""
        self._end_ns, self._job = now_ns() + timeout_ns(timeout), None
        await self._drive(rm.FollowAsked())
        self._move_on()

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
        self._moved.set()
        self._tagged.end(OperationAborted(f"{self!r} has ended: {self._error}"))
        if self._group is not None:
            await self._group.close()

    # ---- views

    async def cut(self) -> None:
        """End what is under way, for a view without one of the members; return once it has drained."""
        self.look()
        group, mend = self._group, self._mend
        if group is None:
            return
        self._keep_remains()
        group.abort()
        if mend is not None:
            mend.abort()
        with contextlib.suppress(OperationAborted):  # it is closed, which drains it as well
            await group.run(lambda c: c.give_up())

    async def _next_view(self, after: int) -> rm.RepairEvent:
        self._keep_remains()
        # A peer may not know of a loss that we know of, if it is a link that has ended: it would wait for us.
        self.group.communicator.give_up()
        left_s = max(0.0, PATIENCE.left_ns(self._end_ns) / 1e9)
        if not self._lost():  # a member gave up by itself: there may be no other view
            left_s = min(left_s, self._worker.deadlines.view_ns / 1e9)
        what = self._job.call.text if self._job else "the group"
        coming = asyncio.ensure_future(self._home.views.after(after))
        closing = asyncio.ensure_future(self._closed.wait())
        with self._worker.progress.doing(f"repair of {what}: the next view after epoch {after}"):
            await asyncio.wait([coming, closing], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not coming.done():
            coming.cancel()
            reason = f"{what}: no view after epoch {after} came within {left_s:.1f} s"
            self._error = OperationAborted(f"{reason}; a member that is not dead has given up, or hangs")
            return rm.NoView()
        try:
            coming.result()
        except ZbmdError as error:
            self._error = error
            return rm.NoView()
        self._repairs += 1
        if self._group is not None:
            await self._group.close()
        return self._entered()

    def _lost(self) -> bool:
        """Whether a member of the group is marked as lost."""
        mask = self._worker.segment.lost_mask()
        return any(mask >> rank & 1 for rank in self.members)

    def _entered(self) -> rm.EpochEntered:
        """Go to the view that the process has entered last."""
        view, place = self._home.views.view, self._place
        belong = [m for m in view.members if not place.ranks or m.rank in place.ranks]
        self._view = view
        self._group = make_group(
            self._worker,
            view,
            members=tuple(m.rank for m in belong),
            agreed=Agreed(channel=place.channel, stamp=place.base + view.epoch),
        )
        if self._publication is None:
            self._publication = Publication(self._worker.segment.arena)
        members = tuple(m.id for m in belong)
        gone = (*view.finished, *view.lost)
        readable = tuple(member for member in self._remains.of if self._read(member) is not None)
        self._home.views.entered(self._number, members, place.ranks)
        return rm.EpochEntered(epoch=view.epoch, members=members, gone=gone, readable=readable)

    async def _exchange(self, action: rm.Exchange) -> rm.RepairEvent:
        """Exchange reports. A view without a member cuts it, and so does a member that is in a later one."""
        record_at = self._publication.at if self._publication else 0
        mine = ExchangedReport(
            report=action.report,
            record_at=record_at,
            measured=self._measured,
            reading=self._reading.number,
        )
        known, ranks, end_ns = self._reading, self._home.worker.world_size, self._end_ns
        try:
            met = await self.group.run(lambda c: meet(c, mine, known, ranks=ranks, deadline_ns=end_ns))
        except _CUT:
            return rm.ExchangeCut(epoch=action.epoch)
        except ZbmdError as error:
            self._error = error
            await self._end()
            raise
        everyone, self._measured, self._reading = met
        reports = [one.report for one in everyone]
        for member, one in zip(self._machine.members, everyone, strict=True):
            self._remains.records[member] = one.record_at
        self._tagged.settled(action.epoch, self._machine.members)
        if not action.report.born:
            pairs = zip(self.members, reports, strict=True)
            self._elders = tuple(rank for rank, report in pairs if report.born)
        return rm.Exchanged(epoch=action.epoch, reports=tuple(reports))

    async def _opened(
        self, place: GroupChannels, on_close: Callable[[ElasticGroup], None], timeout: float
    ) -> ElasticGroup:
        made = ElasticGroup(self._home, place, on_close)
        made._measured, made._reading = self._measured, self._reading
        return await _founded(made, timeout)

    # ---- what the dead have left

    def _keep_remains(self) -> None:
        """Keep the memory of the members of this epoch: who of them is dead will be known later."""
        if self._job is not None and self._job.published is not None:
            self._remains.keep(self._machine.members, self._worker.peers)

    def _read(self, member: MemberId) -> memoryview | None:
        """Return the input that a dead member published for the operation under way."""
        job, successor = self._job, self._view.member(member.rank)
        if (
            job is None
            or job.published is None
            or (successor and successor.incarnation == member.incarnation)
        ):
            return None
        left = self._remains.read(member, self._machine.sequence)
        return left if left is not None and job.adoptable(left) else None

    def _left(self, adoption: rm.Adoption) -> AdoptedInput:
        """Return the input of a dead member, with its memory if this rank carries it."""
        memory = self._read(adoption.member) if adoption.carrier == self._job_rank else None
        if memory is None and adoption.carrier == self._job_rank:
            raise CollectiveError(f"what {adoption.member} has left could be read, and has gone")
        return AdoptedInput(adoption.member, adoption.carrier, memory)

    # ---- the data plane

    async def _on_data_plane(self, action: rm.Run | rm.Rerun | rm.CopyResult | rm.Confirm) -> rm.RepairEvent:
        mend = self._mend = None if isinstance(action, rm.Run | rm.Confirm) else self._mender(action)
        outcome = await self.group.run(lambda c: self._carry_out(c, action, mend))
        self._mend = None
        return rm.Ended(epoch=action.epoch, outcome=outcome)

    def _mender(self, action: rm.Rerun | rm.CopyResult) -> Communicator:
        """The communicator of those who run it again, or copy."""
        ranks = action.runners if isinstance(action, rm.Rerun) else (action.source, *action.to)
        members = tuple(sorted(ranks))
        made = Communicator(
            segment=self._worker.segment,
            peers={rank: self._worker.peers[rank].memory for rank in members if rank != self._job_rank},
            members=members,
            rank=self._job_rank,
            epoch=self._place.base + action.epoch,
            channel=self._place.mend,
            hosts=hosts_of(self._view, members),
        )
        made.read_peers(self._reading)
        if self._measured is not None and self._measured.fits(made.hosts):
            made.model = self._measured.model
        return made

    def _carry_out(
        self,
        c: Communicator,
        action: rm.Run | rm.Rerun | rm.CopyResult | rm.Confirm,
        mend: Communicator | None,
    ) -> Outcome:
        """On the data-plane thread: bring the result about, then commit it."""
        acting = c if mend is None else mend
        since = acting.sequence
        holds = isinstance(action, rm.Confirm)
        try:
            self._bring_about(acting, action)
            holds = True
            c.barrier(deadline_ns=self._end_ns)
        except _CUT:
            if holds:
                return Outcome.HELD
            job = self._job
            in_place = job is not None and job.call.inputs is Inputs.RECOMPUTE
            return Outcome.SPOILED if in_place and acting.has_moved(since) else Outcome.INTACT
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
                job.adopt(c, AdoptedInputs(bequests, self._machine.contributors), end_ns)


class ElasticBlocking(ElasticOperations[Result]):
    """`group.blocking`: the calls of `ElasticGroup` with the same arguments, results and errors.

    For any thread but the loop's, which must go on meanwhile; there they raise `LocalProtocolError`. They
    raise `OperationAborted` if the loop ends first.

    One thread's calls keep their order. Those of several threads, or of coroutines beside them, have no order
    among each other: who calls operations from more than one has all ranks make them in the same.
    """

    def __init__(self, group: ElasticGroup, on_loop: OnLoop) -> None:
        self.on_loop = on_loop
        self._group = group
        self.refresh = self._waiting(group.refresh)
        self.split = self._waiting(group.split)
        self.subgroup = self._waiting(group.subgroup)
        self.send = self._waiting(group.send)
        self.recv = self._waiting(group.recv)

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
    ) -> Result:
        x, out = taken(x, stream), taken(out, stream)
        call = partial(self._group._start, kind, x, out, on_loss, inputs, timeout, stream, **arguments)
        return self.on_loop.wait_for(call)

    def _waiting(self, call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        """Return `call`, begun on the loop, and waited for on the calling thread, which takes its arrays."""
        begin: Callable[..., Coroutine[Any, Any, T]] = call

        @wraps(call)
        def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
            stream: Any = kwargs.get("stream")
            given = [taken(x, stream) for x in args]
            named = {name: taken(x, stream) for name, x in kwargs.items()}
            return self.on_loop.wait_for(partial(begin, *given, **named))

        return blocking


async def elastic_group(worker: Worker, *, channel: int = 0, timeout: float | None = None) -> ElasticGroup:
    """Return the elastic group of the job that `worker` joined, once this rank is in line with the others.

    A replacement comes in while they are in the midst of an operation, and takes part from the next one on.
    timeout: seconds, as of an operation. channel: 0..7, another for each elastic group of all ranks; plain
    groups beside it take others. Raises `LocalProtocolError` if that is in use.
    """
    if not 0 <= channel < CHANNELS_ELASTIC:
        raise UserError(f"channel={channel} is not in 0..{CHANNELS_ELASTIC - 1}")
    subgroups = await open_subgroups(worker)
    home = ElasticServices(
        worker, views_of(worker), await open_asks(worker), subgroups, await tagged_groups(worker)
    )
    mend = channel + CHANNELS_ELASTIC
    subgroups.channels.reserve(mend)

    def closed(group: ElasticGroup) -> None:
        subgroups.channels.give_back(mend, lambda: True, last=group.epoch)

    return await _founded(ElasticGroup(home, GroupChannels(channel=channel, mend=mend), closed), timeout)


async def _founded(made: ElasticGroup, timeout: float | None) -> ElasticGroup:
    try:
        await made.found(timeout)
    except BaseException:
        await made.close()
        raise
    return made
