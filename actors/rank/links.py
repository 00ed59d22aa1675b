"""A rank's links to the other ranks, and when a view can be entered."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from zbmd.actors.core.ref import MARK
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.host_contracts import NODE_NAME
from zbmd.actors.rank.remote_links import MemberKey, MemberTcp, MemoryOffered
from zbmd.actors.routing.contracts import external_address
from zbmd.actors.routing.dialer import ExternalDialer
from zbmd.actors.routing.routes import RemoteLocator, Routes
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade.keeper import CodeKeeper
from zbmd.actors.view import RANKS_MAX, Member, View, rank_name, rank_of
from zbmd.transport.clock.deadlines import Deadlines, format_duration
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.host.topology.cpus import usable_cpus
from zbmd.transport.link.interface import Link
from zbmd.transport.memory.segment import PeerMemory
from zbmd.transport.rdma.connect import RemoteLink
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.transfer import TransferCounts
from zbmd.transport.shm.connect import HALF_OPEN_MAX, Endpoint, ShmListener, dial, listen
from zbmd.transport.shm.death_notice import DeathNotice
from zbmd.transport.tcp.address import tcp_settings
from zbmd.transport.tcp.link import TcpLink

CallbackT = TypeVar("CallbackT")

OnPeerLost = Callable[[int, int, DeathNotice], None]
"""Takes the rank, the incarnation and the notice."""
OnLinkEnded = Callable[[int, int], None]
"""Takes the rank and the incarnation."""
OnLeave = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Callbacks:
    """The callbacks registered with a `Worker`, by method."""

    peer_lost: list[OnPeerLost] = field(default_factory=list[OnPeerLost])
    link_ended: list[OnLinkEnded] = field(default_factory=list[OnLinkEnded])
    leaving: list[OnLeave] = field(default_factory=list[OnLeave])


def register(callbacks: list[CallbackT], callback: CallbackT, most: int) -> Callable[[], None]:
    """Register `callback`; return a function that undoes it. Raises `LocalProtocolError` beyond `most`."""
    if len(callbacks) >= most:
        raise LocalProtocolError(
            f"at most {most} callbacks of a kind can be registered with a worker: close groups that are over"
        )
    callbacks.append(callback)

    def undo() -> None:
        with contextlib.suppress(ValueError):
            callbacks.remove(callback)

    return undo


class RankRoutes:
    """A rank's routes to processes beyond its job: nodes, ranks of other jobs, sessions.

    It asks the host of its job, which knows the cluster's view.
    """

    def __init__(
        self, system: ActorSystem, environment: RankEnvironment, cookie: bytes, deadlines: Deadlines
    ) -> None:
        self._dialer = ExternalDialer(
            system.name,
            environment.incarnation,
            environment.job,
            cookie,
            tcp_settings(os.environ),
            deadlines,
            host=environment.host,
        )
        self._routes = Routes(system, RemoteLocator(system, NODE_NAME), self._dialer.dial)

    def listen(self, address: str) -> None:
        """Accept external clients on this host until the system stops. address: this rank's own."""
        self._dialer.listen_near(external_address(address), self._routes)

    def accepted(self, link: Link) -> None:
        """Take the link of an external client."""
        self._routes.accepted(link)


log: Final = structlog.stdlib.get_logger("zbmd.actors.member")

REDIAL_PAUSE_S: Final = 0.05
"""Pause after a failed dial; doubled with each."""
DIALS_AT_ONCE: Final = 16
"""Concurrent dials of a rank, to the nearest lower ranks first, so that not all dial rank 0 at once."""
ENTRY_TOLD_S: Final = 30.0
"""A rank that waits for so long until the others enter its view says so."""
LINK_NS: Final = 10_000_000
"""Core time that the set-up of a link may take at both ends, in addition to a view's deadline."""

OnConfirmed = Callable[[int, int], None]
"""Takes rank and incarnation of a member that is proven dead; may be called more than once."""
OnLost = Callable[[int, int, bool], None]
"""Takes rank and incarnation of a member on another host whose link ended, and whether it ended cleanly."""
OnEnded = Callable[[int, int], None]
"""Takes rank and incarnation of any member whose link ended, after all its messages."""


