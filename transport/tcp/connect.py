"""TCP links between hosts: listening, dialing, and stripes for bulk data beside them.

A connection goes through TLS, if that is asked for, the hello, and the setup (`sockets`), all by one
deadline. Strangers are bounded in number, and drive out themselves before others (`half_open`).
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from typing import Final

import structlog

from zbmd.transport.bulk.events import BulkLimits, BulkPeerInfo
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.bulk.stripe_io import Stripe, buffer_bytes_max, round_trip_us, stripes_for
from zbmd.transport.errors import LocalProtocolError, PeerLost, UserError, ZbmdError
from zbmd.transport.handshake.acceptor import Acceptor
from zbmd.transport.handshake.driver import lost_reason
from zbmd.transport.handshake.hello import HungUp
from zbmd.transport.handshake.session_setup import DeclineReason, PeerBusy
from zbmd.transport.host.link_choice import rank_interfaces
from zbmd.transport.host.topology.interfaces import read_interfaces
from zbmd.transport.identity import Side
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.secure.protection import STRIPES_MAX, Protection, Purpose, Session
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, numeric, parse_address, source_of
from zbmd.transport.tcp.link import TcpLink
from zbmd.transport.tcp.sockets import (
    Ready,
    Resolved,
    connect,
    listen_on,
    resolve,
    secure,
    set_options,
    set_up_dialer,
    set_up_listener,
)

# ---- regions over a TCP link: both sides join a bulk connection to it, and the dialer opens its stripes


async def join_bulk(
    link: TcpLink, endpoint: Endpoint, plane: DataPlane, *, slot: int, stripes: int | None = None
) -> BulkPeer:
    """Give a link regions: after this `link.open_region` works. Both sides call it, in any order.

    endpoint: ours, with a segment, whose regions the peer may use. slot: the peer's; its cells in our segment
    are those of this slot. stripes: of the dialer, 1..`STRIPES_MAX`, all of which are used; by default
    what the round trip may ask for, of which each side uses what the path turns out to need
    (`bulk.stripe_io`). Transfers wait for the first stripe. Raises `LocalProtocolError` without a
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
    first = await open_stripe(link, 0, endpoint)
    # Asked before the stripe is the data plane's.
    wanted = stripes or stripes_for(round_trip_us(first.sock), buffer_bytes_max())
    bulk.add_stripe(first)
    for number in range(1, wanted):
        bulk.add_stripe(await open_stripe(link, number, endpoint))


log: Final = structlog.stdlib.get_logger("zbmd.transport.tcp")

HALF_OPEN_MAX: Final = 256
"""Connections that have not finished their setup, of a listener."""
LINKS_MAX: Final = 4096
"""Links that a listener has made and that have not ended."""
DIAL_TRIES_MAX: Final = 6
"""A dial is repeated if it is hung up on in its hello: its place may have gone to another."""
DIAL_PAUSE_S: Final = 0.02
"""Before the second try, at most; doubled before each further one."""

OnLink = Callable[[TcpLink], None]
_ANY: Final = ("0.0.0.0", "::")


