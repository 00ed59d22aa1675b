"""Finding who has a peer's address, before a queue pair is connected to it.

Over Ethernet the kernel asks the network for it (ARP, neighbour discovery) and gives up after a second, which
one lost packet is enough for: so it is asked again. And it is asked by a thread that holds no lock of Python:
connecting a queue pair would ask as well, while the event loop stands still. Source: ib_resolve_eth_dmac of
Linux (drivers/infiniband/core/verbs.c), whose time is 1000 ms.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from collections.abc import Callable
from typing import Final

from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.setup import QueuePairAt

LOOK_UPS: Final = 3
"""At most so many, each of up to a second."""
LOOK_UP_SHARE: Final = 2
"""None begins after this part of the time that is left: the peer may have to look us up then."""

LookUp = Callable[[QueuePairAt], int]
"""Blocks; 0, or an errno. See `_rdma_device.Device.look_up`."""


def looks_up(name: str, address: str) -> LookUp | None:
    """By the port of a device that has this address; None where zbmd was built without libibverbs: connecting
    asks once, then.

    Raises `UserError` if the device cannot be opened.
    """
    try:
        from zbmd.transport.rdma.native._rdma_device import Device
        from zbmd.transport.rdma.port import choose_port
    except ImportError:
        return None
    device = Device(name)
    at = choose_port(device, address)
    return lambda peer: device.look_up(at.path_to(peer, 0))


async def reach(device: str, look_up: LookUp, peer: QueuePairAt, deadline_ns: int) -> None:
    """Return once it is known who has the peer's address, or something else is wrong, which connecting tells.

    Raises `UserError` if nobody has answered.
    """
    until_ns = now_ns() + (deadline_ns - now_ns()) // LOOK_UP_SHARE
    asked = 0
    while asked == 0 or (asked < LOOK_UPS and now_ns() < until_ns):
        if await asyncio.to_thread(look_up, peer) != errno.ETIMEDOUT:
            return
        asked += 1
    gid = ipaddress.IPv6Address(peer.gid)
    raise UserError(
        f"the RDMA device {device} cannot reach {gid.ipv4_mapped or gid}: the network was asked {asked} × "
        "who has that address, and nobody answered. Is the peer's port up, and in the same network?"
    )
