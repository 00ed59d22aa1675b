"""The driver of a node's jobs: forks, kills and signals processes as the machine (`node_machine`) decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, assert_never

import structlog

from zbmd.actors.cluster.contracts import HangMessage, HostLinked
from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.code_digest import check_code
from zbmd.actors.cluster.jobs.hosted_job import HostedJob
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.node_machine import LOCAL_JOBS, LocalJob, LocalJobs
from zbmd.actors.cluster.jobs.rank_processes import (
    PRELOAD,
    Adopts,
    RankProcess,
    RankProcesses,
    takes_signal,
)
from zbmd.actors.cluster.jobs.reports import (
    HostEvent,
    RankInfo,
    RankStarted,
    SpareInfo,
    ViewChanged,
    log_hang,
    shown_state,
)
from zbmd.actors.cluster.jobs.spare_processes import SpareRanks
from zbmd.actors.cluster.port import ClusterPort
from zbmd.actors.cluster.state.job_table import (
    MEMORY_CAUSE,
    REASON_CHARACTERS_MAX,
    CommandRefused,
    JobPhase,
    JobSpec,
    Order,
    RankUp,
    SlotState,
    Stop,
)
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, host_of_first_rank
from zbmd.actors.contracts import Contract
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.process.exit import describe_exit
from zbmd.actors.process.output import LineWriter, OutputSink
from zbmd.actors.process.template import ForkRequest
from zbmd.actors.process.template_client import TemplateLost
from zbmd.actors.rank.host_contracts import EnterView, MemberDown, NodeStatus, ViewInstalled
from zbmd.actors.routing.routes import RouteTable
from zbmd.actors.snapshots.keeper import SnapshotKeeper
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import ZbmdError
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.memory.memory_kills import MemoryKills
from zbmd.transport.shm.death_notice import DeathNotice

log: Final = structlog.stdlib.get_logger("zbmd.cluster.job")

TEMPLATES_LOST_MAX: Final = 3
"""Templates lost in a row, with no rank that joined in between, after which this node forks no more."""
ENDS_S_MAX: Final = 2.0
"""For the kernel to end what was killed: it frees about 16 GiB a second."""
DRAIN_S_MAX: Final = 1.0
LOOK_S: Final = 1.0
"""Between two looks at the kernel's counters of processes that it ended for want of memory."""
OnJobEvent = Callable[[int, HostEvent], None]
"""Takes the job's id and what happened to it on this node."""


