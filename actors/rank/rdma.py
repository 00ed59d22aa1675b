"""The RDMA device of a rank, opened if the rank has members on other hosts and RDMA is available."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from zbmd.actors.rank.environment import LINKS_VARIABLE, links_wanted
from zbmd.actors.view import RANKS_MAX, rank_of
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError
from zbmd.transport.host.facts import HostFacts, read_host_facts
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
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.rdma.connect import NoRdma, OwnRdma, Rdma, RdmaMemory, open_rdma_plane
from zbmd.transport.rdma.message_device import MessageDevice, open_rdma_device
from zbmd.transport.rdma.transfer import TransferCounts
from zbmd.transport.secure.protection import Protection
from zbmd.transport.tcp.address import PROTECTION_VARIABLE, TcpSettings

if TYPE_CHECKING:
    from zbmd.transport.rdma.plane import RdmaPlane


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


log: Final = structlog.stdlib.get_logger("zbmd.actors.member")


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
