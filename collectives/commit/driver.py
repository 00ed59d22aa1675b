"""Drive the step-commit machine: messages, views, and the compute thread that runs a `Workload`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar, assert_never

import structlog

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import sender_process
from zbmd.actors.errors import ActorError
from zbmd.actors.rank.member import Worker
from zbmd.actors.view import MemberId, View, rank_of
from zbmd.collectives.commit import events as cm
from zbmd.collectives.commit.machine import STEP_COMMIT, StepCommit, commit_config
from zbmd.collectives.commit.wire import Finish, GaveUp, Message, Report, SendAction, Vote, from_wire, to_wire
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.flight_dump import FLIGHTS
from zbmd.collectives.group.group import Group, group_of
from zbmd.transport import kill_points as faults
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.shm.death_notice import DeathNotice

ResultT = TypeVar("ResultT")


class WorkThread(Generic[ResultT]):
    """An executor of one thread without a future per task: those cost 0.1 ms of each step.

    `ended`: called on the thread with the result or the exception of a task; it must not raise. The thread
    starts with the first task. Not thread-safe: one side submits and closes.
    """

    def __init__(self, name: str, ended: Callable[[ResultT | BaseException], None]) -> None:
        self._name, self._ended = name, ended
        self._pieces: SimpleQueue[Callable[[], ResultT] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, piece: Callable[[], ResultT]) -> None:
        """Run this after everything submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name)
            self._thread.start()
        self._pieces.put(piece)

    def close(self) -> None:
        """Wait until everything submitted is done. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._pieces.put(None)
            thread.join()

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            try:
                result: ResultT | BaseException = piece()
            except BaseException as error:  # noqa: BLE001 -- handed to the caller
                result = error
            del piece  # it may hold what is large
            self._ended(result)
            del result


log: Final = structlog.stdlib.get_logger("zbmd.collectives.commit")

ACTOR_NAME = "step-commit"
QUEUED_EVENTS_MAX = 65_536
"""Events queued and not yet handled; with more, the loop is starved, and the rank gives up."""


VIEW_POINT = faults.declare("commit.view", "when a view is entered, before its members meet")
REPORT_POINT = faults.declare("commit.report", "before one of its reports of an epoch is sent")
VOTE_POINT = faults.declare("commit.vote", "before one of its votes is sent")
COMMIT_POINT = faults.declare("commit.commit", "when all votes are in, before the commit is performed")
COMMITTED_POINT = faults.declare("commit.committed", "when the commit is performed")
GAVE_UP_POINT = faults.declare("commit.gave_up", "before it tells another that it votes in an epoch no more")
FINISH_POINT = faults.declare("commit.finish", "before it tells another that it has the last version")


_POINT_OF_SEND = {
    cm.SendReport: REPORT_POINT,
    cm.SendVote: VOTE_POINT,
    cm.SendFinish: FINISH_POINT,
    cm.SendGaveUp: GAVE_UP_POINT,
}
_WORK_NAMES = {cm.RunStep: "step", cm.Fetch: "pull of version", cm.Recall: "recall of version"}


class WorkCancelled(ZbmdError):
    """Work was interrupted because its epoch has ended."""


class StepFailed(ZbmdError):
    """The run cannot continue on this rank. `kind` says why."""

    def __init__(self, kind: cm.FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Cancellation:
    """Tells running work that its epoch has ended. Each check counts as progress."""

    def __init__(self) -> None:
        self._cancelled = False  # a plain flag: one store and one load, and `check` is called often
        self.checks = 0

    def cancel(self) -> None:
        """Ask the work to end; callable from any thread."""
        self._cancelled = True

    def check(self) -> None:
        """Raise `WorkCancelled` if the work must end. Call it between parts of the work."""
        self.checks += 1
        if self._cancelled:
            raise WorkCancelled("the epoch of this work is over")

    def check_between(self, _part: int) -> None:
        """Call `check`, as the hook of a loop over parts."""
        self.check()


@dataclass(frozen=True, slots=True)
class _Broken:
    """An error that ends the run here, in its order among the events."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step: the digest of the slot it wrote, and its share of the ledger."""

    digest: bytes
    part: bytes


class Workload(Protocol):
    """The computation of a run of steps.

    `run_step`, `fetch` and `recall` are called on the compute thread, one at a time. An error of theirs that
    is not named here is the rank's own, and ends it.
    """

    def run_step(self, work: cm.RunStep, group: Group, cancellation: Cancellation) -> StepOutcome:
        """Compute a version into its slot. Raises `PeerLost`, `OperationAborted` or `WorkCancelled`."""
        ...

    def fetch(self, work: cm.Fetch, cancellation: Cancellation) -> bytes:
        """Pull a version into its slot and return its digest. Raises as `run_step`."""
        ...

    def recall(self, work: cm.Recall, cancellation: Cancellation) -> bytes | None:
        """Read the last version back into its slot and return its digest; None if it was not preserved."""
        ...

    async def epoch_installed(self, epoch: int, members: tuple[int, ...], *, whole: bool) -> None:
        """Called when a new epoch begins, before anything of it is sent.

        `whole`: it follows a commit, and all members of the previous one are in it.
        """
        ...

    async def before_step(self, work: cm.RunStep) -> None:
        """Called before a step begins; may take its time."""
        ...

    async def committed(self, commit: cm.Commit, members: tuple[int, ...]) -> None:
        """Called when version and slot have become the committed ones."""
        ...

    async def adopted(self, adopted: cm.Adopted) -> None:
        """Called when a pulled version and its slot have become the committed ones."""
        ...

    async def preserve(self, version: int) -> None:
        """Make the last version durable."""
        ...


