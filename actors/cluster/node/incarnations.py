"""The incarnations of a node, one after the other, on the loop of the cluster's thread.

An incarnation ends when its machine stops: when the node leaves, that is all; else it comes back with its
next incarnation, and knocks where it knows members to be. Each incarnation has a listener, links and a desk
of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import structlog

from zbmd.actors.cluster.contracts import TEXT_CHARS_MAX
from zbmd.actors.cluster.heartbeats.connections import NO_DEVICE, NoDevice, OwnDevice, own_device
from zbmd.actors.cluster.local_deaths import boot_id
from zbmd.actors.cluster.membership.machine import LEFT, MemberState
from zbmd.actors.cluster.node import contracts
from zbmd.actors.cluster.node.admin_actor import AdminServer, JobRecordStore, job_infos, member_infos
from zbmd.actors.cluster.node.incarnation import Incarnation, MakeWitness, incarnation_recorder, wall_ns
from zbmd.actors.cluster.node.join import (
    JOIN_ADDRESSES_MAX,
    JoinApplication,
    Joiner,
    JoinFailed,
    JoinOffer,
    JoinTimedOut,
    advertised,
    find_member,
    has_namesake,
    is_loopback,
    loopback_name,
    own_addresses,
    refuse_join,
)
from zbmd.actors.cluster.node.persistent_state import NodeStateStore
from zbmd.actors.cluster.peer_links import process_name
from zbmd.actors.cluster.state.job_table import CommandRefused, Order, Stop, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, quorum
from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.process.output import JobOutput
from zbmd.actors.replay.process_capture import CaptureSettings
from zbmd.transport.clock.deadlines import Deadlines, derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import UserError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, parse_address
from zbmd.transport.tcp.link import TcpLink

log: Final = structlog.stdlib.get_logger("zbmd.cluster")

PORT_DEFAULT: Final = 29400
REJOIN_PAUSE_S: Final = 0.1
"""After an incarnation has ended; doubled with each that was let in nowhere."""
REJOIN_PAUSE_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node. name: what people call it; joins: members to join.

    Without `joins` it goes back to the cluster that it was in when it last ran; if there was none, or `new`
    is given, it founds one. founds: it also does so if no member is found behind `joins`; join_ns: how long
    they are tried, None for as long as a view may take. recovery_budget_ns: None for the
    cluster's, or the default; witness: makes each incarnation its own, if the cluster has one; capture: where
    incarnations are recorded, if they are; run: what the cluster is made for, see `JoinApplication`; domain:
    see `Node`; wall_clock: ns since 1970, only told to people.
    """

    name: str
    listen: TcpAddress = field(default_factory=lambda: TcpAddress(host="", port=PORT_DEFAULT))
    joins: tuple[TcpAddress, ...] = ()
    new: bool = False
    founds: bool = False
    join_ns: int | None = None
    recovery_budget_ns: int | None = None
    cookie: bytes = field(repr=False)
    settings: TcpSettings = field(default_factory=TcpSettings)
    release: str = ""
    witness: MakeWitness | None = None
    capture: CaptureSettings | None = None
    run: str = ""
    domain: str = ""
    wall_clock: Callable[[], int] = wall_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinDelayed:
    """The obstacle to joining, which is tried again."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationBegan:
    """An incarnation begins: what follows is about this one, until it is over."""

    me: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewEntered:
    """The node acts on this view. All members know it."""

    me: Node
    view: ClusterView
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSuspected:
    """A member is no longer heard: not yet out, and perhaps heard again."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPartFound:
    """A member of another cluster of the same run, in which its job runs, has asked. age_ns: of that one."""

    node: Node
    age_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationEnded:
    """This incarnation has ended; unless it has left, the node tries to come back with its next."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """Another node said something that is not about membership."""

    sender: NodeKey
    contract: Contract


NodeEvent: TypeAlias = (
    JoinDelayed
    | IncarnationBegan
    | ViewEntered
    | MemberSuspected
    | RunningPartFound
    | IncarnationEnded
    | MessageReceived
)


class NodeProcess(Protocol):
    """The process around the cluster's thread. Called there."""

    output: JobOutput
    records: JobRecordStore
    actors_at: str

    def tell(self, event: NodeEvent) -> None:
        """Take an event."""
        ...

    def order(self, order: Order) -> concurrent.futures.Future[int]:
        """Give an order; its number. Fails with `CommandRefused`."""
        ...