class JobHost:
    """Runs a node's part of the cluster's jobs, on the running loop. A `ClusterListener`.

    Use on the main thread: the template and all ranks die with it. port: the node; output: takes the ranks'
    lines (default: our own standard output and error); recorder, clock: the process's; listen_host: where
    ranks listen for other hosts, None if there are none; on_event: called on the loop, must not block;
    template: the first one, if it was forked already; on_template_lost: called when a template is lost,
    instead of starting another; captures: where the ranks of each job record, in a folder of its own; without
    it their environment says; finder: knows the routes to processes beyond a job; stdin_rank, adopts: see
    `RankProcesses`; per_rank: more variables, for each rank of this node, unless the job sets them;
    snapshots: has the memory of the ranks of its one job outlive this process.
    """

    def __init__(
        self,
        port: ClusterPort,
        *,
        recorder: Recorder,
        clock: HybridClock,
        output: OutputSink | None = None,
        listen_host: str | None = "127.0.0.1",
        preload: Sequence[str] = PRELOAD,
        environment: Mapping[str, str] | None = None,
        on_event: OnJobEvent | None = None,
        template: EarlyTemplate | None = None,
        on_template_lost: Callable[[TemplateLost], None] | None = None,
        captures: Path | None = None,
        finder: RouteTable | None = None,
        stdin_rank: int | None = None,
        adopts: Adopts | None = None,
        per_rank: Sequence[Mapping[str, str]] = (),
        snapshots: SnapshotKeeper | None = None,
    ) -> None:
        self.recorder = recorder
        self.clock = clock
        self._port = port
        self._own_output = LineWriter() if output is None else None
        self._output: OutputSink = output if output is not None else self._own_output  # type: ignore[assignment]
        self._listen = "" if listen_host is None else f"{listen_host}:0"
        self._preload = preload
        self._environment = dict(os.environ if environment is None else environment)
        self._on_event = on_event
        self._early = template
        self._on_template_lost = on_template_lost
        self._captures = captures
        self._finder = finder
        self._stdin_rank = stdin_rank
        self._adopts, self._per_rank, self._snapshots = adopts, per_rank, snapshots
        self._loop = asyncio.get_running_loop()
        self._machine = LocalJobs()
        self._tap = Tap(recorder, LOCAL_JOBS, "jobs", self._machine, {})
        self._events: deque[e.Event] = deque()
        self._busy = False
        self._me: NodeKey | None = None
        self._jobs: dict[int, HostedJob] = {}
        self._spares = SpareRanks(self)
        self._opened: dict[int, asyncio.Task[None]] = {}
        self._forks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._processes: RankProcesses | None = None
        self._template: asyncio.Task[RankProcesses] | None = None
        self._templates_lost = 0
        self._timer: asyncio.TimerHandle | None = None
        self._memory_kills = MemoryKills()
        self._look: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._closed = False

    async def open(self) -> None:
        """Start the template, then listen to the cluster. Raises `TemplateLost`, `UserError`."""
        self._start_template()
        assert self._template is not None
        await asyncio.shield(self._template)
        self._look_at_memory()
        self._port.listen(self)

    def _look_at_memory(self) -> None:
        self._memory_kills.look(time.monotonic_ns())
        self._look = self._loop.call_later(LOOK_S, self._look_at_memory)

    def leave(self) -> None:
        """Leave the cluster, once the ranks of this node have had the time to save."""
        self.put(e.LeaveAsked())

    async def settle(self) -> None:
        """Wait, for a bounded time, until ending ranks are gone and their output is delivered.

        The bound is the time that the machine leaves them to save, and some for the kernel.
        """
        if self._processes is not None:
            last_ns = self._machine.last_kill_ns()
            grace_s = 0.0 if last_ns is None else max(0.0, (last_ns - time.monotonic_ns()) / 1e9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s + ENDS_S_MAX):
                    await self._processes.empty()
            with contextlib.suppress(TimeoutError):  # a terminal that does not move is not waited for
                async with asyncio.timeout(DRAIN_S_MAX):
                    await self._processes.settle()

    async def failed(self) -> None:
        """Wait until a bug ends this driver, and raise it."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Kill all processes and release sockets, descriptors and threads. Idempotent."""
        if self._closed:
            return
        self.stopped("the node ends")
        self._closed = True
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()
        tasks: list[asyncio.Task[Any]] = [*self._forks, *self._opened.values()]
        tasks += [self._template] if self._template is not None else []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._processes is not None:
            await self._processes.close()
        self._spares.stop()
        for hosted in self._jobs.values():
            await hosted.close()
        if self._closing:
            await asyncio.wait(self._closing)
        self._tap.close("the node ends")
        if self._own_output is not None:
            await self._own_output.close()
        self._failed.cancel()

    # -- `ClusterListener` -------------------------------------------------------------------------------

    def began(self, me: Node) -> None:
        """See `ClusterListener`."""
        self._me = me.key
        self.put(e.IncarnationBegan(me=me.key))

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """See `ClusterListener`."""
        self.put(e.ViewActedOn(view=view))
        self._spares.acts_on(view, self._me)
        for hosted in self._jobs.values():
            self._place(hosted, view)

    def received(self, sender: NodeKey, message: Contract) -> None:
        """See `ClusterListener`."""
        if isinstance(message, HostLinked):
            self.put(e.HostReported(sender=sender, word=message))
        elif isinstance(message, HangMessage):
            hosted = self._jobs.get(message.job)
            if hosted is not None and self._port.view.holds(sender):
                hosted.received(sender, message)

    def stopped(self, reason: str) -> None:
        """See `ClusterListener`."""
        self.put(e.IncarnationEnded(reason=reason))
        self._spares.acts_on(None, self._me)

    # -- the machine -------------------------------------------------------------------------------------

    def put(self, event: e.Event) -> None:
        """Put an event to the machine, and then those that follow from its actions."""
        self._events.append(event)
        if self._busy or self._closed:
            return
        self._busy = True
        try:
            while self._events:
                now_ns = time.monotonic_ns()
                actions = self._tap.handle(self._events.popleft(), now_ns=now_ns)
                self._tap.check_invariants()
                for action in actions:
                    self._perform(action)
        except Exception as error:
            if self._failed.done():
                log.error("error after a failure", exc_info=error)
            else:
                self._failed.set_exception(error)
        finally:
            self._busy = False

    def _perform(self, action: e.Action) -> None:
        match action:
            case e.Open(spec=spec):
                self._open(spec)
            case e.Close(job=job):
                self._close_job(job)
            case e.Fork(key=key):
                if not self._spares.wants(key):
                    self.fork_rank(key)
            case e.InstallView(job=job, view=view, to=to):
                self._jobs[job].links.send(to, ViewInstalled(view=view))
            case e.EnterView(job=job, epoch=epoch, to=to):
                self._jobs[job].links.send(to, EnterView(epoch=epoch))
                local = self._machine.jobs[job]
                self.tell(job, ViewChanged(view=local.view, at_ns=time.monotonic_ns()))
                self._spares.entered(job)
            case e.AnnounceDown(key=key, reason=reason, confirmed=confirmed, to=to):
                down = MemberDown(
                    rank=key.rank, incarnation=key.incarnation, reason=reason, confirmed=confirmed
                )
                self._jobs[key.job].links.send(to, down)
            case e.Terminate(key=key):
                self.send_signal(key, signal.SIGTERM)
            case e.Kill(key=key):
                self.send_signal(key, signal.SIGKILL)
            case e.ProposeOrder(order=order):
                self._ask(order)
            case e.SendToHost(to=to_node, word=word):
                self._port.send(to_node, word)
            case e.LeaveCluster():
                self._port.leave()
            case SetTimer(at_ns=at_ns):
                self._set_timer(at_ns)
            case _:
                assert_never(action)

    def _ask(self, order: Order) -> None:
        if isinstance(order, RankUp):
            self._templates_lost = 0
        try:
            self._port.command(order)
        except CommandRefused as error:
            # The incarnation has just ended: what it would have said means nothing any more.
            log.info("order not taken", order=repr(order), reason=str(error))

    def _set_timer(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self._timer_fired, at_ns)

    def _timer_fired(self, due_ns: int) -> None:
        self.recorder.timer("jobs", due_ns, stream=self._tap.stream)
        self.put(TimerFired())

    # -- jobs --------------------------------------------------------------------------------------------

    def _open(self, spec: JobSpec) -> None:
        assert self._me is not None
        hosted = self._jobs[spec.job] = HostedJob(
            spec,
            self._me,
            self,
            listen=self._listen,
            captures=self._captures,
            finder=self._finder,
            environment=self._environment,
            snapshots=self._snapshots,
        )
        self._opened[spec.job] = self._loop.create_task(self._open_checked(hosted))
        if self._adopts is None:
            self._spares.open(spec)

    async def _open_checked(self, hosted: HostedJob) -> None:
        """Open a job after checking that its code is what was submitted. Raises `CodeDiffers`."""
        if hosted.spec.code:
            await self._loop.run_in_executor(None, check_code, hosted.spec)
        await hosted.open()

    def _place(self, hosted: HostedJob, view: ClusterView) -> None:
        assert self._me is not None
        hosted.placed(self._me, view)

    def _close_job(self, job: int) -> None:
        self._spares.close(job)
        self._task(self._closing, _close_once_open(self._opened.pop(job), self._jobs.pop(job)))

    # -- `SpareOwner` ----------------------------------------------------------------------------------------

    def fork_rank(self, key: RankKey) -> None:
        """Fork a rank as soon as the job's links and the template are ready: at once for a replacement."""
        needed: list[asyncio.Task[Any]] = [self._opened[key.job]]
        needed += [self._template] if self._template is not None else []
        if not all(task.done() for task in needed):
            self._task(self._forks, self._fork_after(key, needed))
            return
        try:
            self._opened[key.job].result()
            self.rank_processes().fork(self.request(key), kept_fd=self.kept_fd(key))
        except (ZbmdError, OSError) as error:
            self.put(e.ForkFailed(key=key, reason=str(error)))

    async def _fork_after(self, key: RankKey, needed: Sequence[asyncio.Task[Any]]) -> None:
        await asyncio.wait(needed)
        self.fork_rank(key)

    def rank_processes(self) -> RankProcesses:
        """See `SpareOwner`."""
        if self._template is None:
            raise TemplateLost(
                f"the template process ended {self._templates_lost} times in a row on this node"
            )
        return self._template.result()

    def request(self, key: RankKey) -> ForkRequest:
        """See `SpareOwner`."""
        master_host = host_of_first_rank(self._port.view, key.job)
        own = self._per_rank[key.rank % len(self._per_rank)] if self._per_rank else {}
        return self._jobs[key.job].request(key, master_host=master_host, more=own)

    def kept_fd(self, key: RankKey) -> int | None:
        """See `SpareOwner`."""
        return self._jobs[key.job].kept_fd(key.rank)

    def _task(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # -- `JobHandler` ----------------------------------------------------------------------------------------

    def local(self, job: int) -> LocalJob | None:
        """See `JobHandler`."""
        return self._machine.jobs.get(job)

    def ranks(self, job: int) -> dict[int, RankInfo]:
        """Return the current processes of the ranks that this node runs or ran, also as a `JobHandler`."""
        found, local = self._port.view.jobs.job(job), self._machine.jobs.get(job)
        infos: dict[int, RankInfo] = {}
        for entry in () if found is None else found.ranks:
            if entry.node is None or self._me is None or entry.node.id != self._me.id:
                continue
            process = self._process(RankKey(job, entry.rank, entry.incarnation))
            infos[entry.rank] = RankInfo(
                rank=entry.rank,
                incarnation=entry.incarnation,
                pid=0 if process is None else process.pid,
                state=shown_state(entry, local),
            )
        return infos

    def spares(self, job: int) -> list[SpareInfo]:
        """Return the spares of a job on this node, also as a `JobHandler`."""
        return self._spares.infos(job)

    def _process(self, key: RankKey) -> RankProcess | None:
        if self._processes is None:
            return None
        return self._processes.find((key.job, key.rank, key.incarnation))

    def send(self, to: NodeKey, message: Contract) -> None:
        """See `JobHandler`."""
        self._port.send(to, message)

    def noticed(self, key: RankKey, notice: DeathNotice) -> None:
        """See `JobHandler`."""
        process = self._process(key)
        if self._processes is None or not self._processes.noticed(
            (key.job, key.rank, key.incarnation), notice
        ):
            return
        killed_by = "" if process is None else self._killed_by(process)
        self.put(e.LossProven(key=key, reason=killed_by, cause=MEMORY_CAUSE if killed_by else ""))

    def _killed_by(self, process: RankProcess) -> str:
        """Return what has killed a process, once it is known to be dead; empty if that is not known."""
        if not process.killed_by:
            process.killed_by = self._memory_kills.claim(time.monotonic_ns())
        return process.killed_by

    def step_committed(self, job: int) -> None:
        """See `JobHandler`; it means something after a failure only, and is not recorded before."""
        found = self._port.view.jobs.job(job)
        if found is not None and any(entry.cause for entry in found.ranks):
            self.put(e.StepCommitted(job=job))

    def send_signal(self, key: RankKey, number: signal.Signals) -> bool:
        """Send a signal to a process, also as a `JobHandler`; return False if it is gone."""
        if self._processes is None:
            return False
        return self._processes.signal((key.job, key.rank, key.incarnation), number)

    def forward(self, job: int, number: signal.Signals, *, local_rank: int | None = None) -> int:
        """Send a signal to the ranks of this node that take it, and would not be ended by it, or to one.

        Returns how many do.
        """
        infos = [info for info in self.ranks(job).values() if info.pid and takes_signal(info.pid, number)]
        found = self._port.view.jobs.job(job)
        if local_rank is not None and found is not None:
            infos = [info for info in infos if info.rank % found.spec.ranks_per_node == local_rank]
        return sum(self.send_signal(RankKey(job, one.rank, one.incarnation), number) for one in infos)

    async def status(self, job: int) -> NodeStatus:
        """Return the status of a job that is open here."""
        await asyncio.shield(self._opened[job])
        return await self._jobs[job].status()

    def fail_job(self, job: int, reason: str) -> None:
        """See `JobHandler`."""
        self._ask(Stop(job=job, reason=reason[:REASON_CHARACTERS_MAX], failed=True))

    def tell(self, job: int, event: HostEvent) -> None:
        """See `JobHandler`."""
        if self._on_event is None:
            log_hang(event)
        else:
            self._on_event(job, event)

    @property
    def template_pid(self) -> int:
        """See `JobHandler`."""
        return 0 if self._processes is None else self._processes.template_pid

    # -- `ProcessHandler` ------------------------------------------------------------------------------------

    def _start_template(self) -> None:
        self._template = self._loop.create_task(self._new_template())

    async def _new_template(self) -> RankProcesses:
        early, self._early = self._early, None
        before = self._processes
        processes = RankProcesses(
            self, self._output, early=early, adopts=self._adopts, stdin_rank=self._stdin_rank
        )
        self._processes = processes
        if before is not None:
            self._task(self._closing, before.close_once_empty())
        await processes.start(modules=self._preload, environment=self._environment)
        return processes

    def forked(self, process: RankProcess) -> None:
        """See `ProcessHandler`."""
        if process.rank < 0:
            self._spares.forked(process)
            return
        started = RankStarted(
            rank=process.rank,
            incarnation=process.incarnation,
            pid=process.pid,
            asked_ns=process.asked_ns,
            at_ns=time.monotonic_ns(),
            was_spare=process.was_spare,
        )
        self.tell(process.job, started)
        self.put(e.Forked(key=RankKey(*process.key)))

    def fork_failed(self, process: RankProcess, reason: str) -> None:
        """See `ProcessHandler`."""
        if process.rank < 0:
            self._spares.fork_failed(process, reason)
            return
        self.put(e.ForkFailed(key=RankKey(*process.key), reason=reason))

    def exited(self, process: RankProcess, code: int) -> Callable[[], None]:
        """See `ProcessHandler`."""
        if process.rank < 0:
            return self._spares.exited(process, code)
        key, reason = RankKey(*process.key), describe_exit(code)
        local = self._machine.jobs.get(key.job)
        known = None if local is None else local.processes.get((key.rank, key.incarnation))
        expected = code == 0 or (known is not None and known.asked)
        cause = process.cause if code > 0 else ""
        if code == -signal.SIGKILL and not expected and (killed_by := self._killed_by(process)):
            reason, cause = killed_by, MEMORY_CAUSE
        elif code > 0 and not expected and (killed := self._memory_kills.claim(time.monotonic_ns())):
            reason = process.killed_by = f"{reason}, after a process was {killed}"  # one that it had made
        self.put(e.Exited(key=key, code=code, reason=reason, cause=cause))
        next_step = self._next_step(key)
        given_up = "" if known is None else known.given_up
        return lambda: self.tell(
            key.job, process.down(code, expected=expected, next_step=next_step, why=given_up)
        )

    def debugging(self, process: RankProcess, *, is_on: bool) -> None:
        """See `ProcessHandler`."""
        hosted = self._jobs.get(process.job)
        if hosted is not None and process.rank >= 0:
            hosted.debugging(process.rank, process.incarnation, is_on=is_on)

    def _next_step(self, key: RankKey) -> str:
        """Return the message that says what follows from the end of a process."""
        job = self._port.view.jobs.job(key.job)
        if job is None or job.phase in (JobPhase.STOPPING, JobPhase.ENDED):
            return "the run ends"
        entry = job.ranks[key.rank]
        if entry.lives and entry.incarnation > key.incarnation:
            allowed = f"{job.spec.max_restarts} allowed at a time"
            return f"its replacement starts (restart {job.restarts_total}; {allowed})"
        if entry.lives or entry.state is SlotState.VACANT:
            return "the cluster decides what follows"
        return "the run goes on without it" if entry.state is SlotState.LOST else "no action needed"

    def template_lost(self, error: TemplateLost) -> None:
        """See `ProcessHandler`: another template takes its place."""
        if self._closed:
            return
        if killed := self._memory_kills.claim(time.monotonic_ns()):
            error = TemplateLost(f"{error}; it was {killed}")
        if self._on_template_lost is not None:
            self._on_template_lost(error)
            return
        self._templates_lost += 1
        log.error(
            "the template process ended; all ranks of this node are lost",
            reason=str(error),
            times=self._templates_lost,
        )
        if self._templates_lost <= TEMPLATES_LOST_MAX:
            self._start_template()
        else:
            self._template = None


async def _close_once_open(opened: asyncio.Task[None], hosted: HostedJob) -> None:
    await asyncio.wait([opened])
    if not opened.cancelled() and (error := opened.exception()) is not None:
        log.warning("the job could not be opened here", job=hosted.spec.job, reason=str(error))
    await hosted.close()
