"""One job on one node: the links to its ranks, and its part in hang detection.

Over several hosts the watchdogs of all ranks report to one judge: the lowest of the nodes that run the job by
the job table, so all nodes agree on it. The others forward what their watchdogs report and do what the judge
asks. A new judge starts from the current state, so it may report an ongoing hang once more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, assert_never

import structlog

from zbmd.actors.cluster.contracts import (
    HangAsk,
    HangBeats,
    HangDebugged,
    HangEnd,
    HangExtend,
    HangMessage,
    HangOrder,
    HangReport,
    HangSeen,
    HangStanding,
)
from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.host_links import HostLinks, host_address, host_identity
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.node_machine import LocalJob
from zbmd.actors.cluster.jobs.rank_processes import resident_bytes
from zbmd.actors.cluster.jobs.reports import HostEvent, RankInfo, RankReport, SpareInfo
from zbmd.actors.cluster.local_deaths import memory_domain
from zbmd.actors.cluster.state.job_table import Job, JobSpec
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.actors.hangs.collector import HangCollector
from zbmd.actors.hangs.verdict import (
    AskStanding,
    ExtendTimeouts,
    HangEvent,
    HangNotice,
    LookOutside,
    OnHang,
    RankAction,
    RankAlive,
    RankDebugged,
    RankGone,
    RankPosition,
    RankSeen,
    RankWatched,
    Replace,
    Ticked,
)
from zbmd.actors.hangs.wire import cut
from zbmd.actors.process.template import ForkRequest
from zbmd.actors.rank.environment import (
    LOST_DEVICES_VARIABLE,
    RankEnvironment,
    port_of_job,
    progress_deadline_ns,
)
from zbmd.actors.rank.host_contracts import (
    DEVICE_LOST,
    DEVICES_MAX,
    KEPT_STATE,
    Join,
    Linked,
    LinkLost,
    NodeStatus,
    RankStatus,
    Report,
    SpareStatus,
    read_report,
)
from zbmd.actors.replay.process_capture import CAPTURE_VARIABLE
from zbmd.actors.routing.routes import RouteTable
from zbmd.actors.snapshots.keeper import SnapshotKeeper
from zbmd.actors.view import RankState
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.host import process as descriptors
from zbmd.transport.host.threads import thread_share
from zbmd.transport.host.topology.cpus import usable_cpus
from zbmd.transport.shm.death_notice import DeathNotice

# --- hang detection over the hosts of a job ---------------------------------------------------------------


hang_log: Final = structlog.stdlib.get_logger("zbmd.cluster.hang")

RankSlot = tuple[NodeKey, int]
"""The node that runs a rank, and the rank's incarnation."""


def judge_of(job: Job) -> NodeKey | None:
    """Return the node that judges a job's hangs; None if no node runs the job."""
    return min(job.nodes(), default=None)


def slots_of(job: Job | None) -> dict[int, RankSlot]:
    """Return the node and incarnation of each running rank of a job."""
    entries = () if job is None else job.ranks
    return {e.rank: (e.node, e.incarnation) for e in entries if e.lives and e.node is not None}


