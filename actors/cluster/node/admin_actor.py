"""A node's admin interface: one actor that answers commands and nodes that are about to join.

It exists only while a client is connected: an idle actor system costs more than heartbeats do.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Protocol

import structlog

from zbmd.actors.cluster.contracts import TEXT_CHARS_MAX
from zbmd.actors.cluster.node import contracts
from zbmd.actors.cluster.node.incarnation import Incarnation
from zbmd.actors.cluster.state.job_table import RankEntry, Stop, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.rank.environment import spare_ranks
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.tcp.link import TcpLink

# --- members and jobs as this node sees them --------------------------------------------------------------


def member_infos(incarnation: Incarnation) -> tuple[contracts.MemberInfo, ...]:
    """The members, by id."""
    return tuple(_info(incarnation, node) for node in incarnation.machine.view.nodes)


def job_infos(view: ClusterView, only: int) -> tuple[contracts.JobInfo, ...]:
    """The jobs of a view, or the one job of that id."""
    found = [job for job in view.jobs.jobs if only in (0, job.id)]
    return tuple(
        contracts.JobInfo(
            job=job.id,
            target=job.spec.target[:TEXT_CHARS_MAX],
            phase=job.phase.value,
            reason=job.reason,
            outcome="" if job.outcome is None else job.outcome.value,
            submitter=_called(view, job.submitter),
            epoch=job.epoch,
            restarts=job.restarts_total,
            nodes_min=job.spec.nodes_min,
            nodes_max=job.spec.nodes_max,
            ranks=tuple(_rank(view, entry) for entry in job.ranks),
        )
        for job in found
    )


def _rank(view: ClusterView, entry: RankEntry) -> contracts.RankInfo:
    node = None if entry.node is None else view.by_id.get(entry.node.id)
    return contracts.RankInfo(
        rank=entry.rank,
        state=entry.state.value,
        incarnation=entry.incarnation,
        node="" if entry.node is None else _called(view, entry.node),
        address="" if node is None or node.key != entry.node else node.address,
    )


def _called(view: ClusterView, key: NodeKey) -> str:
    node = view.by_id.get(key.id)
    return (node.name if node is not None and node.key == key else "") or str(key)


def _info(incarnation: Incarnation, node: Node) -> contracts.MemberInfo:
    key, own = node.key, node.key == incarnation.me.key
    heard_ns, limit_ns = incarnation.beats.silence(key)
    dialed, accepted, why = incarnation.links.links(key)
    hail, skew_ns = incarnation.hails.get(key, (None, 0))
    if own:
        state = "this node"
    elif heard_ns is None:
        state = "not observed"
    else:
        state = "silent" if heard_ns >= limit_ns else "heard"
    return contracts.MemberInfo(
        node=node,
        state=state,
        heard_ms=-1 if heard_ns is None else heard_ns // 1_000_000,
        limit_ms=-1 if heard_ns is None else limit_ns // 1_000_000,
        links_dialed=dialed,
        links_accepted=accepted,
        skew_ms=round(skew_ns / 1e6),
        release=hail.release if hail is not None else "",
        proven_by_kernel=incarnation.deaths.watches(key),
        why="" if own or dialed or accepted else why[:1000],
        spares=_spares(incarnation.machine.view, key),
    )


def _spares(view: ClusterView, node: NodeKey) -> int:
    """Return how many spare ranks the jobs of a node have it keep."""
    kept = 0
    for job in view.jobs.jobs:
        if node in job.nodes():
            with contextlib.suppress(UserError):  # such a job fails, and says so
                kept += spare_ranks(dict(job.spec.environment))
    return kept


log: Final = structlog.stdlib.get_logger("zbmd.cluster")


class AdminHandler(Protocol):
    """Answers the requests that the admin actor takes. Called on the cluster's loop."""

    def admission(self, request: contracts.AdmissionRequest) -> contracts.AdmissionReply:
        """Whether a node may join as it is, and why not."""
        ...

    def members(self) -> contracts.MembersReply:
        """The cluster as this node sees it."""
        ...

    def clock(self) -> contracts.ClockReply:
        """This host's wall clock."""
        ...

    def leave_asked(self) -> contracts.Leaving:
        """Leave the cluster in order, then end the node."""
        ...

    def token(self) -> contracts.TokenReply:
        """Return what another host needs to join."""
        ...

    async def order(self, order: Submit | Stop) -> contracts.OrderReply:
        """Have the cluster agree on an order."""
        ...

    def jobs(self, request: contracts.JobsRequest) -> contracts.JobsReply:
        """The jobs of the cluster."""
        ...

    def printed(self, request: contracts.OutputRequest) -> contracts.OutputReply:
        """Return lines that a job's ranks printed on this node."""
        ...

    async def records(self) -> contracts.RecordsReply:
        """Return which records of jobs this node has."""
        ...

    async def record(self, request: contracts.RecordRequest) -> contracts.RecordReply:
        """Return bytes of a record."""
        ...

    def actors_address(self) -> contracts.ActorsAddressReply:
        """Return the address of this node's actors."""
        ...


