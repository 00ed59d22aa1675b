"""The host supervisor: runs one job on one machine, its ranks forked from a template and replaced when lost.

The membership machine (`membership`) makes every decision; this driver forks, signals, reads pipes and
sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, assert_never

import structlog

from zbmd.actors.hangs.collector import HangCollector
from zbmd.actors.hangs.progress import PROGRESS_DEADLINE_NS_DEFAULT
from zbmd.actors.hangs.verdict import HangNotice, OnHang
from zbmd.actors.host import membership_events as membership
from zbmd.actors.host.events import (
    HostEvent,
    Observer,
    RankDown,
    RankInfo,
    RankReport,
    RankStarted,
    RunResult,
    ViewChanged,
)
from zbmd.actors.host.links import HostLinks, host_address, host_identity
from zbmd.actors.host.membership import MEMBERSHIP, MembershipMachine
from zbmd.actors.host.membership_events import RunPhase
from zbmd.actors.host.processes import RankProcess, RankProcesses, resident_bytes
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.process.exit import EXIT_FAILED, USAGE_EXIT_CODE, describe_exit
from zbmd.actors.process.output import LineWriter, OutputSink
from zbmd.actors.process.template import ForkRequest
from zbmd.actors.process.template_client import TemplateLost
from zbmd.actors.rank.environment import ARENA_BYTES_DEFAULT, RankEnvironment
from zbmd.actors.rank.host_contracts import (
    EnterView,
    Join,
    Linked,
    LinkLost,
    MemberDown,
    NodeStatus,
    RankStatus,
    Report,
    ViewInstalled,
    read_report,
)
from zbmd.actors.replay.process_capture import CaptureSettings, ProcessCapture
from zbmd.actors.view import OnLoss, Outcome, RankState, View
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.host import process as descriptors
from zbmd.transport.identity import Identity
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.shm.death_notice import DeathNotice

log: Final = structlog.stdlib.get_logger("zbmd.actors.host")

PRELOAD = ("asyncio", "uvloop", "numpy", "msgspec", "structlog", "zbmd", "zbmd.actors.rank.member")
EVENTS_WAITING_MAX = 8192  # for the observer; beyond it reports are dropped and counted
DRAIN_S_MAX = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """One job. `target`: a script's path, or with `is_module` a module's name.

    preload: modules that the template imports before it forks; environment: variables for the ranks beside
    those of this process, of which the host reads those that `zbmd.actors.replay.process_capture` names;
    restart_window_s: the window that `max_restarts` counts in; recovery_budget_ns: what all deadlines are
    derived from; progress_deadline_ns: what makes no progress for so long is reported, 0 is never.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    world_size: int
    on_loss: OnLoss = OnLoss.REPLACE
    max_restarts: int = 3
    restart_window_s: float = 60.0
    arena_bytes: int = ARENA_BYTES_DEFAULT
    recovery_budget_ns: int = RECOVERY_BUDGET_NS_DEFAULT
    progress_deadline_ns: int = PROGRESS_DEADLINE_NS_DEFAULT
    on_hang: OnHang = OnHang.REPORT
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    preload: Sequence[str] = PRELOAD