class HangRelay:
    """One node's part in the judgement of one job. send: tells another node's incarnation.

    A `zbmd.actors.hangs.collector.HangPeers`; `place` it with each view.
    """

    def __init__(self, job: int, send: Callable[[NodeKey, HangMessage], None]) -> None:
        self._job = job
        self._send = send
        self._me: NodeKey | None = None
        self._judge: NodeKey | None = None
        self._slots: dict[int, RankSlot] = {}
        self._names: Mapping[NodeKey, str] = {}
        self._heard: set[tuple[int, int]] = set()

    def place(
        self, me: NodeKey, job: Job | None, names: Mapping[NodeKey, str]
    ) -> tuple[bool, list[RankGone]]:
        """Take a new job table; return whether the judge changed, and the remote ranks that are gone."""
        before, judge = self._judge, None if job is None else judge_of(job)
        slots = slots_of(job)
        gone = [
            RankGone(rank=rank, incarnation=slot[1])
            for rank, slot in self._slots.items()
            if slot[0] != self._me and slots.get(rank) != slot
        ]
        self._me, self._judge, self._slots, self._names = me, judge, slots, names
        self._heard = {key for key in self._heard if slots.get(key[0]) == (me, key[1])}
        return judge != before, gone

    @property
    def judges(self) -> bool:
        """Whether this node is the judge."""
        return self._judge is None or self._judge == self._me

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's node; empty while one node runs all ranks."""
        slot = self._slots.get(rank)
        if slot is None or len({node for node, _ in self._slots.values()}) < 2:
            return ""
        return self._names.get(slot[0]) or str(slot[0])

    def tell(self, event: HangEvent) -> None:
        """Forward a local watchdog's event to the judge."""
        if self._judge is None:
            return
        match event:
            case RankWatched() | RankAlive():
                self._heard.add((event.rank, event.incarnation))
            case Ticked() if not self._heard:
                pass
            case Ticked():
                self._send(self._judge, HangBeats(job=self._job, ranks=tuple(sorted(self._heard))))
                self._heard.clear()
            case RankPosition(rank=rank, incarnation=incarnation, standing=standing):
                self._send(self._judge, HangStanding(self._job, rank, incarnation, standing))
            case RankSeen(rank=rank, incarnation=incarnation, words=words):
                self._send(self._judge, HangSeen(self._job, rank, incarnation, cut(words)))
            case RankDebugged(rank=rank, incarnation=incarnation):
                self._send(self._judge, HangDebugged(self._job, rank, incarnation))
            case RankGone(rank=rank, incarnation=incarnation):
                self._heard.discard((rank, incarnation))
                self._send(self._judge, HangSeen(self._job, rank, incarnation, "", gone=True))
            case _:
                assert_never(event)

    def ask(self, action: RankAction) -> bool:
        """Send the action to the node of a rank; False if that rank runs on no other node."""
        rank, incarnation = action.rank, action.incarnation
        node, runs = self._slots.get(rank, (self._me, 0))
        if node is None or node == self._me or runs != incarnation:
            return False
        match action:
            case AskStanding() | LookOutside():
                outside = isinstance(action, LookOutside)
                self._send(node, HangAsk(self._job, rank, incarnation, outside))
            case Replace():
                self._send(node, HangEnd(self._job, rank, incarnation))
            case ExtendTimeouts():
                self._send(node, HangExtend(self._job, rank, incarnation))
        return True

    def events(self, sender: NodeKey, word: HangReport) -> Iterator[HangEvent]:
        """Yield the events that another node forwards, for ranks that it runs."""
        if not self.judges:
            return  # it has not heard yet that another one is
        if isinstance(word, HangBeats):
            for rank, incarnation in word.ranks:
                if self._slots.get(rank) == (sender, incarnation):
                    yield RankWatched(rank=rank, incarnation=incarnation, host=self.host_of(rank))
                    yield RankAlive(rank=rank, incarnation=incarnation)
            return
        rank, incarnation = word.rank, word.incarnation
        if self._slots.get(rank) != (sender, incarnation):
            hang_log.debug(
                "ignored a hang report for a rank that the sender does not run", node=str(sender), rank=rank
            )
            return
        yield RankWatched(rank=rank, incarnation=incarnation, host=self.host_of(rank))
        if isinstance(word, HangStanding):
            yield RankPosition(rank=rank, incarnation=incarnation, standing=word.standing)
        elif isinstance(word, HangDebugged):
            yield RankDebugged(rank=rank, incarnation=incarnation)
        elif word.gone:
            yield RankGone(rank=rank, incarnation=incarnation)
        else:
            yield RankSeen(rank=rank, incarnation=incarnation, words=word.words)

    def obeys(self, sender: NodeKey) -> bool:
        """Whether `sender` is the judge, so that its requests are carried out."""
        return sender == self._judge


log: Final = structlog.stdlib.get_logger("zbmd.cluster.job")

