"""The desk of a node: one actor that answers commands, and nodes that are about to join.

It is there for as long as somebody asks: an actor system that nobody uses costs more than heartbeats do.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import structlog

from zbmd.actors.cluster.jobs.table import Stop, Submit
from zbmd.actors.cluster.node.contracts import (
    DESK,
    ActorsDoorReply,
    ActorsDoorRequest,
    ClockReply,
    ClockRequest,
    DoorReply,
    DoorRequest,
    JobsReply,
    JobsRequest,
    LeaveRequest,
    Leaving,
    MembersReply,
    MembersRequest,
    OrderReply,
    OrderRequest,
    OutputReply,
    OutputRequest,
    TokenReply,
    TokenRequest,
)
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import ZbmdError
from zbmd.transport.tcp.link import TcpLink

log: Final = structlog.stdlib.get_logger("zbmd.cluster")


class NodeDesk(Protocol):
    """What the desk hands on. Called on the cluster's loop."""

    def door(self, request: DoorRequest) -> DoorReply:
        """What stands against a node that would join."""
        ...

    def members(self) -> MembersReply:
        """How we see the cluster."""
        ...

    def clock(self) -> ClockReply:
        """What our wall clock says."""
        ...

    def leave_asked(self) -> Leaving:
        """Leave in order, and end."""
        ...

    def token(self) -> TokenReply:
        """What another host must know to join."""
        ...

    async def order(self, order: Submit | Stop) -> OrderReply:
        """Have the cluster agree on an order."""
        ...

    def jobs(self, request: JobsRequest) -> JobsReply:
        """The jobs that there are."""
        ...

    def printed(self, request: OutputRequest) -> OutputReply:
        """What a job's ranks have printed here."""
        ...

    def actors_door(self) -> ActorsDoorReply:
        """Where our actors listen."""
        ...


class DeskActor(Actor):
    """Answers at `DESK`."""

    def __init__(self, desk: NodeDesk) -> None:
        self._desk = desk

    @on(DoorRequest)
    async def door(self, request: DoorRequest) -> DoorReply:
        """See `NodeDesk.door`."""
        return self._desk.door(request)

    @on(MembersRequest)
    async def members(self, _: MembersRequest) -> MembersReply:
        """See `NodeDesk.members`."""
        return self._desk.members()

    @on(ClockRequest)
    async def wall_clock(self, _: ClockRequest) -> ClockReply:
        """See `NodeDesk.clock`."""
        return self._desk.clock()

    @on(LeaveRequest)
    async def leave(self, _: LeaveRequest) -> Leaving:
        """See `NodeDesk.leave_asked`."""
        return self._desk.leave_asked()

    @on(TokenRequest)
    async def token(self, _: TokenRequest) -> TokenReply:
        """See `NodeDesk.token`."""
        return self._desk.token()

    @on(OrderRequest)
    async def order(self, request: OrderRequest) -> OrderReply:
        """See `NodeDesk.order`."""
        return await self._desk.order(request.order)

    @on(JobsRequest)
    async def jobs(self, request: JobsRequest) -> JobsReply:
        """See `NodeDesk.jobs`."""
        return self._desk.jobs(request)

    @on(OutputRequest)
    async def printed(self, request: OutputRequest) -> OutputReply:
        """See `NodeDesk.printed`."""
        return self._desk.printed(request)

    @on(ActorsDoorRequest)
    async def actors_door(self, _: ActorsDoorRequest) -> ActorsDoorReply:
        """See `NodeDesk.actors_door`."""
        return self._desk.actors_door()


class Desk:
    """Serves visitors, on the running loop."""

    def __init__(self, name: str, incarnation: int, desk: NodeDesk) -> None:
        self._name = name
        self._incarnation = incarnation
        self._desk = desk
        self._system: ActorSystem | None = None
        self._visitors = 0
        self._waiting: list[TcpLink] = []
        self._work: asyncio.Task[None] | None = None
        self._closed = False

    def serve(self, link: TcpLink) -> None:
        """Answer a visitor until it goes."""
        if self._closed:
            link.close()
            return
        self._waiting.append(link)
        self._set_to_work()

    async def close(self) -> None:
        """Send everybody away. Idempotent."""
        self._closed = True
        if self._work is not None:
            await asyncio.wait([self._work])
        await self._go()

    def _set_to_work(self) -> None:
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._open_or_go(), name="desk")

    async def _open_or_go(self) -> None:
        """Let those in who wait; go if nobody is there."""
        while self._waiting and not self._closed:
            if self._system is None:
                system = ActorSystem(self._name, incarnation=self._incarnation)
                await system.spawn(DeskActor, self._desk, name=DESK)
                self._system = system
            while self._waiting:
                self._admit(self._system, self._waiting.pop())
        for link in self._waiting:
            link.close()
        self._waiting.clear()
        if not self._visitors:
            await self._go()

    def _admit(self, system: ActorSystem, link: TcpLink) -> None:
        self._visitors += 1
        try:
            system.attach(link, on_closed=self._gone)
        except ZbmdError as error:
            self._visitors -= 1
            log.warning("link closed", name=link.peer.name, reason=str(error))
            link.close()

    def _gone(self, _: ZbmdError | None) -> None:
        self._visitors -= 1
        if not self._visitors and not self._closed:
            self._set_to_work()

    async def _go(self) -> None:
        system, self._system = self._system, None
        if system is not None:
            await system.stop()
