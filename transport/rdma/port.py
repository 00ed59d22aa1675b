"""A port of an RDMA device, its address, and the way from a queue pair there to one of a peer."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, NamedTuple

from zbmd.transport.host.rdma_device_choice import choose_address
from zbmd.transport.rdma.native._rdma_device import ACTIVE, ROCE_V1, Path
from zbmd.transport.rdma.setup import RETRIES, TIMEOUT, QueuePairAt

if TYPE_CHECKING:
    from zbmd.transport.rdma.native._rdma_device import Device


class PortAt(NamedTuple):
    """A port of a device, and its address."""

    port: int
    gid_index: int
    gid: bytes
    mtu: int
    """As ibv_mtu."""
    lid: int
    message_bytes_max: int

    def queue_pair(self, number: int, first_psn: int) -> QueuePairAt:
        """What a peer is told of a queue pair here, whose first packet has that sequence number."""
        return QueuePairAt(gid=self.gid, lid=self.lid, number=number, first_psn=first_psn, mtu=self.mtu)

    def path_to(self, peer: QueuePairAt, own_psn: int, *, timeout: int = TIMEOUT) -> Path:
        """From a queue pair here, whose first packet has `own_psn`, to the peer's; timeout: see `TIMEOUT`."""
        return Path(
            peer.gid,
            number=peer.number,
            first_psn=peer.first_psn,
            own_psn=own_psn,
            lid=peer.lid,
            mtu=min(peer.mtu, self.mtu),
            port=self.port,
            gid_index=self.gid_index,
            timeout=timeout,
            retries=RETRIES,
        )


def choose_port(device: Device, address: str | None) -> PortAt:
    """An address of an active port, RoCE v2 or InfiniBand; rather one that is not link-local.

    Raises `UserError` if there is none, or none with `address`.
    """
    return choose_address(device.name, address, _usable(device))


def _usable(device: Device) -> Iterator[tuple[IPv6Address, PortAt]]:
    for port, index, gid_type, raw in device.gids():
        state, mtu, lid, message_bytes_max = device.port(port)
        gid = IPv6Address(raw)
        if gid_type != ROCE_V1 and state == ACTIVE and int(gid):
            yield gid, PortAt(port, index, raw, mtu, lid, message_bytes_max)
