"""`zbmd-node run` over several nodes: this host's node of a cluster that is made for the job, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import shlex
import signal
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import zbmd
from zbmd.actors.bootstrap.merge import Bootstrap, Role
from zbmd.actors.bootstrap.one_job_node import (
    OneJobNode,
    configured,
    job_id_of,
    joiner,
    joining,
    node_id_of,
    node_name,
)
from zbmd.actors.cluster.jobs import single_job as o
from zbmd.actors.cluster.jobs.code_digest import code_of
from zbmd.actors.cluster.jobs.node_driver import JobHost
from zbmd.actors.cluster.jobs.reports import HostEvent
from zbmd.actors.cluster.node.contracts import RUN_CHARACTERS_MAX
from zbmd.actors.cluster.node.incarnations import NodeConfig
from zbmd.actors.cluster.node.join import JoinFailed, JoinTimedOut, ask_admission
from zbmd.actors.cluster.state.job_table import JobSpec, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.process.exit import EXIT_FAILED, REQUEUE_EXIT_CODE
from zbmd.actors.rank.environment import LAUNCH_VARIABLE
from zbmd.actors.replay.process_capture import CaptureSettings
from zbmd.actors.snapshots.keeper import SnapshotKeeper
from zbmd.actors.view import Outcome
from zbmd.tools.cli.console import Console
from zbmd.tools.cli.launch_settings import Settings
from zbmd.tools.cli.settings import DEFAULT
from zbmd.tools.node.guard.guards import GuardEvent, GuardLost, Guards, GuardSignalled, StopRequests, hearing
from zbmd.tools.node.narration import RunTeller
from zbmd.tools.node.preflight.driver import HostSurvey
from zbmd.tools.node.preflight.host import MeasuredHost
from zbmd.tools.node.recorder import LaunchRecorder
from zbmd.tools.node.run import (
    JobCommand,
    host_variables,
    job_config,
    preload_of,
    snapshot_keeper,
)
from zbmd.tools.node.signals import STOP_SIGNALS, forwarded, handling
from zbmd.tools.node.store import with_store
from zbmd.transport.clock.deadlines import SECOND_NS
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.tcp.address import parse_address, tcp_settings
from zbmd.transport.tcp.sockets import PortInUse, free_port

NAMED_MAX: Final = 16
NOT_COMPARED: Final = ("environment", "code")
"""A node's environment is its own; a host whose code differs says so itself."""
STORE_TRY_S: Final = 12.0
"""At the join addresses that a store lists; then it is read again, since its founder may be gone by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """Task of one node in a run over several. variables: for ranks, as this node sets them.

    on_began: takes the address of this node each time that it begins; record: what becomes of its ranks;
    host: this one, as `--preflight` has measured it.
    """

    job: JobCommand
    settings: Settings
    bootstrap: Bootstrap
    variables: Mapping[str, str]
    on_began: Callable[[str], None] | None = None
    record: LaunchRecorder | None = None
    host: MeasuredHost | None = None

    @property
    def patience_ns(self) -> int:
        """Time to wait for missing nodes."""
        timeout_s: float = self.settings["join_timeout"]
        return round(timeout_s * SECOND_NS)


def job_id(bootstrap: Bootstrap) -> int:
    """Return the name of the job that all nodes use. A run without a name gets a fixed one."""
    return job_id_of(f"zbmd-node run {bootstrap.job}")


def run_of(plan: NodeRun) -> str:
    """Return the name of the run that this node was started for: equal on all of its nodes, and on no others.

    A run without a name is known by its script and arguments.
    """
    job = plan.job
    if plan.bootstrap.job:
        text = f"the run {plan.bootstrap.job}"
        exact = plan.bootstrap.job
    else:
        target = job.target if job.is_module else str(Path(job.target).absolute())
        words = ("-m", target) if job.is_module else (target,)
        text = f"the run of `{shlex.join([*words, *job.arguments])}`"
        exact = "\0".join((*words, *job.arguments))
    if len(text) <= RUN_CHARACTERS_MAX:
        return text
    digest = hashlib.blake2b(exact.encode(), digest_size=8).hexdigest()
    return f"{text[: RUN_CHARACTERS_MAX - 20]}… {digest}"


def spec_of(plan: NodeRun) -> JobSpec:
    """The job as this node would give it to the cluster. Raises `UserError`."""
    job, settings, nodes = plan.job, plan.settings, plan.bootstrap.nodes
    environment = dict(plan.variables)
    environment.pop("MASTER_PORT", None)  # chosen where rank 0 is to run
    if settings["master_port"] and all(
        join_address.port != settings["master_port"] for join_address in plan.bootstrap.join_addresses
    ):
        environment["MASTER_PORT"] = str(settings["master_port"])
    spec = dataclasses.replace(
        job_config(job, settings, environment).spec(job_id(plan.bootstrap)),
        target=job.target if job.is_module else str(Path(job.target).absolute()),
        code=code_of(job.target, is_module=job.is_module),
        nodes_min=nodes.least,
        nodes_max=nodes.most,
    )
    if problem := spec.problem():
        raise UserError(
            f"a job of {nodes.most} nodes with {spec.ranks_per_node} ranks each cannot be: {problem}. Give "
            "fewer with --nnodes or --nproc-per-node."
        )
    return spec


def differences(own: JobSpec, given: JobSpec) -> list[str]:
    """In which settings of this node the job that the cluster was given is another."""
    return [
        field.name
        for field in dataclasses.fields(JobSpec)
        if field.name not in NOT_COMPARED and getattr(own, field.name) != getattr(given, field.name)
    ]


def local_variables(plan: NodeRun) -> dict[str, str]:
    """The environment of the ranks of this host, but for the variables of a single rank."""
    return {**os.environ, **host_variables(plan.settings)}


async def run_over_nodes(plan: NodeRun, template: EarlyTemplate | None, guards: Guards | None = None) -> int:
    """Run this node until the job is over; returns the exit code. Raises `UserError`.

    template: of the ranks of this host, if it was forked already; guards: see `run_job`.
    """
    spec = await asyncio.to_thread(spec_of, plan)
    config = await configured(plan.bootstrap, _config(plan))
    given_up_ns = time.monotonic_ns() + plan.patience_ns
    async with Console(hold_last_words=True) as console, _held(plan, console) as snapshots:
        while True:  # until it has run, or time is up
            try:
                async with _found(plan, config) as (found, superseded):
                    node = _NodeRun(plan, spec, found, console, template, guards, snapshots)
                    template = None  # it is its own now
                    if (code := await node.run(superseded)) != o.MOVES:
                        snapshots.ended = node.needs_no_state
                        return code
                config = joining(plan.bootstrap, config)
                if (to := node.machine.moves_to) is not None:
                    config = dataclasses.replace(config, joins=(parse_address(to.address), *config.joins))
            except PortInUse as error:
                if not (plan.bootstrap.role is Role.HOLDER and config.founds):
                    raise UserError(f"{error}{await _of_another_run(plan, config)}") from None
                config = joining(plan.bootstrap, config)  # another node of this host was faster
            except JoinFailed as error:
                if plan.bootstrap.role is Role.STORE:
                    if time.monotonic_ns() < given_up_ns:
                        continue
                elif not isinstance(error, JoinTimedOut):
                    raise
                await console.note(str(error))
                return EXIT_FAILED


@dataclass(slots=True)
class _Snapshots:
    """The snapshot process of this node's ranks, if there is one. ended: nobody will need it any more."""

    keeper: SnapshotKeeper | None
    ended: bool = False