class MemberLinks:
    """One link to each other member; higher ranks dial lower ones. Links outlive views."""

    def __init__(
        self,
        rank: int,
        system: ActorSystem,
        endpoint: Endpoint,
        *,
        host: str,
        local_rank: int,
        on_confirmed: OnConfirmed,
        on_lost: OnLost,
        on_ended: OnEnded,
        on_client: Callable[[Link], None] | None = None,
    ) -> None:
        self.code = CodeKeeper(system, lambda name: rank_of(name) is not None, self._heard)
        """Exchanges code upgrades with the other members."""
        self._on_client = on_client
        self._rank = rank
        self._host = host
        self._system = system
        self._endpoint = endpoint
        self._on_confirmed = on_confirmed
        self._on_lost = on_lost
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._listener: ShmListener | None = None
        self._links: dict[MemberKey, Link] = {}  # in use, by rank and incarnation
        self._early: dict[int, Link] = {}  # accepted before the view that lists them; one for each rank
        self._dials: dict[MemberKey, asyncio.Task[None]] = {}
        self._unconfirmed: set[MemberKey] = set()  # went from a view, not yet proven gone
        self._confirmed: dict[int, int] = {}  # by rank, the last incarnation proven gone
        self._changed = asyncio.Event()
        self._installed_s = 0.0
        self._may_enter = 0
        self._closing = False
        self._redials: dict[MemberKey, int] = {}  # for this view
        self._tcp = MemberTcp(
            system,
            endpoint,
            turn=local_rank,
            on_change=self._changed.set,
            on_gone=self._memory_ended,
        )
        self._reason = ""
        self._dialing = asyncio.Semaphore(DIALS_AT_ONCE)
        self._cores = usable_cpus()
        self.view = View(epoch=0, members=())

    def listen(self, address: str) -> None:
        """Accept links of higher ranks at `address`."""
        ranks = 0 if self._endpoint.segment is None else self._endpoint.segment.slots
        self._listener = listen(address, self._accepted, self._endpoint, half_open_max=HALF_OPEN_MAX + ranks)

    async def listen_tcp(self, address: str) -> str:
        """Accept links of higher ranks on other hosts; return the address to dial. Raises as `tcp.listen`."""
        return await self._tcp.listen(address, self._accepted_remote)

    def install(self, view: View) -> None:
        """Start making the links of `view`."""
        if view.epoch <= self.view.epoch:
            log.warning("ignored an old view", epoch=view.epoch, known=self.view.epoch)
            return
        now = {(m.rank, m.incarnation) for m in view.members}
        gone = {key for key in self._links if key not in now}
        self._unconfirmed |= {(r, i) for r, i in gone if i > self._confirmed.get(r, 0)}
        for key in gone:
            self._tcp.give_up(key)
        self.view = view
        self._redials.clear()
        self._installed_s = self._loop.time()
        for key, task in list(self._dials.items()):
            if key not in now:
                task.cancel()
        for member in reversed(view.members):
            key = (member.rank, member.incarnation)
            if member.rank == self._rank or key in self._links or key in self._dials:
                continue
            early = self._early.get(member.rank)
            if early is not None and early.peer.incarnation == member.incarnation:
                del self._early[member.rank]
                self._take(early, member)
            elif member.rank < self._rank:
                self._start_dial(member)
        self._changed.set()

    def confirmed(self, rank: int, incarnation: int) -> None:
        """The kernel of its host reported the end of this incarnation."""
        if self._tcp.give_up((rank, incarnation)):
            return  # its data may still be on its way into our memory: its stripes end first
        self._on_confirmed(rank, incarnation)
        self._confirmed[rank] = max(incarnation, self._confirmed.get(rank, 0))
        self._unconfirmed = {(r, i) for r, i in self._unconfirmed if i > self._confirmed.get(r, 0)}
        self._changed.set()

    def may_enter(self, epoch: int) -> None:
        """All members of the view of `epoch` are linked."""
        self._may_enter = max(epoch, self._may_enter)
        self._changed.set()

    def offered(self, rank: int, offer: MemoryOffered) -> None:
        """A rank, authenticated by its link, offers its memory."""
        self._tcp.offered((rank, self._system.peers.get(rank_name(rank), 0)), offer)

    def reaches(self, rank: int, incarnation: int, memory: PeerMemory) -> bool:
        """Whether the link to this incarnation is up, and is the one that `memory` came with."""
        key = (rank, incarnation)
        link = self._links.get(key)
        return link is not None and (link.peer_segment or self._tcp.memory(key)) is memory

    def stands(self, rank: int, incarnation: int) -> bool:
        """Whether the link to this incarnation is up."""
        return (rank, incarnation) in self._links

    async def ready(self, *, after: int) -> tuple[View, dict[int, PeerMemory]]:
        """Wait until all links of a view newer than `after` are up; return the view and the members' memory.

        Raises `DeadlineExceeded` the `view_ns` of the endpoint's deadlines after the view's installation, or
        later in a view of so many that their links take longer to make (`LINK_NS`).
        """
        while True:
            self._changed.clear()
            view, limit_ns = self.view, self._limit_ns()
            if view.epoch > after and next(self._missing(), None) is None:
                return view, {rank: memory for rank, _, memory in self._memories() if memory is not None}
            try:
                limit_s = self._installed_s + limit_ns / 1e9 if view.epoch > after else None
                async with asyncio.timeout_at(limit_s):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{rank_name(self._rank)}: view {view.epoch} was not complete within "
                    f"{format_duration(limit_ns)}: {'; '.join(self._missing())}. A process may be stopped or "
                    "starved: see `zbmd-node status`."
                ) from None

    async def entered(self, epoch: int) -> bool:
        """Wait until all members are linked; return False if a newer view comes first."""
        waits = "ranks of the view before have not all asked for this one yet, so it begins later"
        late = asyncio.get_running_loop().call_later(
            ENTRY_TOLD_S, partial(log.warning, "waits to enter a view", epoch=epoch, reason=waits)
        )
        try:
            while True:
                self._changed.clear()
                if self._may_enter >= epoch:
                    return True
                if self.view.epoch > epoch:
                    return False
                await self._changed.wait()
        finally:
            late.cancel()

    async def settle(self) -> None:
        """Wait, for a bounded time, until puts into members' memory have arrived."""
        await self._tcp.settle()

    async def close(self) -> None:
        """Stop listening and dialing; the actor system closes the links in use."""
        self._closing = True
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        dials = list(self._dials.values())
        for task in dials:
            task.cancel()
        if dials:
            await asyncio.wait(dials)
        for link in self._early.values():
            link.close()
        self._early.clear()
        await self._tcp.stop_listening()

    async def drain(self) -> None:
        """Wait, after all links are closed, until no transfer is in progress."""
        await self._tcp.close()

    @property
    def rdma_transfers(self) -> TransferCounts | None:
        """Transfers over RDMA to members on other hosts, once drained; None without RDMA."""
        return self._tcp.rdma_transfers

    def _memories(self) -> Iterator[tuple[int, int, PeerMemory | None]]:
        """Yield the members' memory, by rank and incarnation; None where it is not connected yet."""
        for rank, incarnation in self._wanted():
            link = self._links.get((rank, incarnation))
            if link is not None:
                yield rank, incarnation, link.peer_segment or self._tcp.memory((rank, incarnation))

    def _wanted(self) -> Iterator[tuple[int, int]]:
        return ((m.rank, m.incarnation) for m in self.view.members if m.rank != self._rank)

    def _missing(self) -> Iterator[str]:
        """Yield what the view still lacks; lazily, since each change of a link asks whether anything does."""
        for r, i in self._wanted():
            if (r, i) not in self._links:
                yield f"no link to {rank_name(r)}#{i}"
        for r, i in self._wanted():
            if (r, i) in self._links and not self.code.has_heard(rank_name(r), i):
                yield f"no code upgrades received from {rank_name(r)}#{i}"
        for r, i, memory in self._memories():
            if memory is None:
                yield f"no memory of {rank_name(r)}#{i}"
        for r, i in sorted(self._unconfirmed):
            yield f"{rank_name(r)}#{i} is not proven dead"

    def _start_dial(self, member: Member, *, pause_s: float = 0.0) -> None:
        key = (member.rank, member.incarnation)
        self._dials[key] = self._loop.create_task(
            self._dial(member, pause_s), name=f"dial {rank_name(member.rank)}"
        )

    async def _dial(self, member: Member, pause_s: float) -> None:
        key = (member.rank, member.incarnation)
        link: Link | None = None
        try:
            await asyncio.sleep(pause_s)
            async with self._dialing:
                if self._is_remote(member):
                    link, why = await self._tcp.dial(member.tcp_address)
                    self._chosen(link, why)
                else:
                    link = await dial(member.address, self._endpoint)
        except PeerLost as error:
            # If it died, another view will come; if not, `ready` names it once the deadline passes.
            log.info("dial failed", to=rank_name(member.rank), reason=str(error))
        except ZbmdError as error:
            log.warning("dial failed", to=rank_name(member.rank), reason=str(error))
        finally:
            del self._dials[key]
        if link is None:
            self._dial_again(key)
            return
        if (link.peer.name, link.peer.incarnation) != (rank_name(member.rank), member.incarnation):
            log.warning("dialed another process", wanted=rank_name(member.rank), found=link.peer.name)
            link.close()
            return
        self._take(link, member)

    def _dial_again(self, key: MemberKey) -> None:
        """Redial a member until the view's deadline: many simultaneous dials may have failed the last."""
        member = self.view.member(key[0])
        if member is None or member.incarnation != key[1] or member.rank > self._rank:
            return
        pause_s = REDIAL_PAUSE_S * 2 ** self._redials.get(key, 0)
        limit_s = self._installed_s + self._limit_ns() / 1e9
        is_due = self._may_enter < self.view.epoch and self._loop.time() + pause_s < limit_s
        if is_due and key not in self._dials and not self._closing:
            self._redials[key] = self._redials.get(key, 0) + 1
            self._start_dial(member, pause_s=pause_s)

    def _limit_ns(self) -> int:
        """Return how long the links of this view may take; a host's cores make those of all its ranks."""
        members = self.view.members
        neighbours = sum(member.host == self._host for member in members)
        return self._endpoint.deadlines.view_ns + LINK_NS * len(members) * neighbours // self._cores

    def _is_remote(self, member: Member) -> bool:
        """Whether the member is on another host: hosts are named so that their processes can share memory."""
        return member.host != self._host

    def _chosen(self, link: RemoteLink, why: str) -> None:
        """Log the choice of a transport once for each reason."""
        if why != self._reason:
            self._reason = why
            by = "rdma" if isinstance(link, RdmaLink) else "tcp"
            log.info("link chosen", to=link.peer.name, by=by, reason=why)

    def _accepted_remote(self, link: RemoteLink, why: str) -> None:
        self._chosen(link, why)
        self._accepted(link)

    def _accepted(self, link: Link) -> None:
        if MARK in link.peer.name and self._on_client is not None:
            self._on_client(link)
            return
        found = rank_of(link.peer.name)
        rank = RANKS_MAX if found is None else found
        # This rank dials lower ranks itself; any other process is not a member.
        if not self._rank < rank < RANKS_MAX or link.peer.job != self._endpoint.identity.job:
            log.warning("closed the link of a process that is not a member", name=link.peer.name)
            link.close()
            return
        member = self.view.member(rank)
        if member is not None and member.incarnation == link.peer.incarnation:
            self._take(link, member)
            return
        early = self._early.get(rank)
        if early is not None:
            if early.peer.incarnation >= link.peer.incarnation:
                link.close()
                return
            early.close()
        self._early[rank] = link

    def _take(self, link: Link, member: Member) -> None:
        """Use a link of a member of the view."""
        key = (member.rank, link.peer.incarnation)
        slot = member.rank if link.peer_segment is None else link.peer_segment.slot
        if (link.peer_segment is None) != self._is_remote(member) or slot != member.rank:
            log.warning("closed a link that contradicts the view", peer=rank_name(member.rank))
            link.close()
            return
        # The system closes the link to the one before; that close is ours and proves nothing.
        for older in [k for k in self._links if k[0] == member.rank]:
            del self._links[older]
            self._tcp.give_up(older)
        try:
            self._system.attach(link, on_closed=lambda error: self._closed(key, link, error))
        except ZbmdError as error:
            log.warning("link not taken", peer=rank_name(member.rank), reason=str(error))
            link.close()
            return
        self._links[key] = link
        if isinstance(link, TcpLink | RdmaLink):
            self._tcp.join(key, link)
        self._changed.set()

    def _closed(self, key: MemberKey, link: Link, error: ZbmdError | None) -> None:
        """A link ended. On one host that proves the death: the kernel closed the process's files."""
        is_current = self._links.get(key) is link
        if is_current:
            del self._links[key]
        self._on_ended(*key)
        if not is_current:
            return
        if isinstance(link, TcpLink | RdmaLink):
            self._on_lost(*key, error is None)
            self._dial_again(key)
            if self._tcp.link_closed(key):
                return
        self.confirmed(*key)

    def _heard(self) -> None:
        self._changed.set()

    def _memory_ended(self, key: MemberKey) -> None:
        self.confirmed(*key)
