"""The lives of a node, one after the other, on the loop of the cluster's thread.

A life ends when its machine stops: when the node leaves, that is all; else it comes back with its next
incarnation, and knocks where it knows members to be. Each life has a listener, links and a desk of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import structlog

from zbmd.actors.cluster.clocks import wall_ns
from zbmd.actors.cluster.contracts import TEXT_CHARS_MAX
from zbmd.actors.cluster.heartbeats.rdma import NO_DEVICE, NoDevice, OwnDevice, own_device
from zbmd.actors.cluster.jobs.output import JobOutput
from zbmd.actors.cluster.jobs.table import CommandRefused, Order, Stop, Submit
from zbmd.actors.cluster.membership.admission import Wish, advertised, has_namesake, is_loopback, refusal
from zbmd.actors.cluster.membership.machine import LEFT, State
from zbmd.actors.cluster.membership.roll_call import job_infos, member_infos
from zbmd.actors.cluster.node.admin_actor import Desk
from zbmd.actors.cluster.node.capture import life_recorder
from zbmd.actors.cluster.node.contracts import (
    ADDRESSES_MAX,
    MEMBERS_SHOWN_MAX,
    ActorsDoorReply,
    ClockReply,
    DoorReply,
    DoorRequest,
    JobsReply,
    JobsRequest,
    Leaving,
    MembersReply,
    OrderReply,
    OutputReply,
    OutputRequest,
    PrintedLine,
    TokenReply,
)
from zbmd.actors.cluster.node.join import (
    DOORS_MAX,
    Doorway,
    JoinFailed,
    NotLetInYet,
    Seeker,
    find_door,
    loopback_name,
    own_addresses,
)
from zbmd.actors.cluster.node.life import MakeWitness, NodeLife
from zbmd.actors.cluster.node.persistent_state import NodeMemory
from zbmd.actors.cluster.node_id import Node, NodeKey
from zbmd.actors.cluster.peer_links import process_name
from zbmd.actors.cluster.view import ClusterView, quorum
from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.replay.process_capture import CaptureSettings
from zbmd.transport.clock.deadlines import Deadlines, derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import UserError
from zbmd.transport.identity import Identity
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, parse_address
from zbmd.transport.tcp.link import TcpLink

log: Final = structlog.stdlib.get_logger("zbmd.cluster")

PORT_DEFAULT: Final = 29400
REJOIN_PAUSE_S: Final = 0.1
"""After a life has ended; doubled with each that was let in nowhere."""
REJOIN_PAUSE_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node. name: what people call it; joins: members to join.

    Without `joins` it goes back to the cluster that it was in when it last ran; if there was none, or `anew`
    is given, it founds one. founds: it also does so if no member is found behind `joins`; join_ns: how long
    they are tried, None for as long as a view may take. recovery_budget_ns: None for the
    cluster's, or the default; witness: makes each life its own, if the cluster has one; capture: where lives
    are recorded, if they are; wall_clock: ns since 1970, only told to people.
    """

    name: str
    listen: TcpAddress = field(default_factory=lambda: TcpAddress(host="", port=PORT_DEFAULT))
    joins: tuple[TcpAddress, ...] = ()
    anew: bool = False
    founds: bool = False
    join_ns: int | None = None
    recovery_budget_ns: int | None = None
    cookie: bytes = field(repr=False)
    settings: TcpSettings = field(default_factory=TcpSettings)
    release: str = ""
    witness: MakeWitness | None = None
    capture: CaptureSettings | None = None
    wall_clock: Callable[[], int] = wall_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindered:
    """What stands in the way of joining, which is tried again."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """A life begins: what follows is about this one, until it is over."""

    me: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Acting:
    """The node acts on this view. All members know it."""

    me: Node
    view: ClusterView
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspecting:
    """A member is no longer heard: not yet out, and perhaps heard again."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeOver:
    """This life has ended; unless it has left, the node tries to come back with its next."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Another node said something that is not about membership."""

    sender: NodeKey
    contract: Contract


NodeEvent: TypeAlias = Hindered | Began | Acting | Suspecting | LifeOver | Told


