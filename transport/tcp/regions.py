"""Regions over a TCP link: both sides join a bulk connection to it, and the dialer opens its stripes."""

from __future__ import annotations

from zbmd.transport.bulk.limits import BulkLimits, BulkPeerInfo
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.bulk.stripe_scaling import buffer_bytes_max, round_trip_us, stripes_for
from zbmd.transport.errors import LocalProtocolError, PeerLost
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.secure.session_keys import STRIPES_MAX
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.link import TcpLink


async def join_bulk(
    link: TcpLink, endpoint: Endpoint, plane: DataPlane, *, slot: int, stripes: int | None = None
) -> BulkPeer:
    """Give a link regions: after this `link.open_region` works. Both sides call it, in any order.

    endpoint: ours, with a segment, whose regions the peer may use. slot: the peer's; its cells in our segment
    are those of this slot. stripes: of the dialer, 1..`STRIPES_MAX`, all of which are used; by default
    what the round trip may ask for, of which each side uses what the path turns out to need
    (`bulk.stripe_scaling`). Transfers wait for the first stripe. Raises `LocalProtocolError` without a
    segment, else as `tcp.open_stripe`, and the link is closed then.
    """
    if stripes is not None and not 1 <= stripes <= STRIPES_MAX:
        raise LocalProtocolError(f"{stripes} stripes to {link.peer.name}: 1 to {STRIPES_MAX} are possible")
    if endpoint.segment is None:
        raise LocalProtocolError(f"no segment to join to the link to {link.peer.name}: make one first")
    bulk = BulkPeer(
        plane,
        BulkPeerInfo(name=link.peer.name, slot=slot, incarnation=link.peer.incarnation),
        segment=endpoint.segment,
        limits=BulkLimits(
            close_ns=endpoint.deadlines.flush_ns, silent_ms=endpoint.deadlines.tcp_user_timeout_ms
        ),
        on_ended=link.bulk_ended,
        adapts=stripes is None,
    )
    link.carry(bulk)
    if link.dialed is None:
        link.on_stripe = bulk.add_stripe
        return bulk
    try:
        await _open_stripes(link, bulk, endpoint, stripes)
    except BaseException:
        bulk.abort(PeerLost(link.peer.name, "its bulk connection could not be made"))
        link.close()
        raise
    return bulk


async def _open_stripes(link: TcpLink, bulk: BulkPeer, endpoint: Endpoint, stripes: int | None) -> None:
    first = await tcp.open_stripe(link, 0, endpoint)
    # Asked before the stripe is the data plane's.
    wanted = stripes or stripes_for(round_trip_us(first.sock), buffer_bytes_max())
    bulk.add_stripe(first)
    for number in range(1, wanted):
        bulk.add_stripe(await tcp.open_stripe(link, number, endpoint))