class TcpListener(Acceptor):
    """Accepts links at TCP addresses until closed. Made by `listen`."""

    def __init__(
        self,
        sockets: list[socket.socket],
        on_link: OnLink,
        endpoint: Endpoint,
        settings: TcpSettings,
        *,
        timeout_ns: int,
        half_open_max: int,
        links_max: int,
    ) -> None:
        self.addresses = tuple(_reachable(sockets, settings))
        """Return the addresses at which others can dial it, best first."""
        self._on_link = on_link
        self._endpoint = endpoint
        self._settings = settings
        self._timeout_ns = timeout_ns
        self._links_max = links_max
        self._links: dict[bytes, TcpLink] = {}
        name = " ".join(str(numeric(sock.getsockname())) for sock in sockets)
        super().__init__(name, sockets, places=half_open_max)
        if settings.protection is Protection.NONE:
            log.warning("links are not protected against anybody on the network", listener=name)

    @property
    def address(self) -> TcpAddress:
        """The best of `addresses`."""
        return self.addresses[0]

    @property
    def links(self) -> int:
        """Return how many links it has made that have not ended."""
        return len(self._links)

    def _source_of(self, sock: socket.socket) -> str:
        """Strangers count by address."""
        return source_of(str(sock.getpeername()[0]))

    async def _welcome(self, sock: socket.socket, source: str) -> None:
        deadline_ns = now_ns() + self._timeout_ns
        try:
            ready = await self._set_up(sock, source, deadline_ns)
            stripe = _stripe(ready, self._endpoint) if ready.session.purpose is Purpose.STRIPE else None
        except (ZbmdError, OSError) as error:
            self._refused(error, source=source)
            return
        if stripe is None:
            self._add_link(ready)
        else:
            self._add_stripe(stripe)

    async def _set_up(self, sock: socket.socket, source: str, deadline_ns: int) -> Ready:
        try:
            set_options(sock, self._endpoint.deadlines, control=True)
        except OSError:
            sock.close()
            raise
        byte_socket, binding = await secure(
            sock, Side.LISTENER, self._settings, deadline_ns, peer=source, host=None
        )
        try:
            return await set_up_listener(
                byte_socket,
                binding,
                self._endpoint,
                self._settings,
                deadline_ns,
                lookup=self._lookup,
                has_room=len(self._links) < self._links_max,
            )
        except BaseException:
            byte_socket.close()
            raise

    def _lookup(self, control_id: bytes, stripe: int) -> Session | DeclineReason:
        link = self._links.get(control_id)
        if link is None:
            return DeclineReason.NO_SESSION
        return link.session if link.has_place_for(stripe) else DeclineReason.STRIPE_TAKEN

    def _add_link(self, ready: Ready) -> None:
        session_id = ready.session.session_id
        link = TcpLink(ready, endpoint=self._endpoint, on_end=lambda: self._links.pop(session_id, None))
        self._links[session_id] = link
        self._on_link(link)

    def _add_stripe(self, stripe: Stripe) -> None:
        link = self._links.get(stripe.session.control_id)
        if link is None or not link.has_place_for(stripe.session.stripe):
            stripe.sock.close()  # it has ended, or another has been faster
            return
        link.add_stripe(stripe)


async def listen(
    address: TcpAddress | str,
    on_link: OnLink,
    endpoint: Endpoint,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    half_open_max: int = HALF_OPEN_MAX,
    links_max: int = LINKS_MAX,
) -> TcpListener:
    """Listen at `address`: one host, or every address of this machine, or of the interfaces in `settings`.

    `on_link` is called with each link that stands. timeout_ns: from a connection to its link, by default the
    endpoint's `deadlines.hello_ns`. Raises `UserError` if the address cannot be had, and says why, and
    `OutOfDescriptors`.
    """
    where = parse_address(address) if isinstance(address, str) else address
    settings = settings or TcpSettings()
    if timeout_ns is None:
        timeout_ns = endpoint.deadlines.hello_ns
    hosts = [where.host] if where.host else _own_hosts(settings) or list(_ANY)
    resolved: list[Resolved] = []
    for host in hosts:
        resolved += await resolve(
            TcpAddress(host=host, port=where.port), now_ns() + endpoint.deadlines.dial_ns, passive=True
        )
    sockets = listen_on(resolved, asked=str(where))
    return TcpListener(
        sockets,
        on_link,
        endpoint,
        settings,
        timeout_ns=timeout_ns,
        half_open_max=half_open_max,
        links_max=links_max,
    )


async def dial(
    address: TcpAddress | str,
    endpoint: Endpoint,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
) -> TcpLink:
    """Connect to the listener at `address`, say hello, and return the link.

    timeout_ns: by default the endpoint's `deadlines.dial_ns`. Raises `UserError` if the name is unknown,
    `PeerLost` if nobody listens there or the peer ends meanwhile, `DeadlineExceeded`, `OutOfDescriptors`, and
    a `HelloError`, `SetupError`, `TlsError` or other `RemoteProtocolError` if either side refuses the other.
    """
    where = parse_address(address) if isinstance(address, str) else address
    settings = settings or TcpSettings()
    deadline_ns = now_ns() + (endpoint.deadlines.dial_ns if timeout_ns is None else timeout_ns)
    ready = await _dial(where, where.host, endpoint, settings, deadline_ns)
    return TcpLink(ready, endpoint=endpoint, dialed=where, settings=settings)