ON_HANG_VARIABLE: Final = "ZBMD_ON_HANG"
KEEP_MEMORY_VARIABLE: Final = "ZBMD_KEEP_MEMORY"
"""`off`: the memory of a rank that is killed goes with it, as that of a lost host would."""


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

    def ranks(self, job: int) -> dict[int, RankInfo]:
        """Return the current processes of the ranks that this node runs or ran."""
        ...

    def spares(self, job: int) -> list[SpareInfo]:
        """Return the spares of the job on this node."""
        ...

    def noticed(self, key: RankKey, notice: DeathNotice) -> None:
        """Note the end of a process, and put it to the machine if it is new."""
        ...

    def step_committed(self, job: int) -> None:
        """Note that a rank has committed a step which none of this node had reported before."""
        ...

    def send_signal(self, key: RankKey, number: signal.Signals) -> bool:
        """Send a signal to a process; return False if it is gone."""
        ...

    def send(self, to: NodeKey, message: Contract) -> None:
        """Send to another node."""
        ...

    def fail_job(self, job: int, reason: str) -> None:
        """Have the cluster end a job as failed."""
        ...

    def tell(self, job: int, event: HostEvent) -> None:
        """Report an event to the node's owner; without one, log a hang."""
        ...

    @property
    def template_pid(self) -> int:
        """The template's process id."""
        ...