@asynccontextmanager
async def _held(plan: NodeRun, console: Console) -> AsyncGenerator[_Snapshots]:
    """Find the state that a run before has left here, and have that of this one outlive this process."""
    notes: set[asyncio.Task[None]] = set()
    config = job_config(plan.job, plan.settings, plan.variables)

    def say(text: str) -> None:
        notes.add(asyncio.ensure_future(console.note(text)))

    idle_s: float = plan.settings["snapshots"]
    nodes, number = plan.bootstrap.nodes.most, plan.bootstrap.node
    found = _Snapshots(snapshot_keeper(config, idle_s, say, nodes=nodes, number=number))
    try:
        if found.keeper is not None:
            await found.keeper.find()
        yield found
    finally:
        if found.keeper is not None:
            await found.keeper.close(keeps=not found.ended)
        await asyncio.gather(*notes)


def _number_of(plan: NodeRun, snapshots: SnapshotKeeper | None) -> int | None:
    """Return the number of this node: as its launcher says, or that of the ranks whose memory is here."""
    if plan.bootstrap.node is not None or snapshots is None or not snapshots.ranks_found:
        return plan.bootstrap.node
    ranks: int = plan.settings["nproc_per_node"]
    return snapshots.ranks_found[0] // ranks


def _config(plan: NodeRun) -> NodeConfig:
    """Of this node, but for what the launcher says of where it is."""
    given = plan.settings.source("recovery_budget") != DEFAULT
    return NodeConfig(
        name=node_name(plan.bootstrap.name, plan.bootstrap.node),
        join_ns=plan.patience_ns,
        recovery_budget_ns=round(plan.settings["recovery_budget"] * SECOND_NS) if given else None,
        cookie=load_or_create_cookie(),
        settings=tcp_settings(),
        release=zbmd.__version__,
        run=run_of(plan),
        domain=plan.settings["domain"] or "",
    )