class _Receiver(Actor):
    """Passes the peers' messages to the driver, whose machine is recorded itself."""

    captured = False

    def __init__(self, take: Callable[[cm.CommitEvent], None]) -> None:
        self._take = take

    @on(Report)
    async def report(self, message: Report) -> None:
        """Take a report."""
        self._receive(message)

    @on(Vote)
    async def vote(self, message: Vote) -> None:
        """Take a vote."""
        self._receive(message)

    @on(Finish)
    async def finish(self, message: Finish) -> None:
        """Take a finish."""
        self._receive(message)

    @on(GaveUp)
    async def gave_up(self, message: GaveUp) -> None:
        """Note that a peer does not vote in an epoch any more."""
        self._receive(message)

    def _receive(self, message: Message) -> None:
        name = sender_process()
        sender = rank_of(name)
        if sender is None:
            log.warning("message of a stranger dropped", message=type(message).__name__, sender=name)
        else:
            self._take(from_wire(message, sender))


class CommitDriver:
    """Runs `workload` on `worker` under `machine` until every member has the last version."""

    def __init__(self, worker: Worker, machine: StepCommit, workload: Workload) -> None:
        self._worker = worker
        self._machine = machine
        self._tap = Tap(worker.recorder, STEP_COMMIT, ACTOR_NAME, machine, commit_config(machine))
        self._workload = workload
        self._events: asyncio.Queue[cm.CommitEvent | _Broken] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._compute = WorkThread[cm.CommitEvent]("zbmd-compute", self._hand_over)
        self._group: Group | None = None
        """That of the epoch; None also if a member had ended before it could be made."""
        self._is_broken = False
        """Whether a member of the group has ended."""
        self._works = 0
        """Pieces of work whose end has not been handled."""
        self._may_enter = asyncio.Event()
        self._cancellation = Cancellation()
        self._finished = False
        self._over = False

    async def run(self) -> None:
        """Run all steps. Raises `StepFailed` if this rank cannot continue.

        The worker must not have entered a view yet (`join` with `enter=False`): otherwise other ranks could
        be in it, and report to a rank that does not listen. Raises `LocalProtocolError` if it has.
        """
        if self._worker.epoch and not self._worker.alone:
            raise LocalProtocolError(
                f"{self._worker!r} has entered a view already: use zbmd.join(enter=False) for a run of steps"
            )
        self._worker.keeps_lost_memory = False
        # It outlives the run: what others still send, who are not through or have not heard, goes nowhere.
        await self._worker.system.spawn(_Receiver, self._take, name=ACTOR_NAME)
        forget = self._worker.on_peer_lost(self._peer_lost)
        views = asyncio.create_task(self._follow_views(), name="zbmd-views")
        views.add_done_callback(self._views_ended)
        try:
            while not self._finished:
                event = await self._events.get()
                if isinstance(event, _Broken):
                    raise event.error
                if isinstance(event, cm.EpochInstalled):
                    ranks = tuple(member.rank for member in event.members)
                    whole = self._machine.follows_commit(event.epoch)
                    await self._workload.epoch_installed(event.epoch, ranks, whole=whole)
                for action in self._tap.handle(event, now_ns=time.monotonic_ns()):
                    await self._perform(action)
                self._tap.check_invariants()
                self._let_go(event)
        finally:
            forget()
            views.cancel()
            await asyncio.gather(views, return_exceptions=True)
            await self._drain()
            self._over = True

    async def _drain(self) -> None:
        self._cancellation.cancel()
        if self._group is not None:
            await self._group.close()
        await asyncio.to_thread(self._compute.close)

    def _let_go(self, event: cm.CommitEvent) -> None:
        """Unmap the members' memory once the group is of no more use: a replacement needs the pages."""
        match event:
            case cm.PeerEnded(member=member) if member in self._machine.members:
                self._is_broken = True
            case cm.StepEnded() | cm.FetchEnded() | cm.RecallEnded():
                self._works -= 1
            case _:
                pass
        if self._is_broken and not self._works and self._group is not None:
            self._group.give_up()
            self._is_broken = False

    # ---- what comes in

    def _take(self, event: cm.CommitEvent) -> None:
        if self._over:
            return
        if self._events.qsize() >= QUEUED_EVENTS_MAX:
            raise asyncio.QueueFull
        self._events.put_nowait(event)

    def _views_ended(self, views: asyncio.Task[None]) -> None:
        error = None if views.cancelled() else views.exception()
        if error is not None:
            self._events.put_nowait(_Broken(error))

    def _hand_over(self, end: cm.CommitEvent | BaseException) -> None:
        # Straight from the thread into the queue: each turn of the loop in between would be the step's.
        self._loop.call_soon_threadsafe(self._work_ended, end)

    def _work_ended(self, end: cm.CommitEvent | BaseException) -> None:
        # Beyond the bound if need be: there is one at a time, and the run waits for it.
        self._events.put_nowait(_Broken(end) if isinstance(end, BaseException) else end)

    def _peer_lost(self, rank: int, incarnation: int, notice: DeathNotice) -> None:
        member = MemberId(rank=rank, incarnation=incarnation)
        self._take(cm.PeerEnded(member=member, reason="it left" if notice.clean else "it died"))

    async def _follow_views(self) -> None:
        """Turn each view into an epoch; the machine decides when it is entered.

        Members need not meet in it first: a view is ready once all of its members have asked for it here, so
        they listen, and keep messages from members that have already entered it.
        """
        epoch = 0
        while True:
            coming = await self._worker.coming_view(after=epoch)
            epoch, members = coming.view.epoch, coming.view.ids
            self._may_enter.clear()
            self._take(cm.EpochReady(epoch=epoch, members=members))
            await self._may_enter.wait()
            view = self._worker.enter(coming)
            with FLIGHTS.lasting():
                if self._group is not None:
                    await self._group.close()
                faults.hit(VIEW_POINT)
                self._group = self._group_of(view)
            self._worker.recorder.note(f"made the group of epoch {epoch}")
            self._take(cm.EpochInstalled(epoch=epoch, members=members))
            if self._worker.alone:
                return  # no other view will come

    def _group_of(self, view: View) -> Group | None:
        self._is_broken = False
        try:
            return group_of(self._worker, view)
        except PeerLost:  # before the view was entered; the next one is on its way
            return None

    # ---- what goes out

    async def _perform(self, action: cm.CommitAction) -> None:
        match action:
            case cm.SendReport() | cm.SendVote() | cm.SendFinish() | cm.SendGaveUp():
                await self._send(action)
            case cm.EnterEpoch():
                self._may_enter.set()
            case cm.RunStep():
                self._tap.mark(action.version)
                await self._workload.before_step(action)
                self._start(action)
            case cm.Fetch() | cm.Recall():
                self._start(action)
            case cm.AbortWork():
                self._cancellation.cancel()
                if self._group is not None and self._group.epoch == action.epoch:
                    self._group.abort()
            case cm.Commit():
                faults.hit(COMMIT_POINT)
                members = tuple(member.rank for member in self._machine.members)
                await self._workload.committed(action, members)
                faults.hit(COMMITTED_POINT)
            case cm.Adopted():
                await self._workload.adopted(action)
            case cm.Preserve(version=version):
                await self._workload.preserve(version)
            case cm.Finished():
                self._tap.close("finished")
                self._finished = True
            case cm.Failed(kind=kind, reason=reason):
                raise StepFailed(kind, reason)
            case _:
                assert_never(action)

    async def _send(self, action: SendAction) -> None:
        faults.hit(_POINT_OF_SEND[type(action)])
        peer = self._worker.system.ref(f"rank{action.to}/{ACTOR_NAME}")
        try:
            await peer.tell(to_wire(action))
        except (PeerLost, LinkClosed, ActorError):
            return  # its end is announced by its notice and then by a view, not by what is sent to it

    def _start(self, work: cm.RunStep | cm.Fetch | cm.Recall) -> None:
        self._cancellation = Cancellation()
        self._works += 1
        self._compute.submit(partial(self._work_on, work, self._group, self._cancellation))

    def _work_on(
        self, work: cm.RunStep | cm.Fetch | cm.Recall, group: Group | None, cancellation: Cancellation
    ) -> cm.CommitEvent:
        """Do the work on the compute thread, and return the event of its end."""
        epoch, version, reason = work.epoch, work.version, ""
        digest: bytes | None = None
        part = b""
        what = f"{_WORK_NAMES[type(work)]} {version} of epoch {epoch}"
        try:
            if (
                group is None or group.epoch != epoch
            ):  # the next view came between this work's order and its start
                raise WorkCancelled(f"epoch {epoch} is over")
            with self._worker.progress.doing(what, progress=lambda: cancellation.checks):
                match work:
                    case cm.Fetch():
                        digest = self._workload.fetch(work, cancellation)
                    case cm.Recall():
                        digest = self._workload.recall(work, cancellation)
                    case cm.RunStep():
                        outcome = self._workload.run_step(work, group, cancellation)
                        digest, part = outcome.digest, outcome.part
        except (PeerLost, OperationAborted, WorkCancelled) as error:
            reason = str(error)
        match work:
            case cm.Fetch():
                return cm.FetchEnded(epoch=epoch, version=version, digest=digest, reason=reason)
            case cm.Recall():
                return cm.RecallEnded(epoch=epoch, version=version, digest=digest)
            case cm.RunStep():
                return cm.StepEnded(epoch=epoch, version=version, digest=digest, part=part, reason=reason)