class HostedJob:
    """The links and the watchdogs of one job's ranks.

    listen: where they accept members on other hosts, empty if there are none; captures: where they record, in
    a folder of the job; finder: what the node knows of the routes to processes of the cluster; environment:
    of the node, whose variables its ranks have unless the job sets them; snapshots: has the memory of ranks
    outlive this process.
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
        environment: Mapping[str, str] | None = None,
        snapshots: SnapshotKeeper | None = None,
    ) -> None:
        self._finder, self._snapshots = finder, snapshots
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
        variables = {**(environment or {}), **self._environment}
        threads = thread_share(variables, ranks=spec.ranks_per_node, cores=usable_cpus())
        self._threads = threads.variables
        self._relay = HangRelay(spec.job, handler.send)
        self._lost_devices: set[int] = set()
        self._step = -1
        """The highest that a rank has reported."""
        self._links: HostLinks | None = None
        self._hangs: HangCollector | None = None
        self._keeps = keeps_memory(variables)
        self._kept: dict[int, int] = {}
        """Of each rank that ran here, the memfd of its arena, which outlives its processes."""

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
        while self._kept:
            os.close(self._kept.popitem()[1])

    @property
    def links(self) -> HostLinks:
        """To its ranks."""
        assert self._links is not None, f"job {self.spec.job:x} is not open"
        return self._links

    def kept_fd(self, rank: int) -> int | None:
        """Return the memfd in which the processes of a rank have their arena, one after the other.

        It is empty, and without a size, before the first one comes. None if that was not wanted. Raises
        OSError.
        """
        if not self._keeps:
            return None
        if rank not in self._kept:
            found = None if self._snapshots is None else self._snapshots.take(rank)
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._kept[rank] = os.memfd_create(f"zbmd-arena-{rank}", flags) if found is None else found
            if self._snapshots is not None:
                self._snapshots.add(rank)
        return self._kept[rank]

    def debugging(self, rank: int, incarnation: int, *, is_on: bool) -> None:
        """A rank stops in a debugger, or goes on."""
        if self._hangs is not None:
            self._hangs.debugging(rank, incarnation, is_on=is_on)

    def request(
        self, key: RankKey, *, master_host: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> ForkRequest:
        """Return the template's fork request.

        master_host: MASTER_ADDR of the ranks on all hosts; more: variables of this rank alone.
        """
        spec, elsewhere, lost = self.spec, bool(self._listen), sorted(self._lost_devices)
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
            host=memory_domain() if elsewhere else "",
            listen=self._listen,
            ranks_min=spec.ranks_min,
            resumes=self._snapshots is not None and self._snapshots.resumes,
            holds=self._snapshots is not None,
        )
        return ForkRequest(
            job=spec.job,
            rank=key.rank,
            incarnation=key.incarnation,
            target=spec.target,
            is_module=spec.is_module,
            arguments=spec.arguments,
            environment={
                **more,
                **({"MASTER_PORT": str(port_of_job(f"{spec.job:x}"))} if elsewhere else {}),
                **self._captured,
                **self._threads,
                **self._environment,
                **({LOST_DEVICES_VARIABLE: ",".join(map(str, lost))} if lost else {}),
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
        if payload.get("kind") == KEPT_STATE:
            if self._snapshots is not None:
                self._snapshots.keep(self._kept)
            return
        device = payload.get("device") if payload.get("kind") == DEVICE_LOST else None
        if isinstance(device, int) and 0 <= device < DEVICES_MAX:
            self._lost_devices.add(device)
            log.warning("a device failed; ranks that start take others", device=device, rank=message.rank)
        step = payload.get("version") if payload.get("kind") == "step" else None
        if isinstance(step, int) and step > self._step:
            self._step = step
            self._handler.step_committed(self.spec.job)
        report = RankReport(rank=message.rank, incarnation=message.incarnation, payload=payload)
        self._handler.tell(self.spec.job, report)

    def noticed(self, rank: int, incarnation: int, notice: DeathNotice) -> None:
        """See `HostHandler`."""
        self._handler.noticed(self._key(rank, incarnation), notice)

    async def status(self) -> NodeStatus:
        """See `HostHandler`."""
        local, infos = self._handler.local(self.spec.job), self._handler.ranks(self.spec.job)
        joined = [rank for rank, info in infos.items() if info.state is RankState.JOINED]
        names = await asyncio.gather(*(self.links.actors(rank) for rank in joined))
        actors = dict(zip(joined, names, strict=True))
        ranks = tuple(
            RankStatus(
                rank=info.rank,
                pid=info.pid,
                incarnation=info.incarnation,
                state=info.state.value,
                restarts=info.incarnation - 1,
                memory_bytes=resident_bytes(info.pid),
                actors=actors.get(info.rank),
            )
            for info in infos.values()
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
            ranks=ranks,
            spares=tuple(
                SpareStatus(pid=one.pid, state=one.state, memory_bytes=resident_bytes(one.pid))
                for one in self._handler.spares(self.spec.job)
            ),
        )

    # -- hangs, also on other hosts --------------------------------------------------------------------------

    def placed(self, me: NodeKey, view: ClusterView) -> None:
        """Take a new view of the cluster."""
        names = {node.key: node.name for node in view.nodes if node.name}
        changed, gone = self._relay.place(me, view.jobs.job(self.spec.job), names)
        if self._hangs is None:
            return
        self._hangs.placed(restarts=changed)
        for event in gone:
            self._hangs.hear(event)

    def received(self, sender: NodeKey, word: HangMessage) -> None:
        """Take a hang message of another node."""
        if self._hangs is None:
            return
        match word:
            case HangBeats() | HangStanding() | HangSeen() | HangDebugged():
                for event in self._relay.events(sender, word):
                    self._hangs.hear(event)
            case HangAsk() | HangEnd() | HangExtend():
                if self._relay.obeys(sender):
                    self._hangs.obey(_action_of(word))
            case _:
                assert_never(word)

    # -- `HangDesk` ------------------------------------------------------------------------------------------

    def hung(self, notice: HangNotice) -> None:
        """See `HangDesk`."""
        self._handler.tell(self.spec.job, notice)

    def end_rank(self, rank: int, incarnation: int) -> None:
        """See `HangDesk`."""
        self._handler.send_signal(self._key(rank, incarnation), signal.SIGKILL)

    def end_run(self, reason: str) -> None:
        """See `HangDesk`."""
        self._handler.fail_job(self.spec.job, reason)


def _action_of(word: HangOrder) -> RankAction:
    rank, incarnation = word.rank, word.incarnation
    if isinstance(word, HangEnd):
        return Replace(rank=rank, incarnation=incarnation, reason="the job's hang judge asked for it")
    if isinstance(word, HangExtend):
        return ExtendTimeouts(rank=rank, incarnation=incarnation)
    if word.outside:
        return LookOutside(rank=rank, incarnation=incarnation)
    return AskStanding(rank=rank, incarnation=incarnation)


def keeps_memory(environment: Mapping[str, str]) -> bool:
    """Return whether arenas outlive their ranks, from ZBMD_KEEP_MEMORY. Raises `UserError`."""
    text = environment.get(KEEP_MEMORY_VARIABLE, "on")
    if text not in ("on", "off"):
        raise UserError(f"{KEEP_MEMORY_VARIABLE}: expected on or off, got {text!r}.")
    return text == "on"


def _on_hang(environment: Mapping[str, str]) -> OnHang:
    """Return the policy for hangs from ZBMD_ON_HANG. Raises `UserError`."""
    text = environment.get(ON_HANG_VARIABLE, OnHang.REPORT.value)
    try:
        return OnHang(text)
    except ValueError:
        choices = ", ".join(policy.value for policy in OnHang)
        raise UserError(f"{ON_HANG_VARIABLE}: expected one of {choices}, got {text!r}.") from None