async def _of_another_run(plan: NodeRun, config: NodeConfig) -> str:
    """Return that the address which this node was to listen on belongs to another run, if it does."""
    for address in plan.bootstrap.join_addresses:
        with contextlib.suppress(ZbmdError, OSError):
            reply, _ = await ask_admission(address, joiner(config))
            return f" {reply.node} is there: {reply.refused}." if reply.refused else ""
    return ""


@asynccontextmanager
async def _found(
    plan: NodeRun, config: NodeConfig
) -> AsyncGenerator[tuple[NodeConfig, asyncio.Future[str] | None]]:
    """The configuration, as the store has it if there is one; see `with_store`."""
    if plan.bootstrap.role is not Role.STORE:
        yield config, None
        return
    tried = dataclasses.replace(config, join_ns=min(plan.patience_ns, round(STORE_TRY_S * SECOND_NS)))
    async with with_store(tried, plan.bootstrap.store) as (found, superseded):
        yield found, superseded


class _NodeRun(OneJobNode):
    """One node of the run, and what its user hears of it."""

    def __init__(
        self,
        plan: NodeRun,
        spec: JobSpec,
        config: NodeConfig,
        console: Console,
        template: EarlyTemplate | None,
        guards: Guards | None,
        snapshots: _Snapshots,
    ) -> None:
        self._plan, self._console, self._template = plan, console, template
        self._snapshots = snapshots.keeper
        self._guards, self._stops = guards, StopRequests()
        self._signals: Sequence[str] | None = plan.settings["signals_to_handle"]
        self._local = local_variables(plan)
        self._teller = RunTeller(console, lambda: self.jobs.ranks(spec.job), plan.record)
        self._members: tuple[Node, ...] = ()
        self._compared = self._was_stopped = False
        founds = config.founds or (plan.bootstrap.role is Role.STORE and config.new)
        super().__init__(
            config,
            spec,
            node_id=node_id_of(_number_of(plan, snapshots.keeper), founds=founds),
            nodes_min=spec.nodes_min,
            patience_ns=plan.patience_ns,
            captured=CaptureSettings.read(self._local, job=spec.job),
            meets_at=plan.bootstrap.join_addresses,
        )
        self._survey = HostSurvey(
            self.node,
            spec.job,
            config.listen.host,
            plan.host,
            say=self.say,
            excluded=self._excluded,
            fails=self.fails,
        )

    def hosting(self) -> JobHost:
        """See `OneJobNode`."""
        return JobHost(
            self.node,
            recorder=self.capture.recorder,
            clock=self.clock,
            output=self._console if self._guards is None else self._guards.output(self._console),
            listen_host=self.listen_host,
            preload=preload_of(self._plan.job, self._plan.settings),
            environment=self._local,
            on_event=lambda _, event: self._happened(event),
            template=self._template,
            finder=self.actors.finder,
            stdin_rank=self._plan.settings["stdin"],
            per_rank=() if self._guards is None else self._guards.variables(),
            snapshots=self._snapshots,
        )

    @property
    def needs_no_state(self) -> bool:
        """Whether the job has ended otherwise than by a failure, or its user has ended this node."""
        job = self.machine.job
        outcome = None if job is None else job.outcome
        return self._was_stopped if outcome is None else outcome is not Outcome.FAILED

    def say(self, text: str) -> None:
        """See `OneJobNode`."""
        self._teller.say(text)

    def given(self) -> JobSpec:
        """See `OneJobNode`: with a port for rank 0, which runs where the job is given from, and the time."""
        launch = {LAUNCH_VARIABLE: str(time.time_ns() // 1000)}
        environment = {"MASTER_PORT": str(free_port()), **dict(self.spec.environment), **launch}
        return dataclasses.replace(self.spec, environment=tuple(sorted(environment.items())))

    def gives(self) -> None:
        """See `OneJobNode`: with `--preflight`, hosts get ranks once they were measured together."""
        self.node.command(Submit(spec=self.given(), preflight=self._plan.settings["preflight"]))

    def _excluded(self, reason: str) -> None:
        words = f"preflight: this host does not take part: {reason}"
        self.put(o.EndAsked(reason=words, exit_code=REQUEUE_EXIT_CODE, leave=True))

    def received(self, sender: NodeKey, message: Contract) -> None:
        """See `ClusterListener`."""
        self._survey.received(sender, message)

    def sees(self, view: ClusterView) -> None:
        """See `OneJobNode`."""
        if view.nodes != self._members and self.machine.state is not o.SingleJobState.LEAVING:
            self.say(_members_in_words(self._members, view.nodes, self.node.me))
            self._end_without_a_guard(view)
            self._members = view.nodes
        self._survey.sees(view)
        self._compare(view)

    def began(self, me: Node) -> None:
        """See `ClusterListener`."""
        if self._plan.on_began is not None:
            self._plan.on_began(me.address)
        super().began(me)

    def _end_without_a_guard(self, view: ClusterView) -> None:
        """End the job if guards have lost a host: their launcher starts all of them again, and not one."""
        gone = [node.name for node in self._members if node not in view.nodes]
        job = view.jobs.job(self.spec.job)
        if self._guards is None or not gone or job is None or job.outcome is not None:
            return
        reason = f"{gone[0]} is lost with its guards: the launcher has to start all of them again"
        self.put(o.EndAsked(reason=reason, exit_code=EXIT_FAILED, leave=False))

    def is_out(self) -> None:
        """See `OneJobNode`."""
        self._members = ()

    async def run(self, superseded: asyncio.Future[str] | None) -> int:
        """Until the job is over and this node has left; the exit code."""
        if superseded is not None:
            superseded.add_done_callback(self._superseded)
        try:
            with (
                handling(self._on_signal, self._on_forwarded, more=self._signals),
                hearing(self._guards, self._on_guard),
            ):
                async with self._teller.telling():
                    code = await self.live()
                    with contextlib.suppress(TimeoutError):
                        await self._teller.told()
                    if (job := self.machine.job) is not None:
                        await self._teller.over(job, self.capture)
                    return code
        except BaseException as error:
            self.capture.failed(error)
            raise
        finally:
            if superseded is not None:
                superseded.remove_done_callback(self._superseded)
            await self._survey.close()
            self.capture.close("the run is over")

    def _happened(self, event: HostEvent) -> None:
        if self._guards is not None:
            self._guards.happened(event)
        self._teller.happened(event)

    def _on_guard(self, event: GuardEvent) -> None:
        match event:
            case GuardLost():
                self.put(o.EndAsked(reason=event.reason, exit_code=EXIT_FAILED, leave=False))
            case GuardSignalled(number=number, local_rank=local_rank):
                take = self._on_signal if number in STOP_SIGNALS else self._on_forwarded
                take(number, local_rank)

    def _on_signal(self, number: signal.Signals, local_rank: int = 0) -> None:
        if self._stops.ask(local_rank) is None:
            return
        self._was_stopped = True
        asked = o.EndAsked(
            reason=f"{number.name} received on {self._config.name}",
            exit_code=128 + number,
            leave=number is not signal.SIGINT,
        )
        self.put(asked)

    def _on_forwarded(self, number: signal.Signals, local_rank: int | None = None) -> None:
        rank = 0 if self._guards is not None and local_rank is None else local_rank
        forward = partial(self.jobs.forward, self.spec.job, local_rank=rank)
        if words := forwarded(number, forward, more=self._signals):
            self.say(words)

    def _superseded(self, reason: asyncio.Future[str]) -> None:
        self.put(o.EndAsked(reason=reason.result(), exit_code=EXIT_FAILED, leave=True))

    def _compare(self, view: ClusterView) -> None:
        """Say once if another node has given the cluster another job than this one would have."""
        job = view.jobs.job(self.spec.job)
        if job is None or self._compared:
            return
        self._compared = True
        if differing := differences(self.spec, job.spec):
            self.say(
                f"this node was started with another {', '.join(differing)} than {job.submitter}, which has "
                "given the job to the cluster: its settings are used. Start all nodes alike"
            )


def _members_in_words(before: tuple[Node, ...], now: tuple[Node, ...], me: Node) -> str:
    names = [node.name for node in now[:NAMED_MAX]]
    text = f"nodes: {', '.join(names)}" + (f" and {len(now) - NAMED_MAX} more" if now[NAMED_MAX:] else "")
    if not before:
        return f"this node is {me.name} at {me.address}; {text}"
    gone = [node.name for node in before if node not in now][:NAMED_MAX]
    return f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone; {text}" if gone else text
