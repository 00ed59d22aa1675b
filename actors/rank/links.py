"""A rank's links to the other ranks, and knowing when a view can be entered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from zbmd.actors.core.scopes import MARK
from zbmd.actors.rank.tcp import MemberKey, MemberTcp, MemoryOffered
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade.keeper import CodeKeeper
from zbmd.actors.view import RANKS_MAX, Member, View, child_id, rank_of
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.errors import DeadlineExceeded, PeerLost, ZbmdError
from zbmd.transport.host.topology.cpus import usable_cpus
from zbmd.transport.link.interface import Link
from zbmd.transport.memory.segment import PeerMemory
from zbmd.transport.rdma.connect import RemoteLink
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.transfer import TransferCounts
from zbmd.transport.shm.connect import HALF_OPEN_MAX, Endpoint, Listener, dial, listen
from zbmd.transport.tcp.link import TcpLink

log: Final = structlog.stdlib.get_logger("zbmd.actors.member")

REDIAL_PAUSE_S: Final = 0.05
"""From a dial that failed to the next; doubled with each."""
DIALS_AT_ONCE: Final = 16
"""Of a rank, the nearest lower ones first: so a view of very many does not begin at one rank's door."""
LINK_NS: Final = 10_000_000
"""What the set-up of a link may take of a core, at both ends, beyond a view's own time."""

OnConfirmed = Callable[[int, int], None]
"""Takes the rank and incarnation of one that is proven gone, perhaps more than once."""
OnLost = Callable[[int, int, bool], None]
"""Takes the rank and incarnation of one on another host whose link has ended, and whether in good order."""
OnEnded = Callable[[int, int], None]
"""Takes the rank and incarnation of one whose link has ended, wherever it is, behind all that it brought."""


