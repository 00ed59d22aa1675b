"""Regions over a TCP link: both sides join a bulk connection to it, and the dialer opens its lanes."""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.transport import tcp
from zbmd.transport.bulk_lanes import buffer_bytes_max, lanes_for, round_trip_us
from zbmd.transport.bulk_machine import BulkLimits
from zbmd.transport.bulk_peer import BulkPeer, BulkPeerInfo
from zbmd.transport.bulk_plane import DataPlane
from zbmd.transport.endpoint import Endpoint
from zbmd.transport.errors import LocalProtocolError, PeerLost
from zbmd.transport.region import Regions
from zbmd.transport.segment import Segment
from zbmd.transport.session import LANES_MAX
from zbmd.transport.tcp_link import TcpLink


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkMemory:
    """What a process brings to its bulk connections: one of each, for all peers."""

    plane: DataPlane
    segment: Segment
    """Ours: its cells and lost mask tell of the peers."""
    regions: Regions
    """What peers may use of it."""


async def join_bulk(
    link: TcpLink,
    memory: BulkMemory,
    endpoint: Endpoint,
    *,
    slot: int,
    lanes: int | None = None,
    limits: BulkLimits | None = None,
) -> BulkPeer:
    """Give a link regions: after this `link.open_region` works. Both sides call it, in any order.

    slot: the peer's; its cells in our segment are those of this slot. lanes: of the dialer, 1..`LANES_MAX`,
    by default what the round trip asks for (`bulk_lanes`). Transfers wait for the first lane. Raises as
    `tcp.open_lane`, and the link is closed then.
    """
    if lanes is not None and not 1 <= lanes <= LANES_MAX:
        raise LocalProtocolError(f"{lanes} lanes to {link.peer.name}: 1 to {LANES_MAX} are possible")
    info = BulkPeerInfo(name=link.peer.name, slot=slot, incarnation=link.peer.incarnation)
    bulk = memory.plane.connect(
        info, segment=memory.segment, regions=memory.regions, limits=limits, on_ended=link.bulk_ended
    )
    link.carry(bulk)
    if link.dialed is None:
        link.on_lane = bulk.add_lane
        return bulk
    try:
        await _open_lanes(link, bulk, endpoint, lanes)
    except BaseException:
        bulk.abort(PeerLost(link.peer.name, "its bulk connection could not be made"))
        link.close()
        raise
    return bulk


async def _open_lanes(link: TcpLink, bulk: BulkPeer, endpoint: Endpoint, lanes: int | None) -> None:
    first = await tcp.open_lane(link, 0, endpoint)
    # Asked before the lane is the data plane's.
    wanted = lanes or lanes_for(round_trip_us(first.sock), buffer_bytes_max())
    bulk.add_lane(first)
    for number in range(1, wanted):
        bulk.add_lane(await tcp.open_lane(link, number, endpoint))