class LivesHost(Protocol):
    """The process around the cluster's thread. Called there."""

    output: JobOutput
    actors_at: str

    def tell(self, event: NodeEvent) -> None:
        """Take an event."""
        ...

    def order(self, order: Order) -> concurrent.futures.Future[int]:
        """Give an order; its number. Fails with `CommandRefused`."""
        ...


class Lives:
    """See the module."""

    def __init__(self, config: NodeConfig, state: NodeMemory, host: LivesHost) -> None:
        self._config = config
        self._state = state
        self._host = host
        self._tell = host.tell
        self._deadlines = derive(*([config.recovery_budget_ns] if config.recovery_budget_ns else []))
        self._listen = config.listen
        self._joins: tuple[TcpAddress, ...] = ()
        self._life: NodeLife | None = None
        self._desk: Desk | None = None
        self._leaving = asyncio.Event()
        self._last_view: ClusterView | None = None
        self._namesake: Node | None = None
        self._remembering: asyncio.Task[None] | None = None
        self._was_member = False
        self._open = False
        self._rdma: OwnDevice | NoDevice = NO_DEVICE

    # -- the course --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until the node has left. Raises `JoinFailed`, and other `UserError`s."""
        self._rdma = await asyncio.to_thread(own_device, os.environ, self._config.settings.protection)
        doorway = await self._doorway()
        pause_s = REJOIN_PAUSE_S
        try:
            while not self._leaving.is_set():  # ends with the node
                members_before = self._was_member
                reason = await self._one_life(doorway)
                if self._namesake is not None:
                    raise JoinFailed(f"{self._namesake} was let in by the same name: give --name another")
                if reason == LEFT:
                    break
                if not self._was_member:
                    raise JoinFailed(f"{reason}.")
                doorway = None
                pause_s = REJOIN_PAUSE_S if not members_before else min(2 * pause_s, REJOIN_PAUSE_S_MAX)
                try:
                    await asyncio.wait_for(self._leaving.wait(), pause_s)
                except TimeoutError:
                    continue
            await self._remember(())
        finally:
            if self._remembering is not None:
                await asyncio.wait([self._remembering])

    async def _doorway(self) -> Doorway | None:
        """A door, if there is any to be found; None for who founds a cluster."""
        config, deadlines = self._config, self._deadlines
        wrong = await loopback_name(config.listen, deadlines.dial_ns)
        if wrong is not None:
            raise UserError(
                f"--listen {config.listen}: on this host {config.listen.host} means {wrong} (/etc/hosts), "
                "which no other host reaches. Give the address that the others use (`ip addr` shows it), or "
                f"*:{config.listen.port} for all."
            )
        remembered = () if config.joins or config.anew else tuple(map(parse_address, self._state.doors))
        doors = list(dict.fromkeys(config.joins or remembered))[:DOORS_MAX]
        own = await own_addresses(doors, config.listen, deadlines.dial_ns)
        others = [door for door in doors if door not in own]
        self._joins = tuple(others) if config.joins else ()
        if config.joins and not others and not config.founds:
            raise UserError(
                f"--join {', '.join(map(str, own))} is this node itself. Give the address of another member; "
                "to begin a cluster, leave --join away."
            )
        if not others:
            return None
        seeker = Seeker(
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
        )
        tell = _unheard if config.founds else self._hindered
        try:
            found = await find_door(others, seeker, tell, config.join_ns or deadlines.view_ns)
        except JoinFailed as error:
            # A member that has us wait has a cluster: another one beside it would split the job.
            if config.founds and not isinstance(error, NotLetInYet):
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
        self._tell(Hindered(text=text))

    async def _one_life(self, doorway: Doorway | None) -> str:
        """From a listener to the end of all links; why it ended."""
        config, key = self._config, self._state.new_life()
        identity = Identity(
            name=process_name(key.id),
            pid=os.getpid(),
            uid=os.getuid(),
            incarnation=key.incarnation,
            contracts=fingerprints(),
        )
        clock = HybridClock()
        recorder = life_recorder(identity, clock, config.capture)
        endpoint = Endpoint(
            identity=identity,
            cookie=config.cookie,
            deadlines=self._deadlines,
            clock=clock,
            recorder=recorder,
        )
        try:
            return await self._lived(key, endpoint, doorway)
        finally:
            if recorder is not None:
                recorder.close("this life is over")

    async def _lived(self, key: NodeKey, endpoint: Endpoint, doorway: Doorway | None) -> str:
        config = self._config
        listener = await tcp.listen(self._listen, self._on_link, endpoint, settings=config.settings)
        self._listen = TcpAddress(host=self._listen.host, port=listener.address.port)
        try:
            towards = None if doorway is None else doorway.own_host
            address = str(advertised(listener.addresses, towards))
            me = Node(key, address, config.name)
            life = self._life = NodeLife(
                me,
                endpoint,
                config.settings,
                self,
                release=config.release,
                witness=config.witness,
                rdma=self._rdma,
                wall_clock=config.wall_clock,
            )
            desk = self._desk = Desk(endpoint.identity.name, key.incarnation, self)
            try:
                self._open = True
                self._state.running_at(address)
                self._tell(Began(me=me))
                self._begin(life, doorway)
                reason = await life.over
                self._tell(LifeOver(key=key, reason=reason))
                return reason
            finally:
                self._open = False
                await life.close()
                self._life = self._desk = None
                await desk.close()
        finally:
            listener.close()
            await listener.wait_closed()

    def _on_link(self, link: TcpLink) -> None:
        if self._life is not None and self._open:
            self._life.links.accepted(link)
        else:
            link.close()

    def _begin(self, life: NodeLife, doorway: Doorway | None) -> None:
        if self._leaving.is_set():
            life.leave()
            return
        doors = self._doors(doorway)
        if doors:
            life.enter(doors)
        else:
            life.found()

    def _doors(self, doorway: Doorway | None) -> tuple[Node, ...]:
        """Where to knock: with incarnation 0, it is whoever lives there."""
        if doorway is not None:
            known = [doorway.node.address]
        elif self._last_view is not None:
            known = [node.address for node in self._last_view.nodes if node.id != self._state.id]
        else:
            return ()
        known += [str(door) for door in self._joins]
        return tuple(Node(NodeKey(0, 0), address) for address in dict.fromkeys(known[:DOORS_MAX]))

    def leave(self) -> None:
        """Leave the cluster in order, then end."""
        self._leaving.set()
        if self._life is not None:
            self._life.leave()

    def order_in(self, key: NodeKey, order: Order) -> None:
        """Ask for a command of this life; nothing if it is over."""
        if self._life is not None and self._life.me.key == key:
            try:
                self._life.order(order)
            except CommandRefused as error:
                log.error("an order was refused", order=type(order).__name__, reason=str(error))

    def say(self, key: NodeKey, to: NodeKey, contract: Contract) -> None:
        """Say something to another member, in this life; nothing if it is over."""
        if self._life is not None and self._life.me.key == key:
            self._life.tell(to, contract)

    # -- what a life tells: `LifeDesk` -------------------------------------------------------------------

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """See `LifeDesk`."""
        life = self._life
        assert life is not None
        first = self._last_view is None or not self._last_view.holds(life.me.key)
        self._last_view, self._was_member = view, True
        if first and (namesake := has_namesake(life.me, view)) is not None:
            self._namesake = namesake
            self.leave()
            return
        self._tell(Acting(me=life.me, view=view, reason=reason))
        others = [node.address for node in view.nodes if node.id != life.me.id]
        if self._remembering is None or self._remembering.done():
            self._remembering = asyncio.get_running_loop().create_task(self._remember(tuple(others)))

    async def _remember(self, doors: tuple[str, ...]) -> None:
        """On another thread: a disk may take its time, and heartbeats must not wait for it."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._state.remember, doors)
        except UserError as error:
            log.warning("the other members are not remembered", reason=str(error))

    def suspects(self, key: NodeKey, reason: str) -> None:
        """See `LifeDesk`."""
        self._tell(Suspecting(key=key, reason=reason))

    def told(self, sender: NodeKey, contract: Contract) -> None:
        """See `LifeDesk`."""
        self._tell(Told(sender=sender, contract=contract))

    def visited(self, link: TcpLink) -> None:
        """See `LifeDesk`."""
        if self._desk is None:
            link.close()
        else:
            self._desk.serve(link)

    # -- what the desk asks: `NodeDesk` ------------------------------------------------------------------

    def door(self, request: DoorRequest) -> DoorReply:
        """See `NodeDesk`."""
        life = self._living()
        wish = Wish(
            node_id=request.node_id,
            name=request.name,
            host=request.host,
            recovery_budget_ns=request.recovery_budget_ns,
            witnessed=request.witnessed,
        )
        own_host = parse_address(life.me.address).host
        budget_ns = self._deadlines.recovery_budget_ns
        witnessed = self._config.witness is not None
        found = refusal(wish, life.machine.view, life.me, own_host, budget_ns, witnessed=witnessed)
        return DoorReply(
            node=life.me,
            member=life.machine.state is State.MEMBER,
            recovery_budget_ns=budget_ns,
            refused="" if found is None else found.reason,
            passes=found is not None and found.passes,
        )

    def members(self) -> MembersReply:
        """See `NodeDesk`."""
        life = self._living()
        machine, view = life.machine, life.machine.view
        return MembersReply(
            answered_by=life.me,
            state=machine.state.value,
            known=view.epoch,
            entered=machine.entered,
            recovery_budget_ns=self._deadlines.recovery_budget_ns,
            heartbeat_ns=self._deadlines.heartbeat_ns,
            members=member_infos(life)[:MEMBERS_SHOWN_MAX],
            quorum=quorum(view, machine.candidates()).reason if view.nodes else "",
            story=tuple(machine.story),
            dropped=life.links.dropped,
        )

    def leave_asked(self) -> Leaving:
        """See `NodeDesk`."""
        life = self._living()
        asyncio.get_running_loop().call_soon(self.leave)  # behind the answer
        return Leaving(node=life.me, pid=os.getpid())

    def clock(self) -> ClockReply:
        """See `NodeDesk`."""
        return ClockReply(node=self._living().me, wall_ns=self._config.wall_clock())

    def token(self) -> TokenReply:
        """See `NodeDesk`."""
        life = self._living()
        addresses = [life.me.address, *(n.address for n in life.machine.view.nodes if n.id != life.me.id)]
        outside = [each for each in addresses if not is_loopback(parse_address(each).host)]
        return TokenReply(
            addresses=tuple(dict.fromkeys(outside or addresses))[:ADDRESSES_MAX],
            recovery_budget_ns=self._deadlines.recovery_budget_ns,
        )

    async def order(self, order: Submit | Stop) -> OrderReply:
        """See `NodeDesk`. The process's own loop numbers all orders of a life."""
        me = self._living().me
        try:
            number = await asyncio.wrap_future(self._host.order(order))
        except UserError as error:
            return OrderReply(origin=me.key, number=0, refused=str(error)[:TEXT_CHARS_MAX])
        return OrderReply(origin=me.key, number=number)

    def jobs(self, request: JobsRequest) -> JobsReply:
        """See `NodeDesk`."""
        life = self._living()
        view, me = life.machine.view, life.me.key
        return JobsReply(
            view=view.epoch,
            jobs=job_infos(view, request.job),
            applied=view.jobs.applied(me) >= request.number,
            refused=view.jobs.refusal(me, request.number) or "",
        )

    def printed(self, request: OutputRequest) -> OutputReply:
        """See `NodeDesk`."""
        first, lines = self._host.output.since(request.job, request.number)
        return OutputReply(
            first=first,
            lines=tuple(
                PrintedLine(rank=line.rank, is_error=line.stream == "stderr", text=line.text)
                for line in lines
            ),
        )

    def actors_door(self) -> ActorsDoorReply:
        """See `NodeDesk`."""
        key = self._living().me.key
        return ActorsDoorReply(process_name(key.id), key.incarnation, self._host.actors_at)

    def _living(self) -> NodeLife:
        assert self._life is not None, "a desk outlived its life"
        return self._life

    @property
    def deadlines(self) -> Deadlines:
        """The cluster's."""
        return self._deadlines


def _unheard(reason: str) -> None:
    """Who founds a cluster needs no door, and no word on why there is none."""
    log.debug("no door", reason=reason)
