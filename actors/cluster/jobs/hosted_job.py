"""One job on one node: the links to its ranks, and its part in hang detection."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol, assert_never

import structlog

from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.contracts import (
    HangAsk,
    HangBeats,
    HangEnd,
    HangMessage,
    HangSeen,
    HangStanding,
)
from zbmd.actors.cluster.jobs.hang_relay import HangRelay
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.node_machine import LocalJob, ProcessState
from zbmd.actors.cluster.local_deaths import boot_id
from zbmd.actors.cluster.state.job_table import JobSpec
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.actors.hangs.collector import HangCollector
from zbmd.actors.hangs.verdict import AskStanding, HangNotice, LookOutside, OnHang, Replace
from zbmd.actors.host.address import host_address
from zbmd.actors.host.events import HostEvent, RankReport
from zbmd.actors.host.links import HostLinks, host_identity
from zbmd.actors.host.processes import RankProcess, resident_bytes
from zbmd.actors.process.template import ForkRequest
from zbmd.actors.rank.environment import RankEnvironment, port_of_job, progress_deadline_ns
from zbmd.actors.rank.host_contracts import (
    Join,
    Linked,
    LinkLost,
    NodeStatus,
    RankStatus,
    Report,
    read_report,
)
from zbmd.actors.replay.process_capture import CAPTURE_VARIABLE
from zbmd.actors.routing.route_actor import RouteTable
from zbmd.actors.view import RankState
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.host import process as descriptors
from zbmd.transport.shm.death_notice import DeathNotice

log: Final = structlog.stdlib.get_logger("zbmd.cluster.job")

ON_HANG_VARIABLE: Final = "ZBMD_ON_HANG"
_SHOWN: Final = {
    ProcessState.FORKING: RankState.WAITING,
    ProcessState.STARTED: RankState.STARTING,
    ProcessState.JOINED: RankState.JOINED,
}


def memory_domain() -> str:
    """What processes that can share memory with us call their host, and no others.

    They run under the same kernel and in the same network namespace, where abstract sockets are.
    """
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{boot_id() or os.uname().nodename}/{network}"


class JobHandler(Protocol):
    """Serves a job on this node. Called on the loop; must not block."""

    recorder: Recorder
    clock: HybridClock

    def put(self, event: e.Event) -> None:
        """Put an event to the machine."""
        ...

    def local(self, job: int) -> LocalJob | None:
        """Return the machine's state of the job."""
        ...

    def process(self, key: RankKey) -> RankProcess | None:
        """Return a process that is not reaped yet."""
        ...

    def noticed(self, key: RankKey, notice: DeathNotice) -> bool:
        """Note the end of a process; return whether it is new."""
        ...

    def kill(self, key: RankKey) -> None:
        """Kill a process."""
        ...

    def send(self, to: NodeKey, message: Contract) -> None:
        """Send to another node."""
        ...

    def stop_job(self, job: int, reason: str) -> None:
        """Have the cluster end a job."""
        ...

    def tell(self, job: int, event: HostEvent) -> None:
        """Report an event to the node's owner."""
        ...

    @property
    def template_pid(self) -> int:
        """The template's process id."""
        ...


