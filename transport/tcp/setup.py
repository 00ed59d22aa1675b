"""From a connected socket to a session: TLS if it is asked for, the hello, one exchange of setup messages.

All of it by one deadline. Until the hello has been accepted, nothing is kept of what a stranger sends but the
hello's one message, and it is bounded.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from zbmd.transport.errors import DeadlineExceeded
from zbmd.transport.handshake.driver import ByteSocket, HelloResult, PlainSocket, TlsSocket, say_hello
from zbmd.transport.handshake.hello import HelloTimeout, HungUp
from zbmd.transport.handshake.session_setup import (
    SETUP_BYTES_MAX,
    MalformedSetup,
    SessionLookup,
    SetupError,
    accept_answer,
    accept_offer,
    make_offer,
)
from zbmd.transport.identity import PeerInfo, Side
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.secure.protection import Keys, Protection, Secrets, Session
from zbmd.transport.secure.record_stream import RECORD_HEADER_BYTES, Opener, RecordKind, Sealer
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, numeric
from zbmd.transport.tcp.sockets import settle

READ_BYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A connection whose session stands. surplus: what the peer has sent behind its setup message."""

    byte_socket: ByteSocket
    session: Session
    surplus: bytes
    local: TcpAddress
    remote: TcpAddress


async def secure(
    sock: socket.socket, side: Side, settings: TcpSettings, deadline_ns: int, *, peer: str, host: str | None
) -> tuple[ByteSocket, bytes]:
    """The socket, with TLS around it if that is asked for, and what names its channel.

    host: what the dialer has dialed. Owns `sock`, and closes it if it raises: `TlsError`, `HungUp`,
    `HelloTimeout`.
    """
    tls = settings.tls
    if settings.protection is not Protection.TLS or tls is None:
        return PlainSocket(sock, peer=peer), b""
    try:
        wrapped = tls.context(side).wrap_socket(
            sock,
            server_side=side is Side.LISTENER,
            do_handshake_on_connect=False,
            server_hostname=(tls.name or (host or "").partition("%")[0]) if side is Side.DIALER else None,
        )
    except BaseException:
        sock.close()
        raise
    try:
        if not await TlsSocket(wrapped, peer=peer).handshake(deadline_ns):
            raise HelloTimeout(f"the TLS handshake with {peer} was not done by its deadline")
        return TlsSocket(wrapped, peer=peer), tls.binding(side, wrapped)
    except BaseException:
        wrapped.close()
        raise


async def set_up_dialer(
    byte_socket: ByteSocket,
    binding: bytes,
    endpoint: Endpoint,
    settings: TcpSettings,
    deadline_ns: int,
    *,
    control: Session | None = None,
    stripe: int = 0,
) -> Ready:
    """The dialer's side; of a stripe of `control`, if that is given.

    Raises the `HelloError` or `SetupError` that either side has found, `PeerLost`, `DeadlineExceeded`.
    """
    greeting = await _hello(byte_socket, endpoint, Side.DIALER, deadline_ns)
    secrets, wanted = Secrets(greeting.secret, Side.DIALER, binding=binding), settings.protection
    keys = secrets.setup_keys()
    await _send(byte_socket, keys, make_offer(secrets, wanted, control=control, stripe=stripe), deadline_ns)
    data, surplus = await _receive(byte_socket, keys, greeting, deadline_ns)
    session = accept_answer(data, secrets, wanted, greeting.peer, control=control, stripe=stripe)
    return _ready(byte_socket, session, surplus)


async def set_up_listener(
    byte_socket: ByteSocket,
    binding: bytes,
    endpoint: Endpoint,
    settings: TcpSettings,
    deadline_ns: int,
    *,
    lookup: SessionLookup,
    has_room: bool,
) -> Ready:
    """The listener's side. Raises as `set_up_dialer`."""
    greeting = await _hello(byte_socket, endpoint, Side.LISTENER, deadline_ns)
    secrets, wanted = Secrets(greeting.secret, Side.LISTENER, binding=binding), settings.protection
    keys = secrets.setup_keys()
    data, surplus = await _receive(byte_socket, keys, greeting, deadline_ns)
    answer, session = accept_offer(data, secrets, wanted, greeting.peer, lookup, has_room=has_room)
    await _send(byte_socket, keys, answer, deadline_ns)
    if isinstance(session, SetupError):
        raise session
    if surplus:
        raise MalformedSetup(f"{greeting.peer.name} sent {len(surplus)} bytes before it had our answer")
    return _ready(byte_socket, session, b"")


def _ready(byte_socket: ByteSocket, session: Session, surplus: bytes) -> Ready:
    sock = byte_socket.sock
    settle(sock)
    return Ready(
        byte_socket=byte_socket,
        session=session,
        surplus=surplus,
        local=numeric(sock.getsockname()),
        remote=numeric(sock.getpeername()),
    )


async def _hello(byte_socket: ByteSocket, endpoint: Endpoint, side: Side, deadline_ns: int) -> HelloResult:
    label = byte_socket.peer
    return await say_hello(byte_socket, endpoint, side, deadline_ns, peer_uid=None, label=label)


async def _send(byte_socket: ByteSocket, keys: Keys, message: bytes, deadline_ns: int) -> None:
    record = b"".join(Sealer(keys.send).seal(RecordKind.SETUP, (message,)))
    await byte_socket.send(record, deadline_ns)


async def _receive(
    byte_socket: ByteSocket, keys: Keys, greeting: HelloResult, deadline_ns: int
) -> tuple[bytes, bytes]:
    """The peer's setup message, and what has come behind it."""
    peer, opener = greeting.peer, Opener(keys.receive, body_bytes_max=SETUP_BYTES_MAX)
    data = await _at_least(byte_socket, greeting.surplus, RECORD_HEADER_BYTES, peer, deadline_ns)
    header = data[:RECORD_HEADER_BYTES]
    end = RECORD_HEADER_BYTES + opener.body_bytes(header)
    data = await _at_least(byte_socket, data, end + opener.tag_bytes, peer, deadline_ns)
    body, tag = data[RECORD_HEADER_BYTES:end], data[end : end + opener.tag_bytes]
    kind = opener.open(header, body, tag)
    if kind is not RecordKind.SETUP:
        raise MalformedSetup(f"{peer.name} sent a record of kind {kind.name} before its setup message")
    return body, data[end + opener.tag_bytes :]


async def _at_least(
    byte_socket: ByteSocket, data: bytes, nbytes: int, peer: PeerInfo, deadline_ns: int
) -> bytes:
    while len(data) < nbytes:
        more = await byte_socket.receive(deadline_ns, READ_BYTES)
        if more is None:
            raise DeadlineExceeded(f"{peer.name} did not set up its session in time: it may be stuck")
        if not more:
            raise HungUp(f"{peer.name} closed the connection before the session was set up")
        data += more
    return data