class Host:
    """Runs one job to its end. Use on the main thread: the template and all ranks die with it.

    output: takes the ranks' lines (default: our own standard output and error); observer: an async callback
    that gets every `HostEvent`, in order. If it raises, the run ends and `run` raises the same; template: one
    that was forked for this job (`zbmd.actors.process.early_template`), which the host then owns.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        output: OutputSink | None = None,
        observer: Observer | None = None,
        template: EarlyTemplate | None = None,
    ) -> None:
        self.config = config
        self.job = secrets.randbits(63) | 1
        self.address = host_address(load_or_create_cookie(), self.job)
        self._output = output
        self._observer = observer
        self._early = template
        self._deadlines = derive(config.recovery_budget_ns)
        self._machine_config: dict[str, Any] = {
            "world_size": config.world_size,
            "on_loss": config.on_loss,
            "restarts_max": config.max_restarts,
            "period_ns": round(config.restart_window_s * 1e9),
            "grace_ns": self._deadlines.stop_grace_ns,
            "kill_ns": self._deadlines.stop_kill_ns,
            "relink_ns": self._deadlines.agreement_ns,
        }
        self._machine = MembershipMachine(**self._machine_config)
        self._tap = Tap(None, MEMBERSHIP, "", self._machine, self._machine_config)
        self._capture: ProcessCapture | None = None
        self._processes: RankProcesses | None = None
        self._failures: list[RankDown] = []
        self._reports_dropped = 0
        self._events: asyncio.Queue[HostEvent] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._started_ns = time.monotonic_ns()
        self._links: HostLinks | None = None
        self._hangs: HangCollector | None = None
        self._done: asyncio.Future[membership.RunEnded] | None = None

    @property
    def ranks(self) -> dict[int, RankInfo]:
        """Each rank's current process."""
        infos: dict[int, RankInfo] = {}
        for rank in range(self.config.world_size):
            state, incarnation = self._machine.state(rank)
            process = self._process(rank, incarnation)
            pid = process.pid if process is not None else 0
            infos[rank] = RankInfo(rank=rank, incarnation=incarnation, pid=pid, state=state)
        return infos

    @property
    def view(self) -> View:
        """The view installed last; epoch 0 before the first."""
        return self._machine.view

    def send_signal(self, rank: int, number: signal.Signals) -> bool:
        """Send a signal to the rank's current process; return False if there is none."""
        return self._signal(rank, self._machine.state(rank)[1], number)

    def stop(self, reason: str, *, kill: bool = False) -> None:
        """End the run: SIGTERM, then SIGKILL after the grace period, or with `kill` at once."""
        if self._done is not None:
            self._put(membership.StopRequested(reason=reason, kill=kill))

    async def run(self) -> RunResult:
        """Run the job to its end and give back everything: processes, sockets, descriptors, threads.

        Raises `UserError` on what cannot be asked for and `TemplateLost` if the template does not start.
        """
        identity, clock = host_identity(self.job), HybridClock()
        settings = CaptureSettings.read({**os.environ, **self.config.environment}, job=self.job)
        capture = self._capture = ProcessCapture(identity, clock, settings)
        try:
            result = await self._run(identity, clock, capture.recorder)
            if result.outcome is Outcome.FAILED and result.exit_code != USAGE_EXIT_CODE:
                written = capture.dump(f"the run failed: {result.reason}")
                result = dataclasses.replace(result, last_records=written)
        except BaseException as error:
            capture.failed(error)
            raise
        finally:
            capture.close("the run is over")
        return result

    async def _run(self, identity: Identity, clock: HybridClock, recorder: Recorder) -> RunResult:
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        descriptors.make_room(self.config.world_size)
        own_output = LineWriter() if self._output is None else None
        self._output = own_output or self._output
        observing = loop.create_task(self._observe(), name="host observer")
        self._tap = Tap(recorder, MEMBERSHIP, "membership", self._machine, self._machine_config)
        try:
            self._links = HostLinks(
                address=self.address,
                identity=identity,
                clock=clock,
                deadlines=self._deadlines,
                recorder=recorder,
                handler=self,
            )
            await self._links.open()
            self._hangs = HangCollector(
                self.address,
                deadline_ns=self.config.progress_deadline_ns,
                on_hang=self.config.on_hang,
                desk=self,
            )
            self._hangs.open()
            assert self._output is not None
            self._processes = RankProcesses(self, self._output, early=self._early)
            await self._processes.start(modules=self.config.preload, environment=os.environ)
            self._put(membership.StartRequested())
            end = await self._done
            with contextlib.suppress(TimeoutError):  # do not wait for a stalled terminal
                await asyncio.wait_for(self._settle(), DRAIN_S_MAX)
        finally:
            await self._close()
            observing.cancel()
            await asyncio.wait([observing])
            if own_output is not None:
                await own_output.close()
        return self._result(end)

    # What the driver hears.

    def is_current(self, rank: int, incarnation: int) -> bool:
        """See `HostHandler`."""
        if not 0 <= rank < self.config.world_size:
            return False
        state, current = self._machine.state(rank)
        return incarnation == current and state in (RankState.STARTING, RankState.JOINED)

    def joined(self, message: Join) -> None:
        """See `HostHandler`."""
        self._put(
            membership.Joined(
                rank=message.rank,
                incarnation=message.incarnation,
                address=message.address,
                host=message.host,
                tcp_address=message.tcp_address,
            )
        )

    def linked(self, message: Linked) -> None:
        """See `HostHandler`."""
        self._put(membership.Linked(rank=message.rank, incarnation=message.incarnation, epoch=message.epoch))

    def link_lost(self, message: LinkLost) -> None:
        """See `HostHandler`."""
        log.warning("a link between ranks of this host ended", rank=message.rank, peer=message.peer)
        lost = membership.LinkLost(rank=message.rank, incarnation=message.incarnation, epoch=message.epoch)
        self._put(lost)

    def reported(self, message: Report) -> None:
        """See `HostHandler`."""
        if self._observer is None:
            return
        try:
            payload = read_report(message.payload)
        except RemoteProtocolError as error:
            log.warning("report refused", rank=message.rank, reason=str(error))
            return
        if self._events.qsize() >= EVENTS_WAITING_MAX:
            self._reports_dropped += 1
            return
        self._events.put_nowait(
            RankReport(rank=message.rank, incarnation=message.incarnation, payload=payload)
        )

    def noticed(self, rank: int, incarnation: int, notice: DeathNotice) -> None:
        """See `HostHandler`."""
        if self._processes is not None and self._processes.noticed((self.job, rank, incarnation), notice):
            self._put(membership.LossProven(rank=rank, incarnation=incarnation))

    def hung(self, notice: HangNotice) -> None:
        """See `HangDesk`."""
        if self._observer is None:
            log.warning(notice.text, at=notice.stack, next_step=notice.next_step)
        self._tell(notice)

    def end_rank(self, rank: int, incarnation: int) -> None:
        """See `HangDesk`."""
        self._signal(rank, incarnation, signal.SIGKILL)

    def end_run(self, reason: str) -> None:
        """See `HangDesk`."""
        self._put(membership.StopRequested(reason=reason, outcome=Outcome.FAILED))

    async def status(self) -> NodeStatus:
        """See `HostHandler`."""
        assert self._links is not None
        infos = list(self.ranks.values())
        joined = [i.rank for i in infos if i.state is RankState.JOINED]
        names = await asyncio.gather(*(self._links.actors(rank) for rank in joined))
        actors = dict(zip(joined, names, strict=True))
        return NodeStatus(
            address=self.address,
            pid=os.getpid(),
            template_pid=self._processes.template_pid if self._processes is not None else 0,
            target=self.config.target,
            on_loss=self.config.on_loss.value,
            epoch=self._machine.view.epoch,
            restarts=self._machine.restarts_total,
            uptime_s=(time.monotonic_ns() - self._started_ns) / 1e9,
            hangs=() if self._hangs is None else tuple(notice.text for notice in self._hangs.notices),
            ranks=tuple(
                RankStatus(
                    rank=i.rank,
                    pid=i.pid,
                    incarnation=i.incarnation,
                    state=i.state.value,
                    restarts=max(0, i.incarnation - 1),
                    memory_bytes=resident_bytes(i.pid),
                    actors=actors.get(i.rank),
                )
                for i in infos
            ),
        )

    def forked(self, process: RankProcess) -> None:
        """See `ProcessHandler`."""
        self._tell(
            RankStarted(
                rank=process.rank,
                incarnation=process.incarnation,
                pid=process.pid,
                asked_ns=process.asked_ns,
                at_ns=time.monotonic_ns(),
            )
        )
        self._put(membership.Forked(rank=process.rank, incarnation=process.incarnation))

    def fork_failed(self, process: RankProcess, reason: str) -> None:
        """See `ProcessHandler`."""
        self._put(membership.ForkFailed(rank=process.rank, incarnation=process.incarnation, reason=reason))

    def template_lost(self, error: TemplateLost) -> None:
        """See `ProcessHandler`."""
        self._put(membership.StopRequested(reason=str(error), kill=True, outcome=Outcome.FAILED))

    def exited(self, process: RankProcess, code: int) -> Callable[[], None]:
        """See `ProcessHandler`."""
        rank, incarnation, reason = process.rank, process.incarnation, describe_exit(code)
        expected = self._machine.phase in (RunPhase.STOPPING, RunPhase.KILLING)
        self._put(membership.Exited(rank=rank, incarnation=incarnation, code=code, reason=reason))
        if self._links is not None:
            down = MemberDown(rank=rank, incarnation=incarnation, reason=reason, confirmed=True)
            self._links.send(self._joined_ranks(), down)
        next_step = self._next_step(process)
        return lambda: self._report_down(process, code, next_step, expected=expected or code == 0)

    def _report_down(self, process: RankProcess, code: int, next_step: str, *, expected: bool) -> None:
        """Report an end, once the last printed lines are known."""
        down = process.down(code, expected=expected, next_step=next_step)
        if not down.expected:
            self._failures.append(down)
        self._tell(down)

    def _next_step(self, process: RankProcess) -> str:
        state, incarnation = self._machine.state(process.rank)
        if self._machine.phase is not RunPhase.RUNNING:
            return "the run ends"
        if incarnation > process.incarnation:
            used = self._machine.restarts_total
            return f"its replacement starts (restart {used}; {self.config.max_restarts} allowed at a time)"
        if state is RankState.LOST:
            return "the run goes on without it"
        return "no action needed"

    # What the driver does.

    def _put(self, event: membership.Event) -> None:
        """Put one event to the machine and perform its actions; a bug in either ends the run."""
        try:
            actions = self._tap.handle(event, now_ns=time.monotonic_ns())
            self._tap.check_invariants()
            for action in actions:
                self._perform(action)
        except Exception as error:  # noqa: BLE001 - given to whoever awaits `run`
            self._fail(error)

    def _perform(self, action: membership.Action) -> None:
        assert self._links is not None and self._done is not None
        match action:
            case membership.Fork(rank=rank, incarnation=incarnation):
                self._fork(rank, incarnation)
            case membership.InstallView(view=view):
                self._links.send(view.ranks, ViewInstalled(view=view))
            case membership.EnterView(epoch=epoch, to=to):
                self._links.send(to, EnterView(epoch=epoch))
                self._tell(ViewChanged(view=self._machine.view, at_ns=time.monotonic_ns()))
            case membership.AnnounceDown(rank=rank, incarnation=incarnation, reason=reason, to=to):
                down = MemberDown(rank=rank, incarnation=incarnation, reason=reason, confirmed=False)
                self._links.send(to, down)
            case membership.Terminate(rank=rank, incarnation=incarnation):
                self._signal(rank, incarnation, signal.SIGTERM)
            case membership.Kill(rank=rank, incarnation=incarnation):
                self._signal(rank, incarnation, signal.SIGKILL)
            case SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(delay_s, self._timer_fired, at_ns)
            case membership.RunEnded():
                self._tap.close(action.reason)
                if not self._done.done():
                    self._done.set_result(action)
            case _:
                assert_never(action)

    def _timer_fired(self, due_ns: int) -> None:
        assert self._capture is not None
        self._capture.recorder.timer("membership", due_ns, stream=self._tap.stream)
        self._put(TimerFired())

    def _fork(self, rank: int, incarnation: int) -> None:
        assert self._processes is not None
        environment = RankEnvironment(
            rank=rank,
            world_size=self.config.world_size,
            incarnation=incarnation,
            job=self.job,
            node_address=self.address,
            arena_bytes=self.config.arena_bytes,
            recovery_budget_ns=self.config.recovery_budget_ns,
            progress_deadline_ns=self.config.progress_deadline_ns,
        )
        request = ForkRequest(
            job=self.job,
            rank=rank,
            incarnation=incarnation,
            target=self.config.target,
            is_module=self.config.is_module,
            arguments=self.config.arguments,
            environment={**self.config.environment, **environment.variables()},
        )
        self._processes.fork(request)

    def _process(self, rank: int, incarnation: int) -> RankProcess | None:
        return None if self._processes is None else self._processes.find((self.job, rank, incarnation))

    def _signal(self, rank: int, incarnation: int, number: signal.Signals) -> bool:
        return self._processes is not None and self._processes.signal((self.job, rank, incarnation), number)

    def _joined_ranks(self) -> list[int]:
        return [i.rank for i in self.ranks.values() if i.state is RankState.JOINED]

    def _tell(self, event: HostEvent) -> None:
        if self._observer is not None:
            self._events.put_nowait(event)

    async def _observe(self) -> None:
        while self._observer is not None:
            event = await self._events.get()
            try:
                await self._observer(event)
            except Exception as error:  # noqa: BLE001 - given to whoever awaits `run`
                self._fail(error)
            finally:
                self._events.task_done()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        else:
            log.error("error after the end of the run", exc_info=error)

    # The end.

    async def _settle(self) -> None:
        """Wait until every line is printed and every event observed."""
        if self._processes is not None:
            await self._processes.settle()
        await self._events.join()

    async def _close(self) -> None:
        """Kill what is left, wait for it, and release everything."""
        if self._timer is not None:
            self._timer.cancel()
        if self._processes is not None:
            await self._processes.close()
        if self._hangs is not None:
            self._hangs.close()
        if self._links is not None:
            await self._links.close()

    def _result(self, end: membership.RunEnded) -> RunResult:
        succeeded = end.outcome is Outcome.SUCCEEDED
        usage = any(failure.code == USAGE_EXIT_CODE for failure in self._failures)
        return RunResult(
            outcome=end.outcome,
            reason=end.reason,
            exit_code=0 if succeeded else USAGE_EXIT_CODE if usage else EXIT_FAILED,
            restarts=self._machine.restarts_total,
            failures=tuple(self._failures),
            reports_dropped=self._reports_dropped,
        )
