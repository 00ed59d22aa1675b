"""A job on this host alone: `Host` runs it to its end, as the only job of a cluster of one node.

The machines of a cluster's jobs make every decision (`state.job_rules`, `node_machine`) and their driver
forks, signals and sends (`node_driver`). What is added here is what the owner of one run wants of it: its
events in order, a result, and the last records of a run that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from zbmd.actors.cluster.jobs.host_links import host_identity
from zbmd.actors.cluster.jobs.hosted_job import ON_HANG_VARIABLE
from zbmd.actors.cluster.jobs.node_driver import DRAIN_S_MAX, JobHost
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.rank_processes import PRELOAD, Adopts
from zbmd.actors.cluster.jobs.reports import (
    EventQueue,
    HostEvent,
    Observer,
    RankDown,
    RankInfo,
    RunResult,
)
from zbmd.actors.cluster.port import LocalPort
from zbmd.actors.cluster.state.job_table import (
    REASON_CHARACTERS_MAX,
    START_TIMEOUT_NS_DEFAULT,
    STOP_GRACE_NS_DEFAULT,
    Job,
    JobSpec,
    Stop,
    Submit,
)
from zbmd.actors.hangs.progress import PROGRESS_DEADLINE_NS_DEFAULT
from zbmd.actors.hangs.verdict import OnHang
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.process.exit import EXIT_FAILED, REQUEUE_EXIT_CODE, USAGE_EXIT_CODE, describe_exit
from zbmd.actors.process.output import OutputSink
from zbmd.actors.process.template_client import TemplateLost
from zbmd.actors.rank.environment import ARENA_BYTES_DEFAULT, OFF, PROGRESS_DEADLINE_VARIABLE
from zbmd.actors.rank.host_contracts import NodeStatus
from zbmd.actors.replay.process_capture import CaptureSettings, ProcessCapture
from zbmd.actors.snapshots.keeper import SnapshotKeeper
from zbmd.actors.view import OnLoss, Outcome, RankState
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, SECOND_NS
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.host import process as descriptors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """One job. `target`: a script's path, or with `is_module` a module's name.

    preload: modules that the template imports before it forks; environment: variables for the ranks beside
    those of this process, of which the host reads those that `zbmd.actors.replay.process_capture` names;
    restart_window_s: the window that `max_restarts` counts in; recovery_budget_ns: what all deadlines are
    derived from; progress_deadline_ns: what makes no progress for so long is reported, 0 is never;
    stop_grace_ns, start_timeout_ns: see `JobSpec`.
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
    stop_grace_ns: int = STOP_GRACE_NS_DEFAULT
    start_timeout_ns: int = START_TIMEOUT_NS_DEFAULT
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    preload: Sequence[str] = PRELOAD

    def spec(self, job: int) -> JobSpec:
        """Return the job as a cluster of one node is given it."""
        deadline_ns = self.progress_deadline_ns
        environment = {
            **self.environment,
            PROGRESS_DEADLINE_VARIABLE: f"{deadline_ns}ns" if deadline_ns else OFF,
            ON_HANG_VARIABLE: self.on_hang.value,
        }
        return JobSpec(
            job=job,
            target=self.target,
            is_module=self.is_module,
            arguments=self.arguments,
            environment=tuple(sorted(environment.items())),
            ranks_per_node=self.world_size,
            on_loss=self.on_loss,
            max_restarts=self.max_restarts,
            restart_window_ns=round(self.restart_window_s * SECOND_NS),
            arena_bytes=self.arena_bytes,
            recovery_budget_ns=self.recovery_budget_ns,
            stop_grace_ns=self.stop_grace_ns,
            start_timeout_ns=self.start_timeout_ns,
        )


