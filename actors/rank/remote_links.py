"""A rank's links to members on other hosts: RDMA where both ends have it, else TCP with stripes for memory.

A member on another host counts as linked once its link is up, its memory is connected, and each side has
sent the other its offer (`MemoryOffered`). It is proven dead once the connection of its memory has ended:
from then on nobody stores on its behalf.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.ref import MARK
from zbmd.actors.rank.environment import LINKS_VARIABLE, links_wanted
from zbmd.actors.rank.host_contracts import MEMBER_ACTOR
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import RANKS_MAX, rank_name, rank_of
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError, UserError, ZbmdError
from zbmd.transport.host.link_choice import (
    DEVICES_VARIABLE,
    LINK_LOCKED_BYTES,
    RdmaPath,
    WantedDevice,
    parse_wanted_devices,
    rdma_paths,
    share_of,
    why_no_rdma,
)
from zbmd.transport.host.topology import HostFacts, read_host_facts
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.rdma import connect as remote_link
from zbmd.transport.rdma.connect import NoRdma, OwnRdma, Rdma, RdmaMemory, RemoteLink, open_rdma_plane
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.message_device import MessageDevice, open_rdma_device
from zbmd.transport.rdma.remote_memory import Mirror, RemoteMemory, RemotePeer
from zbmd.transport.rdma.transfer import TransferCounts
from zbmd.transport.secure.protection import Protection
from zbmd.transport.tcp.address import PROTECTION_VARIABLE, TcpSettings, tcp_settings
from zbmd.transport.tcp.connect import join_bulk

if TYPE_CHECKING:
    from zbmd.transport.rdma.plane import RdmaPlane


# --- the RDMA device of a rank, opened if the rank has members on other hosts and RDMA is available -----


def wanted_devices(environment: Mapping[str, str]) -> tuple[WantedDevice, ...]:
    """Return the devices that the user allows; empty for all. Raises `UserError`."""
    return parse_wanted_devices(environment.get(DEVICES_VARIABLE, ""))


def why_not_rdma(
    facts: HostFacts,
    environment: Mapping[str, str],
    wanted: Sequence[WantedDevice],
    protection: Protection,
    *,
    locked_bytes: int,
) -> str | None:
    """Return why RDMA is not used, in one line for both hosts; None if it is. locked_bytes: to be locked."""
    links = links_wanted(environment)
    if links == "tcp":
        return f"{LINKS_VARIABLE}=tcp on {facts.name}"
    if links != "rdma" and protection is Protection.TLS:
        return f"{PROTECTION_VARIABLE}=tls on {facts.name}, and RDMA encrypts nothing"
    return why_no_rdma(facts, wanted, locked_bytes=locked_bytes)


class MemberRdma:
    """The RDMA device and memory that a rank offers to other hosts. turn: its number on its own host."""

    def __init__(
        self, endpoint: Endpoint, environment: Mapping[str, str], tcp: TcpSettings, *, turn: int
    ) -> None:
        self._endpoint = endpoint
        self._links = links_wanted(environment)
        self._environment = environment
        self._wanted = wanted_devices(environment)
        self._tcp = tcp
        self._turn = turn
        self.transfers: TransferCounts | None = None
        """Counts of the closed plane."""
        self._device: MessageDevice | None = None
        self._plane: RdmaPlane | None = None

    async def open(self) -> OwnRdma:
        """Open the device, if RDMA is to be used. Raises `UserError` if RDMA is required and unavailable."""
        facts = await asyncio.to_thread(read_host_facts)
        why = self._why_not(facts)
        if why is None:
            path = share_of(rdma_paths(facts, self._wanted), self._turn)
            try:
                return await self._open(path)
            except UserError as error:
                await self.close()
                why = f"{facts.name}: {error}"
        if self._links == "rdma":
            raise UserError(f"{LINKS_VARIABLE}=rdma, but {why}")
        log.info("RDMA to other hosts is not used", reason=why)
        return NoRdma(why=why)

    async def close(self) -> None:
        """Release the device, after all links have ended. Idempotent."""
        plane, self._plane = self._plane, None
        if plane is not None:
            await asyncio.to_thread(plane.close)
            self.transfers = plane.counts
        device, self._device = self._device, None
        if device is not None:
            await device.aclose()

    def _why_not(self, facts: HostFacts) -> str | None:
        segment = self._endpoint.segment
        nbytes = LINK_LOCKED_BYTES + (0 if segment is None else segment.nbytes)
        return why_not_rdma(facts, self._environment, self._wanted, self._tcp.protection, locked_bytes=nbytes)

    async def _open(self, path: RdmaPath) -> Rdma:
        segment = self._endpoint.segment
        if segment is None:
            raise LocalProtocolError("a member without a segment cannot offer memory")
        self._device = open_rdma_device(path.device, path.address)
        # Locking the arena takes a while.
        self._plane = plane = await asyncio.to_thread(
            open_rdma_plane, path.device, path.address, segment=segment
        )
        memory = RdmaMemory(plane=plane, slot_of=self._slot_of)
        return Rdma(device=self._device, memory=memory, only=self._links == "rdma")

    def _slot_of(self, peer: PeerInfo) -> int:
        """Return the peer's rank. Raises `RemoteProtocolError` unless it is a member of this job."""
        own, rank = self._endpoint.identity, rank_of(peer.name)
        if rank is None or rank >= RANKS_MAX or peer.name == own.name or peer.job != own.job:
            raise RemoteProtocolError(f"{peer.name} of job {peer.job} is not a member of this job")
        return rank


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