class Incarnations:
    """See the module."""

    def __init__(self, config: NodeConfig, state: NodeStateStore, host: NodeProcess) -> None:
        self._config = config
        self._state = state
        self._host = host
        self._tell = host.tell
        self._deadlines = derive(*([config.recovery_budget_ns] if config.recovery_budget_ns else []))
        self._listen = config.listen
        self._joins: tuple[TcpAddress, ...] = ()
        self._incarnation: Incarnation | None = None
        self._admin: AdminServer | None = None
        self._leaving = asyncio.Event()
        self._last_view: ClusterView | None = None
        self._namesake: Node | None = None
        self._remembering: asyncio.Task[None] | None = None
        self._to_remember: tuple[str, ...] | None = None
        self._was_member = False
        self._open = False
        self._rdma: OwnDevice | NoDevice = NO_DEVICE

    # -- the course --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until the node has left. Raises `JoinFailed`, and other `UserError`s."""
        self._rdma = await asyncio.to_thread(own_device, os.environ, self._config.settings.protection)
        offer = await self._find_offer()
        pause_s = REJOIN_PAUSE_S
        try:
            while not self._leaving.is_set():  # ends with the node
                members_before = self._was_member
                reason = await self._run_incarnation(offer)
                if self._namesake is not None:
                    raise JoinFailed(f"{self._namesake} was let in by the same name: give --name another")
                if reason == LEFT:
                    break
                if not self._was_member:
                    raise JoinFailed(f"{reason}.")
                offer = None
                pause_s = REJOIN_PAUSE_S if not members_before else min(2 * pause_s, REJOIN_PAUSE_S_MAX)
                try:
                    async with asyncio.timeout(pause_s):
                        await self._leaving.wait()
                except TimeoutError:
                    continue
            self._remember(())
        finally:
            if self._remembering is not None:
                await asyncio.wait([self._remembering])

    async def _find_offer(self) -> JoinOffer | None:
        """Find a member that admits this node; None if this node founds the cluster."""
        config, deadlines = self._config, self._deadlines
        wrong = await loopback_name(config.listen, deadlines.dial_ns)
        if wrong is not None:
            raise UserError(
                f"--listen {config.listen}: on this host {config.listen.host} means {wrong} (/etc/hosts), "
                "which no other host reaches. Give the address that the others use (`ip addr` shows it), or "
                f"*:{config.listen.port} for all."
            )
        remembered = (
            () if config.joins or config.new else tuple(map(parse_address, self._state.join_addresses))
        )
        join_addresses = list(dict.fromkeys(config.joins or remembered))[:JOIN_ADDRESSES_MAX]
        own = await own_addresses(join_addresses, config.listen, deadlines.dial_ns)
        others = [join_address for join_address in join_addresses if join_address not in own]
        self._joins = tuple(others) if config.joins else ()
        if config.joins and not others and not config.founds:
            raise UserError(
                f"--join {', '.join(map(str, own))} is this node itself. Give the address of another member; "
                "to begin a cluster, leave --join away."
            )
        if not others:
            return None
        seeker = Joiner(
            node_id=self._state.id,
            name=config.name,
            host=config.listen.host if config.listen.is_numeric else "",
            recovery_budget_ns=config.recovery_budget_ns or 0,
            cookie=config.cookie,
            settings=config.settings,
            deadlines=deadlines,
            witnessed=config.witness is not None,
            names_may_come=config.join_ns is not None and not config.founds,
            founds=config.founds,
            run=config.run,
        )
        tell = _unheard if config.founds else self._hindered
        try:
            found = await find_member(others, seeker, tell, config.join_ns or deadlines.view_ns)
        except JoinFailed as error:
            # A member that has us wait has a cluster: another one beside it would split the job.
            if config.founds and not isinstance(error, JoinTimedOut):
                return None
            if remembered:
                raise JoinFailed(
                    f"this node was in a cluster when it last ran, and is let in no more: {error} "
                    "If that cluster is gone, begin another: zbmd-node up --new."
                ) from None
            raise
        self._deadlines = derive(found.recovery_budget_ns)
        return found

    def _hindered(self, text: str) -> None:
        self._tell(JoinDelayed(text=text))

    async def _run_incarnation(self, offer: JoinOffer | None) -> str:
        """From a listener to the end of all links; why it ended."""
        config, key = self._config, self._state.new_incarnation()
        identity = Identity(
            name=process_name(key.id),
            pid=os.getpid(),
            uid=os.getuid(),
            incarnation=key.incarnation,
            contracts=fingerprints(),
        )
        clock = HybridClock()
        recorder = incarnation_recorder(identity, clock, config.capture)
        endpoint = Endpoint(
            identity=identity,
            cookie=config.cookie,
            deadlines=self._deadlines,
            clock=clock,
            recorder=recorder,
        )
        try:
            return await self._lived(key, endpoint, offer)
        finally:
            if recorder is not None:
                recorder.close("this incarnation is over")

    async def _lived(self, key: NodeKey, endpoint: Endpoint, offer: JoinOffer | None) -> str:
        config = self._config
        listener = await tcp.listen(self._listen, self._on_link, endpoint, settings=config.settings)
        self._listen = TcpAddress(host=self._listen.host, port=listener.address.port)
        try:
            towards = None if offer is None else offer.own_host
            address = str(advertised(listener.addresses, towards))
            me = Node(key, address, config.name, config.domain)
            incarnation = self._incarnation = Incarnation(
                me,
                endpoint,
                config.settings,
                self,
                release=config.release,
                witness=config.witness,
                rdma=self._rdma,
                wall_clock=config.wall_clock,
            )
            admin = self._admin = AdminServer(endpoint.identity.name, key.incarnation, self)
            try:
                self._open = True
                self._state.running_at(address)
                self._tell(IncarnationBegan(me=me))
                self._begin(incarnation, offer)
                reason = await incarnation.over
                self._tell(IncarnationEnded(key=key, reason=reason))
                return reason
            finally:
                self._open = False
                await incarnation.close()
                self._incarnation = self._admin = None
                await admin.close()
        finally:
            listener.close()
            await listener.wait_closed()

    def _on_link(self, link: TcpLink) -> None:
        if self._incarnation is not None and self._open:
            self._incarnation.links.accepted(link)
        else:
            link.close()

    def _begin(self, incarnation: Incarnation, offer: JoinOffer | None) -> None:
        if self._leaving.is_set():
            incarnation.leave()
            return
        join_addresses = self._join_addresses(offer)
        if join_addresses:
            incarnation.enter(join_addresses)
        else:
            incarnation.found()

    def _join_addresses(self, offer: JoinOffer | None) -> tuple[Node, ...]:
        """The nodes to ask for admission: with incarnation 0, whichever lives there."""
        if offer is not None:
            known = [offer.node.address]
        elif self._last_view is not None:
            known = [node.address for node in self._last_view.nodes if node.id != self._state.id]
        else:
            return ()
        known += [str(join_address) for join_address in self._joins]
        return tuple(Node(NodeKey(0, 0), address) for address in dict.fromkeys(known[:JOIN_ADDRESSES_MAX]))

    def leave(self) -> None:
        """Leave the cluster in order, then end."""
        self._leaving.set()
        if self._incarnation is not None:
            self._incarnation.leave()

    def order_in(self, key: NodeKey, order: Order) -> None:
        """Ask for a command of this incarnation; nothing if it is over."""
        if self._incarnation is not None and self._incarnation.me.key == key:
            try:
                self._incarnation.order(order)
            except CommandRefused as error:
                log.error("an order was refused", order=type(order).__name__, reason=str(error))

    def say(self, key: NodeKey, to: NodeKey, contract: Contract) -> None:
        """Say something to another member, in this incarnation; nothing if it is over."""
        if self._incarnation is not None and self._incarnation.me.key == key:
            self._incarnation.tell(to, contract)

    # -- `IncarnationHandler` --------------------------------------------------------------------------------

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """See `IncarnationHandler`."""
        incarnation = self._incarnation
        assert incarnation is not None
        first = self._last_view is None or not self._last_view.holds(incarnation.me.key)
        self._last_view, self._was_member = view, True
        if first and (namesake := has_namesake(incarnation.me, view)) is not None:
            self._namesake = namesake
            self.leave()
            return
        self._tell(ViewEntered(me=incarnation.me, view=view, reason=reason))
        self._remember(node.address for node in view.nodes if node.id != incarnation.me.id)

    def _remember(self, join_addresses: Iterable[str]) -> None:
        """Have the addresses of the others stored: those of the latest view, however long a disk takes."""
        self._to_remember = tuple(join_addresses)
        if self._remembering is None or self._remembering.done():
            self._remembering = asyncio.get_running_loop().create_task(self._store())

    async def _store(self) -> None:
        """On another thread: a disk may take its time, and heartbeats must not wait for it."""
        loop = asyncio.get_running_loop()
        while self._to_remember is not None:
            join_addresses, self._to_remember = self._to_remember, None
            try:
                await loop.run_in_executor(None, self._state.remember, join_addresses)
            except UserError as error:
                log.warning("the other members are not remembered", reason=str(error))

    def suspects(self, key: NodeKey, reason: str) -> None:
        """See `IncarnationHandler`."""
        self._tell(MemberSuspected(key=key, reason=reason))

    def received(self, sender: NodeKey, contract: Contract) -> None:
        """See `IncarnationHandler`."""
        self._tell(MessageReceived(sender=sender, contract=contract))

    def visited(self, link: TcpLink) -> None:
        """See `IncarnationHandler`."""
        if self._admin is None:
            link.close()
        else:
            self._admin.serve(link)

    # -- `AdminHandler` --------------------------------------------------------------------------------------

    def admission(self, request: contracts.AdmissionRequest) -> contracts.AdmissionReply:
        """See `AdminHandler`."""
        incarnation = self._living()
        wish = JoinApplication(
            node_id=request.node_id,
            name=request.name,
            host=request.host,
            recovery_budget_ns=request.recovery_budget_ns,
            witnessed=request.witnessed,
            run=request.run,
        )
        own_host = parse_address(incarnation.me.address).host
        budget_ns = self._deadlines.recovery_budget_ns
        witnessed = self._config.witness is not None
        found = refuse_join(
            wish,
            incarnation.machine.view,
            incarnation.me,
            own_host,
            budget_ns,
            witnessed=witnessed,
            run=self._config.run,
        )
        if request.runs_at is not None and request.run == self._config.run:
            self._tell(RunningPartFound(node=request.runs_at, age_ns=request.age_ns))
        return contracts.AdmissionReply(
            node=incarnation.me,
            member=incarnation.machine.state is MemberState.MEMBER,
            recovery_budget_ns=budget_ns,
            refused="" if found is None else found.reason,
            passes=found is not None and found.passes,
            lowest=min((node.id for node in incarnation.machine.view.nodes), default=0),
        )

    def members(self) -> contracts.MembersReply:
        """See `AdminHandler`."""
        incarnation = self._living()
        machine, view = incarnation.machine, incarnation.machine.view
        return contracts.MembersReply(
            answered_by=incarnation.me,
            state=machine.state.value,
            known=view.epoch,
            entered=machine.entered,
            recovery_budget_ns=self._deadlines.recovery_budget_ns,
            heartbeat_ns=self._deadlines.heartbeat_ns,
            members=member_infos(incarnation)[: contracts.MEMBERS_SHOWN_MAX],
            quorum=quorum(view, machine.candidates()).reason if view.nodes else "",
            story=tuple(machine.story),
            dropped=incarnation.links.dropped,
        )

    def leave_asked(self) -> contracts.Leaving:
        """See `AdminHandler`."""
        incarnation = self._living()
        asyncio.get_running_loop().call_soon(self.leave)  # behind the answer
        return contracts.Leaving(node=incarnation.me, pid=os.getpid())

    def clock(self) -> contracts.ClockReply:
        """See `AdminHandler`."""
        return contracts.ClockReply(node=self._living().me, wall_ns=self._config.wall_clock())

    def token(self) -> contracts.TokenReply:
        """See `AdminHandler`."""
        incarnation = self._living()
        addresses = [
            incarnation.me.address,
            *(n.address for n in incarnation.machine.view.nodes if n.id != incarnation.me.id),
        ]
        outside = [each for each in addresses if not is_loopback(parse_address(each).host)]
        return contracts.TokenReply(
            addresses=tuple(dict.fromkeys(outside or addresses))[: contracts.ADDRESSES_MAX],
            recovery_budget_ns=self._deadlines.recovery_budget_ns,
        )

    async def order(self, order: Submit | Stop) -> contracts.OrderReply:
        """See `AdminHandler`. The process's own loop numbers all orders of an incarnation."""
        me = self._living().me
        try:
            number = await asyncio.wrap_future(self._host.order(order))
        except UserError as error:
            return contracts.OrderReply(origin=me.key, number=0, refused=str(error)[:TEXT_CHARS_MAX])
        return contracts.OrderReply(origin=me.key, number=number)

    def jobs(self, request: contracts.JobsRequest) -> contracts.JobsReply:
        """See `AdminHandler`."""
        incarnation = self._living()
        view, me = incarnation.machine.view, incarnation.me.key
        return contracts.JobsReply(
            view=view.epoch,
            jobs=job_infos(view, request.job),
            applied=view.jobs.applied(me) >= request.number,
            refused=view.jobs.refusal(me, request.number) or "",
        )

    def printed(self, request: contracts.OutputRequest) -> contracts.OutputReply:
        """See `AdminHandler`."""
        first, lines = self._host.output.since(request.job, request.number)
        return contracts.OutputReply(
            first=first,
            lines=tuple(
                contracts.PrintedLine(rank=line.rank, is_error=line.stream == "stderr", text=line.text)
                for line in lines
            ),
        )

    async def records(self) -> contracts.RecordsReply:
        """See `AdminHandler`. Files are read on another thread: views do not wait for a disk."""
        found = await asyncio.to_thread(self._host.records.listed)
        return contracts.RecordsReply(wall_ns=self._config.wall_clock(), boot_id=boot_id(), records=found)

    async def record(self, request: contracts.RecordRequest) -> contracts.RecordReply:
        """See `AdminHandler`."""
        page = self._host.records.page
        return contracts.RecordReply(data=await asyncio.to_thread(page, request.began_ns, request.offset))

    def actors_address(self) -> contracts.ActorsAddressReply:
        """See `AdminHandler`."""
        key = self._living().me.key
        return contracts.ActorsAddressReply(process_name(key.id), key.incarnation, self._host.actors_at)

    def _living(self) -> Incarnation:
        assert self._incarnation is not None, "the admin server outlived its incarnation"
        return self._incarnation

    @property
    def deadlines(self) -> Deadlines:
        """The cluster's."""
        return self._deadlines


def _unheard(reason: str) -> None:
    """A founder needs no member to join, so failures are only logged."""
    log.debug("no member found to join", reason=reason)