class Host:
    """Runs one job to its end. Use on the main thread: the template and all ranks die with it.

    output: takes the ranks' lines (default: our own standard output and error); observer: an async callback
    that gets every `HostEvent`, in order. If it raises, the run ends and `run` raises the same; template: one
    that was forked for this job (`zbmd.actors.process.early_template`), which the host then owns;
    stdin_rank: the rank that has our standard input; adopts: see `RankProcesses`; per_rank, snapshots: see
    `JobHost`; the host closes these, and is the job again that they are of.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        output: OutputSink | None = None,
        observer: Observer | None = None,
        template: EarlyTemplate | None = None,
        stdin_rank: int | None = None,
        adopts: Adopts | None = None,
        per_rank: Sequence[Mapping[str, str]] = (),
        snapshots: SnapshotKeeper | None = None,
    ) -> None:
        self.config = config
        self._snapshots = snapshots
        self._stdin_rank = stdin_rank
        self._adopts, self._per_rank = adopts, per_rank
        self._template_killed = False
        self.job = secrets.randbits(63) | 1
        self._output = output
        self._observer = observer
        self._early = template
        self._port = LocalPort()
        self._jobs: JobHost | None = None

    @property
    def started(self) -> bool:
        """Whether any rank has been forked."""
        infos = self.ranks.values()
        return any(info.state is not RankState.WAITING or info.incarnation > 1 for info in infos)

    @property
    def ranks(self) -> dict[int, RankInfo]:
        """Each rank's current process; none before the template is ready."""
        return {} if self._jobs is None else self._jobs.ranks(self.job)

    def send_signal(self, rank: int, number: signal.Signals) -> bool:
        """Send a signal to the rank's current process; return False if there is none."""
        info = self.ranks.get(rank)
        if self._jobs is None or info is None:
            return False
        return self._jobs.send_signal(RankKey(self.job, rank, info.incarnation), number)

    def forward(self, number: signal.Signals, *, local_rank: int | None = None) -> int:
        """Send a signal to the ranks that take it, or to that one; return how many do."""
        return 0 if self._jobs is None else self._jobs.forward(self.job, number, local_rank=local_rank)

    def stop(self, reason: str, *, kill: bool = False, failed: bool = False) -> None:
        """End the run: SIGTERM, then SIGKILL after the grace period, or with `kill` at once.

        failed: it ends as failed, not as stopped by request.
        """
        if self._jobs is not None:
            self._stop(reason, kill=kill, failed=failed)

    async def status(self) -> NodeStatus:
        """Return what `zbmd-node status` shows of this host."""
        assert self._jobs is not None
        return await self._jobs.status(self.job)

    async def run(self) -> RunResult:
        """Run the job to its end and give back everything: processes, sockets, descriptors, threads.

        Raises `UserError` on what cannot be asked for and `TemplateLost` if the template does not start.
        """
        if self._snapshots is not None:
            await self._snapshots.find()
            self.job = self._snapshots.job
        identity, clock = host_identity(self.job), HybridClock()
        settings = CaptureSettings.read({**os.environ, **self.config.environment}, job=self.job)
        capture = ProcessCapture(identity, clock, settings)
        try:
            return with_records(await self._run(clock, capture.recorder), capture)
        except BaseException as error:
            capture.failed(error)
            raise
        finally:
            capture.close("the run is over")

    async def _run(self, clock: HybridClock, recorder: Recorder) -> RunResult:
        descriptors.make_room(self.config.world_size)
        self._port.command(Submit(spec=self.config.spec(self.job)))
        events: EventQueue[HostEvent] = EventQueue(self._observer)
        async with events.observed():
            self._jobs = JobHost(
                self._port,
                recorder=recorder,
                clock=clock,
                output=self._output,
                listen_host=None,
                preload=self.config.preload,
                on_event=lambda _, event: events.put(event),
                template=self._early,
                on_template_lost=self._template_lost,
                stdin_rank=self._stdin_rank,
                adopts=self._adopts,
                per_rank=self._per_rank,
                snapshots=self._snapshots,
            )
            keeps = True
            try:
                await self._jobs.open()
                job = await self._end(self._jobs, events)
                keeps = job.outcome is Outcome.FAILED
                await self._jobs.settle()
                with contextlib.suppress(TimeoutError):  # do not wait for a stalled terminal
                    async with asyncio.timeout(DRAIN_S_MAX):
                        await events.settle()
            finally:
                if self._snapshots is not None:
                    await self._snapshots.close(keeps=keeps)
                await self._jobs.close()
        return result_of(job, events, template_killed=self._template_killed)

    async def _end(self, jobs: JobHost, events: EventQueue[HostEvent]) -> Job:
        """Wait for the end of the job. Raises what the observer or a bug of the driver raises."""
        end, bug = self._port.end_of(self.job), asyncio.ensure_future(jobs.failed())
        ends: list[asyncio.Future[Any]] = [end, bug, events.failed]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for failed in (bug, events.failed):
                if failed.done() and not end.done():
                    failed.result()
            return end.result()
        finally:
            bug.cancel()

    def _template_lost(self, error: TemplateLost) -> None:
        self._template_killed |= error.killed
        self._stop(str(error), kill=True, failed=True)

    def _stop(self, reason: str, *, kill: bool, failed: bool) -> None:
        cut = reason[:REASON_CHARACTERS_MAX]
        self._port.command(Stop(job=self.job, reason=cut, kill=kill, failed=failed))


def result_of(
    job: Job, events: EventQueue[HostEvent] | EventQueue[HostEvent | str], *, template_killed: bool = False
) -> RunResult:
    """Return the result of a run whose job has ended. template_killed: so the process that ranks are forked
    from was killed."""
    assert job.outcome is not None
    exit_code, failures = job.exit_code, events.failures
    if exit_code and any(failure.code == USAGE_EXIT_CODE for failure in failures):
        exit_code = USAGE_EXIT_CODE
    elif exit_code == EXIT_FAILED and template_killed:
        exit_code = REQUEUE_EXIT_CODE
    elif exit_code == EXIT_FAILED and failures:
        # The table had to decide before the exit codes were known: a death is proven sooner.
        ended_by = failures if job.restarts_total else failures[:1]
        exit_code = REQUEUE_EXIT_CODE if all(map(_killed_from_outside, ended_by)) else exit_code
    return RunResult(
        outcome=job.outcome,
        reason=job.reason,
        exit_code=exit_code,
        restarts=job.restarts_total,
        failures=tuple(events.failures),
        reports_dropped=events.reports_dropped,
    )


def _killed_from_outside(down: RankDown) -> bool:
    """Whether somebody killed a rank: neither its script, nor its host, nor the kernel for want of memory."""
    return down.code == -signal.SIGKILL and down.reason == describe_exit(down.code)


def with_records(result: RunResult, capture: ProcessCapture) -> RunResult:
    """Return the result with the place of our last records, which are written if the run failed."""
    if result.outcome is not Outcome.FAILED or result.exit_code == USAGE_EXIT_CODE:
        return result
    return dataclasses.replace(result, last_records=capture.dump(f"the run failed: {result.reason}"))
