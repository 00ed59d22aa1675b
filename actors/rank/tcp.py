"""A rank's links to members on other hosts: RDMA where both ends have it, else TCP with stripes for memory.

A member on another host counts as linked once its link is up, its memory is connected, and each side has
sent the other its offer (`MemoryOffered`). It is proven dead once the connection of its memory has ended:
from then on nobody stores on its behalf.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Final, TypeAlias

import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.scopes import MARK
from zbmd.actors.rank.host_contracts import MEMBER_ACTOR
from zbmd.actors.rank.rdma import MemberRdma
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import rank_name
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.errors import LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.rdma import connect as remote_link
from zbmd.transport.rdma.connect import NoRdma, OwnRdma, RemoteLink
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.remote_memory import Mirror, RemoteMemory, RemotePeer
from zbmd.transport.rdma.transfer import TransferCounts
from zbmd.transport.tcp.address import tcp_settings
from zbmd.transport.tcp.connect import join_bulk

log: Final = structlog.stdlib.get_logger("zbmd.actors.member")

MemberKey: TypeAlias = tuple[int, int]
"""A rank and its incarnation."""


class MemoryOffered(Contract, id="zbmd.member.memory"):
    """Offers a member on another host the sender's segment; `mirror` takes the receiver's descriptors."""

    arena_offset: int
    nbytes: int
    mirror: RegionHandle


class MemberTcp:
    """The members on other hosts. on_change: memory was connected; on_gone: a member is proven dead.

    turn: its number among the ranks of its host, which share RDMA devices.
    """

    def __init__(
        self,
        system: ActorSystem,
        endpoint: Endpoint,
        *,
        turn: int,
        on_change: Callable[[], None],
        on_gone: Callable[[MemberKey], None],
    ) -> None:
        self._system = system
        self._endpoint = endpoint
        self._settings = tcp_settings(os.environ)
        self._on_change = on_change
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._listener: remote_link.RemoteListener | None = None
        self._rdma = MemberRdma(endpoint, os.environ, self._settings, turn=turn)
        self._own: OwnRdma = NoRdma(why="this rank does not listen")
        self._plane: DataPlane | None = None
        self._joins: dict[MemberKey, asyncio.Task[None]] = {}
        self._offers: dict[MemberKey, asyncio.Future[MemoryOffered]] = {}
        self._bulks: dict[MemberKey, RemotePeer] = {}
        """Connections that have not ended."""
        self._memories: dict[MemberKey, RemoteMemory] = {}

    async def listen(self, address: str, on_link: remote_link.OnLink) -> str:
        """Accept links at `address`; return the address to dial.

        Raises as `tcp.listen`, and `UserError` if it must be RDMA and cannot.
        """
        self._own = await self._rdma.open()
        self._listener = await remote_link.listen(
            address, on_link, self._endpoint, self._own, settings=self._settings, plain=_is_guest
        )
        return str(self._listener.address)

    async def dial(self, address: str) -> tuple[RemoteLink, str]:
        """Return a link to the member at `address`, and why it is of its kind; see `remote_link.dial`."""
        return await remote_link.dial(address, self._endpoint, self._own, settings=self._settings)

    def join(self, key: MemberKey, link: RemoteLink) -> None:
        """Connect the memory of a member that the actor system has just attached."""
        self._offers[key] = self._loop.create_future()
        name = f"join the memory of {rank_name(key[0])}"
        self._joins[key] = self._loop.create_task(self._join(key, link), name=name)

    def offered(self, key: MemberKey, offer: MemoryOffered) -> None:
        """A member offers its memory."""
        waiting = self._offers.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(offer)

    def memory(self, key: MemberKey) -> RemoteMemory | None:
        """Return the memory of a member, once connected and while it may be used."""
        memory = self._memories.get(key)
        return None if memory is None or memory.ended else memory

    def link_closed(self, key: MemberKey) -> bool:
        """The link of a member ended, and its stripes follow. Returns whether `on_gone` is still to come."""
        join = self._joins.get(key)
        if join is not None:
            join.cancel()
        return key in self._bulks

    def give_up(self, key: MemberKey) -> bool:
        """A member is gone: abort its transfers. Returns whether `on_gone` is still to come."""
        bulk = self._bulks.get(key)
        if bulk is not None:
            bulk.abort(PeerLost(rank_name(key[0]), "its process is gone"))
        return self.link_closed(key)

    async def settle(self) -> None:
        """Wait, for a bounded time, until puts have arrived at all live members.

        A link's end announces our leaving, so a member must have our last notification before it.
        """
        waits = [asyncio.ensure_future(_settled(bulk)) for bulk in self._bulks.values()]
        if waits:
            await asyncio.wait(waits, timeout=self._endpoint.deadlines.flush_ns / 1e9)
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)

    async def stop_listening(self) -> None:
        """Stop accepting links and connecting memory."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        joins = list(self._joins.values())
        for task in joins:
            task.cancel()
        if joins:
            await asyncio.wait(joins)

    async def close(self) -> None:
        """Wait, after all links are closed, until every transfer has ended in order."""
        for bulk in list(self._bulks.values()):
            bulk.close()
            with contextlib.suppress(ZbmdError):
                await bulk.ended
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        if self._plane is not None:
            await asyncio.to_thread(self._plane.close)
        await self._rdma.close()

    @property
    def rdma_transfers(self) -> TransferCounts | None:
        """Transfers over RDMA, once closed; None without RDMA."""
        return self._rdma.transfers

    async def _join(self, key: MemberKey, link: RemoteLink) -> None:
        rank, _ = key
        mirror: Mirror | None = None
        try:
            segment = self._endpoint.segment
            if segment is None:
                raise LocalProtocolError("a member without a segment cannot connect to the memory of others")
            await self._until_ended(key)
            bulk = await self._connect(link, rank)
            self._bulks[key] = bulk
            bulk.ended.then(lambda: self._ended_on_thread(key, bulk))
            mirror = Mirror(segment, rank)
            await self._offer(rank, segment, mirror)
            theirs = await self._offers[key]
            self._memories[key] = RemoteMemory(
                bulk, mirror, theirs.mirror, arena_offset=theirs.arena_offset, nbytes=theirs.nbytes
            )
        except ZbmdError as error:
            # If it died, another view will come; if not, the wait for the view fails and names it.
            log.warning("could not connect the memory of a member", of=rank_name(rank), reason=str(error))
            link.close()
        else:
            self._on_change()
        finally:
            if mirror is not None and key not in self._memories:
                mirror.close()
            if self._joins.get(key) is asyncio.current_task():
                del self._joins[key], self._offers[key]

    async def _connect(self, link: RemoteLink, rank: int) -> RemotePeer:
        if isinstance(link, RdmaLink):
            if link.memory is None:
                raise LocalProtocolError(f"no memory came with the RDMA link to {rank_name(rank)}")
            return link.memory
        if self._plane is None:
            self._plane = DataPlane()
        return await join_bulk(link, self._endpoint, self._plane, slot=rank)

    async def _until_ended(self, key: MemberKey) -> None:
        """End the previous connection of a member that linked again."""
        before = self._bulks.get(key)
        if before is not None:
            before.abort(PeerLost(rank_name(key[0]), "it linked again"))
            with contextlib.suppress(ZbmdError):
                await before.ended
            self._ended(key, before)

    async def _offer(self, rank: int, segment: Segment, mirror: Mirror) -> None:
        offer = MemoryOffered(
            arena_offset=segment.nbytes - segment.arena.capacity_bytes,
            nbytes=segment.nbytes,
            mirror=mirror.handle,
        )
        await self._system.ref(f"{rank_name(rank)}/{MEMBER_ACTOR}").tell(offer)

    def _ended_on_thread(self, key: MemberKey, bulk: RemotePeer) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended, key, bulk)

    def _ended(self, key: MemberKey, bulk: RemotePeer) -> None:
        if self._bulks.get(key) is bulk:  # it may have linked again
            del self._bulks[key]
            memory = self._memories.pop(key, None)
            if memory is not None:
                memory.close()
            self._on_gone(key)


def _is_guest(peer: PeerInfo) -> bool:
    """Whether the peer is an external client: it dials as nodes do and gets no memory."""
    return MARK in peer.name


async def _settled(bulk: RemotePeer) -> None:
    with contextlib.suppress(ZbmdError):
        await bulk.settled()