async def open_stripe(
    link: TcpLink, stripe: int, endpoint: Endpoint, *, timeout_ns: int | None = None
) -> Stripe:
    """One more connection to the peer of `link`, which we have dialed: stripe 0..`STRIPES_MAX` - 1.

    At the peer it comes out of its link's `on_stripe`. Raises as `dial`, `JoinRefused` if the stripe's
    number is taken there, and `LocalProtocolError` if the link is not ours to extend.
    """
    if link.dialed is None or link.settings is None or not 0 <= stripe < STRIPES_MAX or link.closed:
        raise LocalProtocolError(
            f"stripe {stripe} of {link}: the dialer of an open link may open 0 to {STRIPES_MAX - 1}"
        )
    deadline_ns = now_ns() + (endpoint.deadlines.dial_ns if timeout_ns is None else timeout_ns)
    where, host = link.remote_address, link.dialed.host
    ready = await _dial(
        where, host, endpoint, link.settings, deadline_ns, control=link.session, stripe=stripe
    )
    try:
        return _stripe(ready, endpoint)
    except OSError as error:
        silent_ms = endpoint.deadlines.tcp_user_timeout_ms
        raise PeerLost(ready.session.peer.name, lost_reason(error, silent_ms=silent_ms)) from error


async def _dial(
    where: TcpAddress,
    host: str,
    endpoint: Endpoint,
    settings: TcpSettings,
    deadline_ns: int,
    *,
    control: Session | None = None,
    stripe: int = 0,
) -> Ready:
    """Dial until it stands, or is refused, or has been tried often enough."""
    pause_s = DIAL_PAUSE_S
    for tries_left in reversed(range(DIAL_TRIES_MAX)):
        try:
            return await _dial_once(where, host, endpoint, settings, deadline_ns, control, stripe)
        except (HungUp, PeerBusy) as error:
            if isinstance(error, HungUp) and error.by_peer:
                raise
            if not tries_left or now_ns() + int(pause_s * 1e9) >= deadline_ns:
                raise
        await asyncio.sleep(pause_s * random.random())  # apart from others that were sent away with us
        pause_s *= 2
    raise AssertionError("the last try returns or raises")


async def _dial_once(
    where: TcpAddress,
    host: str,
    endpoint: Endpoint,
    settings: TcpSettings,
    deadline_ns: int,
    control: Session | None,
    stripe: int,
) -> Ready:
    local_hosts = _own_hosts(settings)
    sock = await connect(where, deadline_ns, local_hosts=local_hosts)
    try:
        set_options(sock, endpoint.deadlines, control=control is None)
        byte_socket, binding = await secure(
            sock, Side.DIALER, settings, deadline_ns, peer=str(where), host=host
        )
        sock = byte_socket.sock
        return await set_up_dialer(
            byte_socket, binding, endpoint, settings, deadline_ns, control=control, stripe=stripe
        )
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            silent_ms = endpoint.deadlines.tcp_user_timeout_ms
            raise PeerLost(str(where), lost_reason(error, silent_ms=silent_ms)) from error
        raise


def _stripe(ready: Ready, endpoint: Endpoint) -> Stripe:
    """Hand over its socket; closed if that fails with OSError."""
    sock = ready.byte_socket.sock
    try:
        set_options(sock, endpoint.deadlines, control=False)
    except OSError:
        sock.close()
        raise
    return Stripe(session=ready.session, sock=sock, surplus=ready.surplus)


def _own_hosts(settings: TcpSettings) -> list[str]:
    """The addresses of the interfaces that the user has named, best first; none if none were named."""
    wanted = settings.interfaces
    if not wanted.names:
        return []
    interfaces = read_interfaces()
    hosts = [
        host for each in rank_interfaces(interfaces, wanted) for host in _hosts(each.name, each.addresses)
    ]
    if not hosts:
        known = ", ".join(each.name for each in interfaces if each.addresses)
        raise UserError(
            f"no interface that is up and has an address fits {str(wanted)!r} (ZBMD_SOCKET_IFNAME). "
            f"There are: {known}."
        )
    return hosts


def _hosts(interface: str, addresses: tuple[str, ...]) -> list[str]:
    return [f"{host}%{interface}" if host.startswith("fe80:") else host for host in addresses]


def _reachable(sockets: list[socket.socket], settings: TcpSettings) -> list[TcpAddress]:
    """Return the addresses of these sockets for others: of one that listens everywhere, the machine's."""
    bound = [numeric(sock.getsockname()) for sock in sockets]
    every = {":" in each.host: each.port for each in bound if each.host in _ANY}
    named = [each for each in bound if each.host not in _ANY]
    if not every:
        return named
    ranked = rank_interfaces(read_interfaces(), settings.interfaces)
    hosts = [host for each in ranked for host in _hosts(each.name, each.addresses)]
    found = [TcpAddress(host=host, port=every[":" in host]) for host in hosts if (":" in host) in every]
    return named + found or bound
