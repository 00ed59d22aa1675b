"""Regions over a TCP link: both sides join a bulk connection to it, and the dialer opens its lanes."""

from __future__ import annotations

from zbmd.transport.bulk.lane_count import buffer_bytes_max, lanes_for, round_trip_us
from zbmd.transport.bulk.limits import BulkLimits
from zbmd.transport.bulk.peer import BulkPeer, BulkPeerInfo
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.errors import LocalProtocolError, PeerLost
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.secure.session_keys import LANES_MAX
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.link import TcpLink


async def join_bulk(
    link: TcpLink, endpoint: Endpoint, plane: DataPlane, *, slot: int, lanes: int | None = None
) -> BulkPeer:
    """Give a link regions: after this `link.open_region` works. Both sides call it, in any order.

    endpoint: ours, with a segment, whose regions the peer may use. slot: the peer's; its cells in our segment
    are those of this slot. lanes: of the dialer, 1..`LANES_MAX`, all of which are used; by default
    what the round trip may ask for, of which each side uses what the path turns out to need
    (`bulk.lane_scaling`). Transfers wait for the first lane. Raises `LocalProtocolError` without a segment,
    else as `tcp.open_lane`, and the link is closed then.
    """
    if lanes is not None and not 1 <= lanes <= LANES_MAX:
        raise LocalProtocolError(f"{lanes} lanes to {link.peer.name}: 1 to {LANES_MAX} are possible")
    if endpoint.segment is None:
        raise LocalProtocolError(f"no segment to join to the link to {link.peer.name}: make one first")
    bulk = plane.connect(
        BulkPeerInfo(name=link.peer.name, slot=slot, incarnation=link.peer.incarnation),
        segment=endpoint.segment,
        limits=BulkLimits(
            close_ns=endpoint.deadlines.flush_ns, silent_ms=endpoint.deadlines.tcp_user_timeout_ms
        ),
        on_ended=link.bulk_ended,
        adapts=lanes is None,
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
