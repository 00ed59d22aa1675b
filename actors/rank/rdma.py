"""The RDMA device of one rank: opened once it has members on other hosts, if it can be and is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import structlog

from zbmd.actors.rank.rdma_choice import wanted_devices, why_not_rdma
from zbmd.actors.rank_env import LINKS_VARIABLE, links_wanted
from zbmd.actors.view import RANKS_MAX, rank_of
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError
from zbmd.transport.host.facts import HostFacts, read_host_facts
from zbmd.transport.host.rdma_device_choice import (
    LINK_LOCKED_BYTES,
    RdmaPath,
    rdma_paths,
    share_of,
)
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.rdma.connect import NoRdma, OwnRdma, Rdma, open_rdma_plane
from zbmd.transport.rdma.handshake import RdmaMemory
from zbmd.transport.rdma.message_device import RdmaDevice, open_rdma_device
from zbmd.transport.rdma.transfer import TransferCounts
from zbmd.transport.tcp.address import TcpSettings

if TYPE_CHECKING:
    from zbmd.transport.rdma.plane import RdmaPlane

log: Final = structlog.stdlib.get_logger("zbmd.actors.member")


class MemberRdma:
    """What one rank offers members on other hosts. turn: its number among the ranks of its host."""

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
        """Of a plane that was closed."""
        self._device: RdmaDevice | None = None
        self._plane: RdmaPlane | None = None

    async def open(self) -> OwnRdma:
        """Open the device, if RDMA is to be used. Raises `UserError` if it must be and cannot."""
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
        log.info("no RDMA to other hosts", reason=why)
        return NoRdma(why=why)

    async def close(self) -> None:
        """Give the device back, once all links have ended. Idempotent."""
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
            raise LocalProtocolError("a member without memory of its own cannot lend it")
        self._device = open_rdma_device(path.device, path.address)
        # To lock the arena takes a while.
        self._plane = plane = await asyncio.to_thread(
            open_rdma_plane, path.device, path.address, segment=segment
        )
        memory = RdmaMemory(plane=plane, slot_of=self._slot_of)
        return Rdma(device=self._device, memory=memory, only=self._links == "rdma")

    def _slot_of(self, peer: PeerInfo) -> int:
        """Its rank. Raises `RemoteProtocolError` on who is no member of the job: it gets no memory."""
        own, rank = self._endpoint.identity, rank_of(peer.name)
        if rank is None or rank >= RANKS_MAX or peer.name == own.name or peer.job != own.job:
            raise RemoteProtocolError(f"{peer.name} of job {peer.job} is no member of this job")
        return rank