class HostedJob:
    """The links and the watchdogs of one job's ranks.

    listen: where they accept members on other hosts; captures: where they record, in a folder of the job;
    finder: what the node knows of the ways to processes of the cluster.
    """

    def __init__(
        self,
        spec: JobSpec,
        node: NodeKey,
        handler: JobHandler,
        *,
        listen: str,
        captures: Path | None = None,
        finder: RouteTable | None = None,
    ) -> None:
        self._finder = finder
        self.spec = spec
        self._captured = {} if captures is None else {CAPTURE_VARIABLE: str(captures / f"job-{spec.job:x}")}
        # Two clusters of one host may call nodes and jobs alike.
        names = (f"{node.id:x}", f"{node.incarnation:x}", os.urandom(4).hex())
        self.address = host_address(load_or_create_cookie(), spec.job, *names)
        self._listen = listen
        self._handler = handler
        self._began_ns = time.monotonic_ns()
        self._deadlines = derive(spec.recovery_budget_ns)
        self._environment = dict(spec.environment)
        self._relay = HangRelay(spec.job, handler.send)
        self._links: HostLinks | None = None
        self._hangs: HangCollector | None = None

    async def open(self) -> None:
        """Start to listen. Raises `UserError` for an environment that cannot be, OSError, `OutOfMemory`."""
        deadline_ns, on_hang = progress_deadline_ns(self._environment), _on_hang(self._environment)
        descriptors.make_room(self.spec.ranks_per_node)
        self._links = HostLinks(
            address=self.address,
            identity=host_identity(self.spec.job),
            clock=self._handler.clock,
            deadlines=self._deadlines,
            recorder=self._handler.recorder,
            handler=self,
            finder=self._finder,
        )
        await self._links.open()
        self._hangs = HangCollector(
            self.address, deadline_ns=deadline_ns, on_hang=on_hang, desk=self, elsewhere=self._relay
        )
        self._hangs.open()

    async def close(self) -> None:
        """Release everything. Idempotent."""
        if self._hangs is not None:
            self._hangs.close()
        if self._links is not None:
            links, self._links = self._links, None
            await links.close()

    @property
    def links(self) -> HostLinks:
        """To its ranks."""
        assert self._links is not None, f"job {self.spec.job:x} is not open"
        return self._links

    def request(self, key: RankKey, *, master_host: str) -> ForkRequest:
        """Return the template's fork request. master_host: MASTER_ADDR of the ranks on all hosts."""
        spec = self.spec
        environment = RankEnvironment(
            rank=key.rank,
            world_size=spec.world_size,
            local_world_size=spec.ranks_per_node,
            incarnation=key.incarnation,
            job=spec.job,
            node_address=self.address,
            arena_bytes=spec.arena_bytes,
            recovery_budget_ns=spec.recovery_budget_ns,
            progress_deadline_ns=progress_deadline_ns(self._environment),
            host=memory_domain(),
            listen=self._listen,
        )
        return ForkRequest(
            job=spec.job,
            rank=key.rank,
            incarnation=key.incarnation,
            target=spec.target,
            is_module=spec.is_module,
            arguments=spec.arguments,
            environment={
                "MASTER_PORT": str(port_of_job(f"{spec.job:x}")),
                **self._captured,
                **self._environment,
                **environment.variables(),
                "MASTER_ADDR": master_host,
            },
        )

    # -- `HostHandler` ---------------------------------------------------------------------------------------

    def _key(self, rank: int, incarnation: int) -> RankKey:
        return RankKey(self.spec.job, rank, incarnation)

    def is_current(self, rank: int, incarnation: int) -> bool:
        """See `HostHandler`."""
        local = self._handler.local(self.spec.job)
        return local is not None and local.living(rank, incarnation) is not None

    def joined(self, message: Join) -> None:
        """See `HostHandler`."""
        key = self._key(message.rank, message.incarnation)
        joined = e.Joined(
            key=key, address=message.address, host=message.host, tcp_address=message.tcp_address
        )
        self._handler.put(joined)

    def linked(self, message: Linked) -> None:
        """See `HostHandler`."""
        self._handler.put(e.Linked(key=self._key(message.rank, message.incarnation), epoch=message.epoch))

    def link_lost(self, message: LinkLost) -> None:
        """See `HostHandler`."""
        self._handler.put(e.LinkLost(key=self._key(message.rank, message.incarnation), epoch=message.epoch))

    def reported(self, message: Report) -> None:
        """See `HostHandler`."""
        try:
            payload = read_report(message.payload)
        except RemoteProtocolError as error:
            log.warning("report refused", job=self.spec.job, rank=message.rank, reason=str(error))
            return
        report = RankReport(rank=message.rank, incarnation=message.incarnation, payload=payload)
        self._handler.tell(self.spec.job, report)

    def noticed(self, rank: int, incarnation: int, notice: DeathNotice) -> None:
        """See `HostHandler`."""
        key = self._key(rank, incarnation)
        if self._handler.noticed(key, notice):
            self._handler.put(e.LossProven(key=key))

    async def status(self) -> NodeStatus:
        """See `HostHandler`."""
        local = self._handler.local(self.spec.job)
        processes = [] if local is None else sorted(local.processes.values(), key=lambda p: p.key)
        joined = [p.key.rank for p in processes if p.state is ProcessState.JOINED]
        names = await asyncio.gather(*(self.links.actors(rank) for rank in joined))
        actors = dict(zip(joined, names, strict=True))
        ranks: list[RankStatus] = []
        for process in processes:
            found = self._handler.process(process.key)
            pid = 0 if found is None else found.pid
            ranks.append(
                RankStatus(
                    rank=process.key.rank,
                    pid=pid,
                    incarnation=process.key.incarnation,
                    state=_SHOWN[process.state].value,
                    restarts=process.key.incarnation - 1,
                    memory_bytes=resident_bytes(pid),
                    actors=actors.get(process.key.rank),
                )
            )
        return NodeStatus(
            address=self.address,
            pid=os.getpid(),
            template_pid=self._handler.template_pid,
            target=self.spec.target,
            on_loss=self.spec.on_loss.value,
            epoch=0 if local is None else local.view.epoch,
            restarts=sum(rank.restarts for rank in ranks),
            uptime_s=(time.monotonic_ns() - self._began_ns) / 1e9,
            hangs=() if self._hangs is None else tuple(notice.text for notice in self._hangs.notices),
            ranks=tuple(ranks),
        )

    # -- hangs, also on other hosts --------------------------------------------------------------------------

    def placed(self, me: NodeKey, view: ClusterView) -> None:
        """Take a new view of the cluster."""
        names = {node.key: node.name for node in view.nodes if node.name}
        changed, gone = self._relay.place(me, view.jobs.job(self.spec.job), names)
        if self._hangs is None:
            return
        self._hangs.placed(anew=changed)
        for event in gone:
            self._hangs.hear(event)

    def told(self, sender: NodeKey, word: HangMessage) -> None:
        """Take a hang message of another node."""
        if self._hangs is None:
            return
        match word:
            case HangBeats() | HangStanding() | HangSeen():
                for event in self._relay.events(sender, word):
                    self._hangs.hear(event)
            case HangAsk() | HangEnd():
                if self._relay.obeys(sender):
                    self._hangs.obey(_action_of(word))
            case _:
                assert_never(word)

    # -- `HangDesk` ------------------------------------------------------------------------------------------

    def hung(self, notice: HangNotice) -> None:
        """See `HangDesk`."""
        log.warning(notice.text, job=self.spec.job, at=notice.stack, next_step=notice.next_step)
        self._handler.tell(self.spec.job, notice)

    def end_rank(self, rank: int, incarnation: int) -> None:
        """See `HangDesk`."""
        self._handler.kill(self._key(rank, incarnation))

    def end_run(self, reason: str) -> None:
        """See `HangDesk`."""
        self._handler.stop_job(self.spec.job, reason)


def _action_of(word: HangAsk | HangEnd) -> AskStanding | LookOutside | Replace:
    rank, incarnation = word.rank, word.incarnation
    if isinstance(word, HangEnd):
        return Replace(rank=rank, incarnation=incarnation, reason="the job's hang judge asked for it")
    if word.outside:
        return LookOutside(rank=rank, incarnation=incarnation)
    return AskStanding(rank=rank, incarnation=incarnation)


def _on_hang(environment: Mapping[str, str]) -> OnHang:
    """Return the policy for hangs from ZBMD_ON_HANG. Raises `UserError`."""
    text = environment.get(ON_HANG_VARIABLE, OnHang.REPORT.value)
    try:
        return OnHang(text)
    except ValueError:
        choices = ", ".join(policy.value for policy in OnHang)
        raise UserError(f"{ON_HANG_VARIABLE}: expected one of {choices}, got {text!r}.") from None
