"""shm links between processes of one host: listening, dialing, and what happens until a link stands.

A listener is an abstract unix socket, so nothing is left of it when its process is killed. A connection
goes through SO_PEERCRED, the hello (`HelloMachine`), and one exchange of descriptors (`attach`); all of it
by one deadline, and with a bounded number of connections under way. A stranger ends its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from zbmd.transport.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.handshake.acceptor import Acceptor
from zbmd.transport.handshake.driver import readable, say_hello
from zbmd.transport.handshake.hello import MAX_BODY_BYTES
from zbmd.transport.host.process import check_left, exhaustion_is_typed, peer_of
from zbmd.transport.identity import PeerInfo, Side
from zbmd.transport.link.interface import Endpoint as Endpoint
from zbmd.transport.memory.memfd import create_memfd, map_own
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import Mapping, now_ns
from zbmd.transport.shm.attach import (
    MESSAGE_BYTES_MAX,
    OFFER_FDS_MAX,
    AttachAnswer,
    AttachOffer,
    accept_answer,
    accept_offer,
    close_all,
)
from zbmd.transport.shm.link import LinkParts, ShmLink, link_memory_bytes

log: Final = structlog.stdlib.get_logger("zbmd.transport.shm")

ADDRESS_BYTES_MAX = 107
"""Of an abstract unix address, without its leading zero byte."""
BACKLOG = 128
HALF_OPEN_MAX = 64
"""Connections that have not finished their hello; past it one is closed for each new one (`half_open`)."""
DIAL_RETRY_S = 0.002
"""Pause while a listener's backlog is full; the dial's deadline bounds the retries."""
HELLO_MESSAGE_BYTES_MAX = MAX_BODY_BYTES + 64


OnLink = Callable[[ShmLink], None]


class ShmListener(Acceptor):
    """Accepts links at an abstract unix address until closed. Made by `listen`."""

    def __init__(
        self, name: str, on_link: OnLink, endpoint: Endpoint, timeout_ns: int, half_open_max: int
    ) -> None:
        self._on_link = on_link
        self._endpoint = endpoint
        self._timeout_ns = timeout_ns
        with exhaustion_is_typed(f"the listener at {name!r}"):
            sock = _unix_socket()
        try:
            sock.bind(_address(name))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise LocalProtocolError(
                f"cannot listen at {name!r}: {error.strerror}. If another process listens there, end it, or "
                "choose another address."
            ) from error
        super().__init__(name, [sock], places=half_open_max)

    def _source_of(self, sock: socket.socket) -> str:
        """Strangers count by process."""
        return f"pid {peer_of(sock)[0]}"

    async def _welcome(self, sock: socket.socket, source: str) -> None:
        del source
        pid, uid = peer_of(sock)
        try:
            with exhaustion_is_typed(f"a link from pid {pid}"), contextlib.ExitStack() as undo:
                undo.callback(sock.close)
                link = await _listener_side(sock, self._endpoint, now_ns() + self._timeout_ns)
                undo.pop_all()
        except (ZbmdError, OSError) as error:
            self._refused(error, peer_pid=pid, peer_uid=uid)
            return
        self._on_link(link)


def listen(
    name: str,
    on_link: OnLink,
    endpoint: Endpoint,
    *,
    timeout_ns: int | None = None,
    half_open_max: int = HALF_OPEN_MAX,
) -> ShmListener:
    """Listen at the abstract unix address `name` (1..107 bytes) on the running loop.

    `on_link` is called with each link that stands; a hello takes `timeout_ns` at most, by default the
    `hello_ns` of the endpoint's deadlines. Raises `LocalProtocolError` if the address is taken or
    too long, and `OutOfDescriptors`.
    """
    timeout_ns = endpoint.deadlines.hello_ns if timeout_ns is None else timeout_ns
    return ShmListener(name, on_link, endpoint, timeout_ns, half_open_max)


async def dial(name: str, endpoint: Endpoint, *, timeout_ns: int | None = None) -> ShmLink:
    """Connect to the listener at `name`, say hello, and return the link.

    Raises `PeerLost` if nobody listens there or the peer ends meanwhile, `DeadlineExceeded` after
    `timeout_ns` (default: the `dial_ns` of the endpoint's deadlines), a `HelloError` or other
    `RemoteProtocolError` if either side refuses the other, and `OutOfMemory` or `OutOfDescriptors` if there
    is no room for the link's rings, or for its socket and eventfds.
    """
    deadline_ns = now_ns() + (endpoint.deadlines.dial_ns if timeout_ns is None else timeout_ns)
    with exhaustion_is_typed(f"a link to {name}"), contextlib.ExitStack() as undo:
        sock = _unix_socket()
        undo.callback(sock.close)
        await _connect(sock, name, deadline_ns)
        link = await _dialer_side(sock, endpoint, deadline_ns)
        undo.pop_all()
    return link


def link_pair(a: Endpoint, b: Endpoint) -> tuple[ShmLink, ShmLink]:
    """Two connected links within this process, over real rings, eventfds and sockets, without a hello.

    For tests and for actors of one process that are to be treated as if they were of two. Raises
    `OutOfMemory` and `OutOfDescriptors`.
    """
    with exhaustion_is_typed("a pair of links"), contextlib.ExitStack() as undo:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (left, right):
            undo.callback(sock.close)
            sock.setblocking(False)
        memory = _make_link_memory(a.limits.ring_bytes)
        os.close(memory.memfd)
        wake_fds = [memory.dialer_wake_fd, memory.listener_wake_fd]
        undo.callback(close_all, wake_fds)
        for fd in (memory.listener_wake_fd, memory.dialer_wake_fd):
            wake_fds.append(os.dup(fd))
        undo.pop_all()
    parts_a = memory.parts(left)
    parts_b = LinkParts(
        sock=right,
        mapping=memory.mapping,
        ring_bytes=memory.ring_bytes,
        wake_fd=wake_fds[2],
        peer_wake_fd=wake_fds[3],
        dialed=False,
    )
    return (
        ShmLink(parts_a, a, b.identity, _own_view(b.segment)),
        ShmLink(parts_b, b, a.identity, _own_view(a.segment)),
    )


def _own_view(segment: Segment | None) -> PeerSegment | None:
    return None if segment is None else PeerSegment.attach(segment.fds, slot=segment.slot)


# --- the two sides --------------------------------------------------------------------------------------


async def _listener_side(sock: socket.socket, endpoint: Endpoint, deadline_ns: int) -> ShmLink:
    peer = await _hello(sock, endpoint, Side.LISTENER, deadline_ns)
    data, fds = await _receive(sock, deadline_ns, peer.name)
    attached = accept_offer(data, fds, incarnation=peer.incarnation)
    segment = endpoint.segment
    answer = AttachAnswer(slot=None if segment is None else segment.slot)
    try:
        _hand_over(sock, answer, [] if segment is None else segment.fds, peer.name)
    except (OSError, PeerLost):
        close_all((attached.dialer_wake_fd, attached.listener_wake_fd))
        raise
    parts = LinkParts(
        sock=sock,
        mapping=attached.mapping,
        ring_bytes=attached.ring_bytes,
        wake_fd=attached.listener_wake_fd,
        peer_wake_fd=attached.dialer_wake_fd,
        dialed=False,
    )
    return ShmLink(parts, endpoint, peer, attached.segment)


async def _dialer_side(sock: socket.socket, endpoint: Endpoint, deadline_ns: int) -> ShmLink:
    peer = await _hello(sock, endpoint, Side.DIALER, deadline_ns)
    memory = _make_link_memory(endpoint.limits.ring_bytes)
    try:
        segment = endpoint.segment
        offer = AttachOffer(ring_bytes=memory.ring_bytes, slot=None if segment is None else segment.slot)
        fds = [memory.memfd, memory.dialer_wake_fd, memory.listener_wake_fd]
        _hand_over(sock, offer, fds if segment is None else [*fds, *segment.fds], peer.name)
        data, answer_fds = await _receive(sock, deadline_ns, peer.name)
        peer_segment = accept_answer(data, answer_fds, incarnation=peer.incarnation)
    except BaseException:
        close_all((memory.dialer_wake_fd, memory.listener_wake_fd))
        raise
    finally:
        os.close(memory.memfd)
    return ShmLink(memory.parts(sock), endpoint, peer, peer_segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkMemory:
    """The memory and eventfds that the dialer makes for a new link."""

    ring_bytes: int
    memfd: int
    mapping: Mapping
    dialer_wake_fd: int
    listener_wake_fd: int

    def parts(self, sock: socket.socket) -> LinkParts:
        return LinkParts(
            sock=sock,
            mapping=self.mapping,
            ring_bytes=self.ring_bytes,
            wake_fd=self.dialer_wake_fd,
            peer_wake_fd=self.listener_wake_fd,
            dialed=True,
        )


def _make_link_memory(ring_bytes: int) -> _LinkMemory:
    nbytes = link_memory_bytes(ring_bytes)
    memfd = create_memfd("zbmd-link", nbytes)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, memfd)
        mapping = map_own("zbmd-link", memfd, nbytes)
        dialer_wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, dialer_wake_fd)
        listener_wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.pop_all()
    return _LinkMemory(
        ring_bytes=ring_bytes,
        memfd=memfd,
        mapping=mapping,
        dialer_wake_fd=dialer_wake_fd,
        listener_wake_fd=listener_wake_fd,
    )


# --- the hello's driver ---------------------------------------------------------------------------------


class _SeqpacketWire:
    """See `Wire`. A connection has one message of a hello under way at a time, so each fits at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def send(self, data: bytes, deadline_ns: int) -> None:
        """Send one message."""
        del deadline_ns
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _send(self._sock, data, [])

    async def receive(self, deadline_ns: int) -> bytes | None:
        """The next message."""
        if not await readable(self._sock, deadline_ns):
            return None
        with contextlib.suppress(ConnectionResetError):
            return self._sock.recv(HELLO_MESSAGE_BYTES_MAX)
        # A reset is reported once, before the peer's final message: why it refused us, perhaps.
        return self._sock.recv(HELLO_MESSAGE_BYTES_MAX)


async def _hello(sock: socket.socket, endpoint: Endpoint, side: Side, deadline_ns: int) -> PeerInfo:
    """Run the hello on a connected socket; the peer's pid is the kernel's word. Raises its `HelloError`."""
    pid, uid = peer_of(sock)
    wire = _SeqpacketWire(sock)
    greeting = await say_hello(wire, endpoint, side, deadline_ns, peer_uid=uid, label=f"pid{pid}")
    if greeting.surplus:
        raise RemoteProtocolError(f"{greeting.peer.name} sent {len(greeting.surplus)} bytes after its hello")
    return msgspec.structs.replace(greeting.peer, pid=pid)


async def _receive(sock: socket.socket, deadline_ns: int, peer: str) -> tuple[bytes, list[int]]:
    """One message with its descriptors, which become the caller's.

    Raises `DeadlineExceeded`, `PeerLost`, and `OutOfDescriptors` if there was no room for them here.
    """
    if not await readable(sock, deadline_ns):
        raise DeadlineExceeded(f"{peer} did not hand over its part of the link in time: it may be stuck")
    try:
        data, fds, flags, _ = socket.recv_fds(
            sock, MESSAGE_BYTES_MAX + 1, OFFER_FDS_MAX, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        raise PeerLost(peer, "it ended before the link stood") from None
    if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        try:
            if not data:
                raise PeerLost(peer, "it ended before the link stood")
            check_left(f"a link to {peer}")
        finally:
            close_all(fds)
        raise RemoteProtocolError(f"attach: a message from {peer} over its bounds")
    return data, fds


def _hand_over(sock: socket.socket, what: AttachOffer | AttachAnswer, fds: Sequence[int], peer: str) -> None:
    """Send our part of the link. Raises `PeerLost` if the peer has ended, or given the link up, meanwhile."""
    try:
        _send(sock, msgspec.msgpack.encode(what), fds)
    except (BrokenPipeError, ConnectionResetError):
        raise PeerLost(peer, "it ended before the link stood") from None


def _send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one message now. It fits: a connection has one message under way at a time."""
    if fds:
        socket.send_fds(sock, [data], fds, socket.MSG_NOSIGNAL)
    else:
        sock.send(data, socket.MSG_NOSIGNAL)


# --- sockets --------------------------------------------------------------------------------------------


def _unix_socket() -> socket.socket:
    """SEQPACKET keeps message boundaries, so a message and its descriptors always come together."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _address(name: str) -> bytes:
    encoded = name.encode()
    if not 0 < len(encoded) <= ADDRESS_BYTES_MAX:
        raise LocalProtocolError(f"the address {name!r} must have 1 to {ADDRESS_BYTES_MAX} bytes")
    return b"\0" + encoded


async def _connect(sock: socket.socket, name: str, deadline_ns: int) -> None:
    address = _address(name)
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            if now_ns() >= deadline_ns:
                raise DeadlineExceeded(f"the listener at {name!r} did not accept in time") from None
            await asyncio.sleep(DIAL_RETRY_S)
        except ConnectionRefusedError:
            raise PeerLost(name, "nobody listens at its address") from None