class MemberLinks:
    """One link to each other member; higher ranks dial lower ones. Links live across views."""

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
        on_guest: Callable[[Link], None] | None = None,
    ) -> None:
        self.code = CodeKeeper(system, lambda name: rank_of(name) is not None, self._heard)
        """What the members know of changes of code."""
        self._on_guest = on_guest
        self._rank = rank
        self._host = host
        self._system = system
        self._endpoint = endpoint
        self._on_confirmed = on_confirmed
        self._on_lost = on_lost
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._links: dict[MemberKey, Link] = {}  # in use, by rank and incarnation
        self._early: dict[int, Link] = {}  # accepted before the view that lists them; one a rank
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
        """Accept links of higher ranks on other hosts; where they can dial us. Raises as `tcp.listen`."""
        return await self._tcp.listen(address, self._accepted_remote)

    def install(self, view: View) -> None:
        """Begin to link up for `view`."""
        if view.epoch <= self.view.epoch:
            log.warning("old view ignored", epoch=view.epoch, known=self.view.epoch)
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
            return  # what it has sent may still be on its way into our memory: its stripes end first
        self._on_confirmed(rank, incarnation)
        self._confirmed[rank] = max(incarnation, self._confirmed.get(rank, 0))
        self._unconfirmed = {(r, i) for r, i in self._unconfirmed if i > self._confirmed.get(r, 0)}
        self._changed.set()

    def may_enter(self, epoch: int) -> None:
        """All members of the view of `epoch` are linked."""
        self._may_enter = max(epoch, self._may_enter)
        self._changed.set()

    def offered(self, rank: int, offer: MemoryOffered) -> None:
        """A rank, proven by its link, tells where its memory is."""
        self._tcp.offered((rank, self._system.peers.get(child_id(rank), 0)), offer)

    def reaches(self, rank: int, incarnation: int, memory: PeerMemory) -> bool:
        """Whether the link to this incarnation stands, and it is the one that `memory` came with."""
        key = (rank, incarnation)
        link = self._links.get(key)
        return link is not None and (link.peer_segment or self._tcp.memory(key)) is memory

    def stands(self, rank: int, incarnation: int) -> bool:
        """Whether there is a link to this incarnation."""
        return (rank, incarnation) in self._links

    async def ready(self, *, after: int) -> tuple[View, dict[int, PeerMemory]]:
        """Wait until all links of a view newer than `after` stand; the view and the members' memory.

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
                    f"{child_id(self._rank)}: view {view.epoch} was not complete within "
                    f"{format_duration(limit_ns)}: {'; '.join(self._missing())}. A process may be stopped or "
                    "starved: look at zbmd-node status."
                ) from None

    async def entered(self, epoch: int) -> bool:
        """Wait until all members are linked; False if a newer view comes first."""
        while True:
            self._changed.clear()
            if self._may_enter >= epoch:
                return True
            if self.view.epoch > epoch:
                return False
            await self._changed.wait()

    async def settle(self) -> None:
        """Wait until what was put into members' memory has arrived, but not for long."""
        await self._tcp.settle()

    async def close(self) -> None:
        """Stop to listen and dial; links that are in use are the actor system's to close."""
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
        """Once all links are closed: wait until nothing is under way any more."""
        await self._tcp.close()

    @property
    def rdma_transfers(self) -> TransferCounts | None:
        """What went over RDMA to members of other hosts, once drained; None without RDMA."""
        return self._tcp.rdma_transfers

    def _memories(self) -> Iterator[tuple[int, int, PeerMemory | None]]:
        """The members' memory, by rank and incarnation; None where it is not there yet."""
        for rank, incarnation in self._wanted():
            link = self._links.get((rank, incarnation))
            if link is not None:
                yield rank, incarnation, link.peer_segment or self._tcp.memory((rank, incarnation))

    def _wanted(self) -> Iterator[tuple[int, int]]:
        return ((m.rank, m.incarnation) for m in self.view.members if m.rank != self._rank)

    def _missing(self) -> Iterator[str]:
        """What the view lacks. Lazily, for each change of one of many links asks whether it is nothing."""
        for r, i in self._wanted():
            if (r, i) not in self._links:
                yield f"no link to {child_id(r)}#{i}"
        for r, i in self._wanted():
            if (r, i) in self._links and not self.code.has_heard(child_id(r), i):
                yield f"no word on changes of code from {child_id(r)}#{i}"
        for r, i, memory in self._memories():
            if memory is None:
                yield f"no memory of {child_id(r)}#{i}"
        for r, i in sorted(self._unconfirmed):
            yield f"{child_id(r)}#{i} is not proven gone"

    def _start_dial(self, member: Member, *, pause_s: float = 0.0) -> None:
        key = (member.rank, member.incarnation)
        self._dials[key] = self._loop.create_task(
            self._dial(member, pause_s), name=f"dial {child_id(member.rank)}"
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
            # If it died, its host tells why and another view will come; if not, `ready` names it in time.
            log.info("dial failed", to=child_id(member.rank), reason=str(error))
        except ZbmdError as error:
            log.warning("dial failed", to=child_id(member.rank), reason=str(error))
        finally:
            del self._dials[key]
        if link is None:
            self._dial_again(key)
            return
        if (link.peer.name, link.peer.incarnation) != (child_id(member.rank), member.incarnation):
            log.warning("dialed another process", wanted=child_id(member.rank), found=link.peer.name)
            link.close()
            return
        self._take(link, member)

    def _dial_again(self, key: MemberKey) -> None:
        """A member that is ours to dial could not be linked, or its link from another host ended before the
        view is entered: a network, or a crowd at its door, may have done it. Until the view's time is up.
        """
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
        """How long the links of this view may take: those of all of a host are made by its cores."""
        members = self.view.members
        neighbours = sum(member.host == self._host for member in members)
        return self._endpoint.deadlines.view_ns + LINK_NS * len(members) * neighbours // self._cores

    def _is_remote(self, member: Member) -> bool:
        """Hosts get their names so that processes which can share memory are on one."""
        return member.host != self._host

    def _chosen(self, link: RemoteLink, why: str) -> None:
        """Told once for each reason: it is one of this host, or of a few others."""
        if why != self._reason:
            self._reason = why
            by = "rdma" if isinstance(link, RdmaLink) else "tcp"
            log.info("link chosen", to=link.peer.name, by=by, reason=why)

    def _accepted_remote(self, link: RemoteLink, why: str) -> None:
        self._chosen(link, why)
        self._accepted(link)

    def _accepted(self, link: Link) -> None:
        if MARK in link.peer.name and self._on_guest is not None:
            self._on_guest(link)
            return
        found = rank_of(link.peer.name)
        rank = RANKS_MAX if found is None else found
        # Lower ranks are dialed by us; whatever else knocks is no member.
        if not self._rank < rank < RANKS_MAX or link.peer.job != self._endpoint.identity.job:
            log.warning("link of a stranger closed", name=link.peer.name)
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
        """Put a link of a member of the view to use."""
        key = (member.rank, link.peer.incarnation)
        slot = member.rank if link.peer_segment is None else link.peer_segment.slot
        if (link.peer_segment is None) != self._is_remote(member) or slot != member.rank:
            log.warning("a link that is not what the view says", peer=child_id(member.rank))
            link.close()
            return
        # The system closes the link to the one before; that close is ours and proves nothing.
        for older in [k for k in self._links if k[0] == member.rank]:
            del self._links[older]
            self._tcp.give_up(older)
        try:
            self._system.attach(link, on_closed=lambda error: self._closed(key, link, error))
        except ZbmdError as error:
            log.warning("link not taken", peer=child_id(member.rank), reason=str(error))
            link.close()
            return
        self._links[key] = link
        if isinstance(link, TcpLink | RdmaLink):
            self._tcp.join(key, link)
        self._changed.set()

    def _closed(self, key: MemberKey, link: Link, error: ZbmdError | None) -> None:
        """On one host the socket's end is the kernel's word that the process closed its files: it is gone."""
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
