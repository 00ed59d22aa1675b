"""A host's links: it listens, its ranks and the status tool dial, and one actor answers them."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import structlog

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import scope_of_job
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, Inside
from zbmd.actors.rank import host_contracts
from zbmd.actors.routing.contracts import ROUTES_ACTOR
from zbmd.actors.routing.routes import RoutesActor, RouteTable
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import RANKS_MAX, rank_name, rank_of
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Link
from zbmd.transport.memory.segment import NODE_SLOT, Segment
from zbmd.transport.shm.connect import Endpoint, ShmListener, listen
from zbmd.transport.shm.death_notice import DeathNotice, DeathWatch, LifeThread

# --- addresses: abstract sockets, named so that only ranks of the same user and cookie dial them ----------


HOSTS_MAX: Final = 256
_TAG_BYTES: Final = 4
_LABEL: Final = b"zbmd host address"
_REST: Final = "[0-9a-f]{16}(?:-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+)?"


def host_address(cookie: bytes, job: int, *more: str) -> str:
    """Return the address of a job's host. more: three hexadecimal words, if one machine has several."""
    return "-".join((_prefix(cookie), f"{job:016x}", *more))


def find_hosts(cookie: bytes) -> list[str]:
    """List the addresses of this user's hosts with this cookie, at most `HOSTS_MAX`, from /proc/net/unix."""
    wanted = re.compile(f" @({re.escape(_prefix(cookie))}-{_REST})$")
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sorted({match[1] for line in lines if (match := wanted.search(line))})[:HOSTS_MAX]


def _prefix(cookie: bytes) -> str:
    # A process with another cookie could not link up, and would only fill the log of the host by trying.
    tag = hmac.digest(cookie, _LABEL, "sha256")[:_TAG_BYTES]
    return f"zbmd-{os.getuid()}-{tag.hex()}"


log: Final = structlog.stdlib.get_logger("zbmd.actors.host")

OUTBOX_MESSAGES_MAX = 2 * RANKS_MAX**2  # every death of as many ranks told to every other, twice
ACTORS_ASK_S = 0.25


def host_identity(job: int) -> Identity:
    """Return the host's identity for the handshake."""
    return Identity(
        name=host_contracts.NODE_NAME,
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=1,
        job=job,
        contracts=fingerprints(),
    )


class HostHandler(Protocol):
    """Handles messages of the ranks. Called on the loop; must not block."""

    def is_current(self, rank: int, incarnation: int) -> bool:
        """Whether this incarnation of the rank is alive."""
        ...

    def joined(self, message: host_contracts.Join) -> None:
        """A rank asks to be in the next view."""
        ...

    def linked(self, message: host_contracts.Linked) -> None:
        """A rank waits to enter a view."""
        ...

    def link_lost(self, message: host_contracts.LinkLost) -> None:
        """A rank lost its link to a member on another host."""
        ...

    def reported(self, message: host_contracts.Report) -> None:
        """A rank sent a report."""
        ...

    def noticed(self, rank: int, incarnation: int, notice: DeathNotice) -> None:
        """The native watcher saw a rank's process end."""
        ...

    async def status(self) -> host_contracts.NodeStatus:
        """Return the host's status."""
        ...


class HostActor(Actor):
    """`node/host`: passes every message on to the handler.

    It is not captured: it decides nothing, and holds the handler, which no log could restore. Its messages
    are recorded by the links, and their consequences by the machines (membership, supervision).
    """

    captured = False

    def __init__(self, handler: HostHandler) -> None:
        self._handler = handler

    @on(host_contracts.Join)
    async def join(self, message: host_contracts.Join) -> None:
        """A rank is up."""
        self._handler.joined(message)

    @on(host_contracts.Linked)
    async def linked(self, message: host_contracts.Linked) -> None:
        """A rank is linked."""
        self._handler.linked(message)

    @on(host_contracts.LinkLost)
    async def link_lost(self, message: host_contracts.LinkLost) -> None:
        """A rank lost a link."""
        self._handler.link_lost(message)

    @on(host_contracts.Report)
    async def report(self, message: host_contracts.Report) -> None:
        """Telemetry."""
        self._handler.reported(message)

    @on(host_contracts.ReportsAsk)
    async def reports(self, message: host_contracts.ReportsAsk) -> host_contracts.ReportsTaken:
        """Confirm that all earlier reports have arrived."""
        return host_contracts.ReportsTaken()

    @on(host_contracts.StatusRequest)
    async def status(self, message: host_contracts.StatusRequest) -> host_contracts.NodeStatus:
        """Return the status for `zbmd-node status`."""
        return await self._handler.status()