class JobRecordStore(Protocol):
    """The records of jobs that ran on this node. Called from any thread; may read files."""

    def listed(self) -> tuple[contracts.RecordInfo, ...]:
        """Return the records, the oldest first."""
        ...

    def page(self, began_ns: int, offset: int) -> bytes:
        """Return at most `RECORD_PAGE_BYTES` of a record from `offset` on; none if it is gone."""
        ...


class NoRecords:
    """A `JobRecordStore` without any: of a node that exists for one job, whose launcher keeps the record."""

    def listed(self) -> tuple[contracts.RecordInfo, ...]:
        """See `JobRecordStore`."""
        return ()

    def page(self, began_ns: int, offset: int) -> bytes:
        """See `JobRecordStore`."""
        return b""


class AdminActor(Actor):
    """Answers at `ADMIN_ACTOR`."""

    def __init__(self, handler: AdminHandler) -> None:
        self._handler = handler

    @on(contracts.AdmissionRequest)
    async def admission(self, request: contracts.AdmissionRequest) -> contracts.AdmissionReply:
        """See `AdminHandler.admission`."""
        return self._handler.admission(request)

    @on(contracts.MembersRequest)
    async def members(self, _: contracts.MembersRequest) -> contracts.MembersReply:
        """See `AdminHandler.members`."""
        return self._handler.members()

    @on(contracts.ClockRequest)
    async def wall_clock(self, _: contracts.ClockRequest) -> contracts.ClockReply:
        """See `AdminHandler.clock`."""
        return self._handler.clock()

    @on(contracts.LeaveRequest)
    async def leave(self, _: contracts.LeaveRequest) -> contracts.Leaving:
        """See `AdminHandler.leave_asked`."""
        return self._handler.leave_asked()

    @on(contracts.TokenRequest)
    async def token(self, _: contracts.TokenRequest) -> contracts.TokenReply:
        """See `AdminHandler.token`."""
        return self._handler.token()

    @on(contracts.OrderRequest)
    async def order(self, request: contracts.OrderRequest) -> contracts.OrderReply:
        """See `AdminHandler.order`."""
        return await self._handler.order(request.order)

    @on(contracts.JobsRequest)
    async def jobs(self, request: contracts.JobsRequest) -> contracts.JobsReply:
        """See `AdminHandler.jobs`."""
        return self._handler.jobs(request)

    @on(contracts.OutputRequest)
    async def printed(self, request: contracts.OutputRequest) -> contracts.OutputReply:
        """See `AdminHandler.printed`."""
        return self._handler.printed(request)

    @on(contracts.RecordsRequest)
    async def records(self, _: contracts.RecordsRequest) -> contracts.RecordsReply:
        """See `AdminHandler.records`."""
        return await self._handler.records()

    @on(contracts.RecordRequest)
    async def record(self, request: contracts.RecordRequest) -> contracts.RecordReply:
        """See `AdminHandler.record`."""
        return await self._handler.record(request)

    @on(contracts.ActorsAddressRequest)
    async def actors_address(self, _: contracts.ActorsAddressRequest) -> contracts.ActorsAddressReply:
        """See `AdminHandler.actors_address`."""
        return self._handler.actors_address()


class AdminServer:
    """Serves admin clients on the running loop."""

    def __init__(self, name: str, incarnation: int, handler: AdminHandler) -> None:
        self._name = name
        self._incarnation = incarnation
        self._handler = handler
        self._system: ActorSystem | None = None
        self._clients = 0
        self._waiting: list[TcpLink] = []
        self._work: asyncio.Task[None] | None = None
        self._closed = False

    def serve(self, link: TcpLink) -> None:
        """Answer a client until it disconnects."""
        if self._closed:
            link.close()
            return
        self._waiting.append(link)
        self._set_to_work()

    async def close(self) -> None:
        """Disconnect every client. Idempotent."""
        self._closed = True
        if self._work is not None:
            await asyncio.wait([self._work])
        await self._go()

    def _set_to_work(self) -> None:
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._open_or_go(), name="admin")

    async def _open_or_go(self) -> None:
        """Attach the waiting clients; stop the actor system if none is left."""
        while self._waiting and not self._closed:
            if self._system is None:
                system = ActorSystem(self._name, incarnation=self._incarnation)
                await system.spawn(AdminActor, self._handler, name=contracts.ADMIN_ACTOR)
                self._system = system
            while self._waiting:
                self._admit(self._system, self._waiting.pop())
        for link in self._waiting:
            link.close()
        self._waiting.clear()
        if not self._clients:
            await self._go()

    def _admit(self, system: ActorSystem, link: TcpLink) -> None:
        self._clients += 1
        try:
            system.attach(link, on_closed=self._gone)
        except ZbmdError as error:
            self._clients -= 1
            log.warning("link closed", name=link.peer.name, reason=str(error))
            link.close()

    def _gone(self, _: ZbmdError | None) -> None:
        self._clients -= 1
        if not self._clients and not self._closed:
            self._set_to_work()

    async def _go(self) -> None:
        system, self._system = self._system, None
        if system is not None:
            await system.stop()