class HostLinks:
    """The listener, the actor system "node" and the death watch of one host."""

    def __init__(
        self,
        *,
        address: str,
        identity: Identity,
        clock: HybridClock,
        deadlines: Deadlines,
        recorder: Recorder,
        handler: HostHandler,
        finder: RouteTable | None = None,
    ) -> None:
        self._handler = handler
        self._finder = finder
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._segment = Segment.create(slot=NODE_SLOT, incarnation=1, arena_bytes=0, inbox_bytes=0)
        self._life = LifeThread(self._segment)
        self._watch = DeathWatch(self._segment, self._loop)
        self._outbox: asyncio.Queue[tuple[int, Contract]] = asyncio.Queue(OUTBOX_MESSAGES_MAX)
        self._sender: asyncio.Task[None] | None = None
        self._endpoint = Endpoint(
            identity=identity,
            cookie=load_or_create_cookie(),
            segment=self._segment,
            clock=clock,
            deadlines=deadlines,
            recorder=recorder,
        )
        self._address = address
        self._listener: ShmListener | None = None
        self.system = ActorSystem(
            host_contracts.NODE_NAME,
            incarnation=identity.incarnation,
            recorder=recorder,
            scope=scope_of_job(identity.job),
        )

    async def open(self) -> None:
        """Start listening."""
        await self.system.spawn(HostActor, self._handler, name=host_contracts.HOST_ACTOR)
        await self.system.spawn(Inside, name=INSIDE_ACTOR)
        if self._finder is not None:
            await self.system.spawn(RoutesActor, self._finder, name=ROUTES_ACTOR)
        self._sender = self._loop.create_task(self._send(), name="host outbox")
        self._listener = listen(self._address, self._on_link, self._endpoint)

    async def close(self) -> None:
        """Close every link, thread and socket."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        await self.system.stop()
        self._watch.close()
        self._life.goodbye()
        self._segment.close()

    def send(self, ranks: Iterable[int], message: Contract) -> None:
        """Send to each rank, in order; messages to a rank that is gone are dropped."""
        for rank in ranks:
            self._outbox.put_nowait((rank, message))

    async def actors(self, rank: int) -> tuple[str, ...] | None:
        """Return the names of a rank's actors; None if it does not answer within `ACTORS_ASK_S`."""
        ref = self.system.ref(f"{rank_name(rank)}/{host_contracts.MEMBER_ACTOR}")
        try:
            reply = await ref.ask(
                host_contracts.ActorsRequest(), reply=host_contracts.ActorsReply, timeout=ACTORS_ASK_S
            )
        except ZbmdError:
            return None
        return reply.names

    async def _send(self) -> None:
        while True:
            rank, message = await self._outbox.get()
            try:
                await self.system.ref(f"{rank_name(rank)}/{host_contracts.MEMBER_ACTOR}").tell(message)
            except ZbmdError as error:
                # It died meanwhile; its replacement gets the next view.
                log.debug(
                    "message not delivered",
                    to=rank_name(rank),
                    message=type(message).__name__,
                    reason=str(error),
                )

    def _on_link(self, link: Link) -> None:
        name, incarnation = link.peer.name, link.peer.incarnation
        rank = rank_of(name)
        if rank is not None:
            if not self._handler.is_current(rank, incarnation) or link.peer_segment is None:
                log.warning("closed the link of an unknown process", name=name, incarnation=incarnation)
                link.close()
                return
            self._watch.unwatch(rank)
        elif link.peer.job != 0:
            log.warning("closed the link of an unknown process", name=name, job=link.peer.job)
            link.close()
            return
        segment = link.peer_segment
        try:
            # A closed link is part of a reference cycle: it must not keep the memory of a dead rank mapped.
            self.system.attach(link, on_closed=lambda _: None if segment is None else segment.close())
        except ZbmdError as error:
            log.warning("link closed", name=name, incarnation=incarnation, reason=str(error))
            link.close()
            return
        if rank is not None and segment is not None:

            def noticed(slot: int, notice: DeathNotice) -> None:
                self._recorder.death(name, incarnation, clean=notice.clean, reason="its life thread ended")
                self._handler.noticed(slot, incarnation, notice)

            self._watch.watch(segment, noticed)
