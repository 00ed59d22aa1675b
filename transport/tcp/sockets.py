"""The sockets of TCP links: options, resolving, listening, connecting, and the setup of a session.

Errors say what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.errors import DeadlineExceeded, OutOfDescriptors, PeerLost, UserError
from zbmd.transport.handshake.driver import (
    ByteSocket,
    HelloResult,
    PlainSocket,
    TlsSocket,
    say_hello,
    writable,
)
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
from zbmd.transport.host import process as descriptors
from zbmd.transport.identity import PeerInfo, Side
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.secure.protection import Keys, Protection, Secrets, Session
from zbmd.transport.secure.record_stream import RECORD_HEADER_BYTES, Opener, RecordKind, Sealer
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, numeric

# --- congestion control of a connection: the system's, but on a short path none that paces
#
# BBR (Cardwell et al., "BBR: congestion-based congestion control", 2016) keeps two bandwidth-delay products
# under way, sends by a timer and probes the path. That is for long paths. Where the round trip is that of a
# switch, twice its product is less than what a peer leaves unread while its thread wakes up, and each burst
# costs a timer: between two network namespaces on two cores, 8 MiB each way took 6.5 ms and 6.0 ms of CPU
# with BBR and 5.0 ms and 2.2 ms with CUBIC, which is Reno on such a path (RFC 9438, section 4.3).
#
# The kernel does not take back the pacing that BBR has asked for. So a connection begins as one of a short
# path, and is given the system's choice once its hello has shown the path to be long.

SHORT_PATH_US: Final = 1_000
"""A round trip shorter than this is one within a building."""
_PACES: Final = b"bbr"
_SHORT_PATH: Final = (b"cubic", b"reno")
"""Best first; the kernel offers Reno to everybody."""
_NAME_BYTES: Final = 16
"""TCP_CA_NAME_MAX."""
_MIN_RTT: Final = struct.Struct("=148xI")
"""`tcpi_min_rtt` in Linux's struct tcp_info, us; all ones: none was measured."""
_SMOOTHED: Final = struct.Struct("=B67xII80xI")
"""`tcpi_state`, `tcpi_rtt`, `tcpi_rttvar` and `tcpi_data_segs_out`."""
ESTABLISHED: Final = 1


def begin_short(sock: socket.socket) -> None:
    """For a socket before it connects or listens: what it accepts inherits it."""
    if not _name(sock).startswith(_PACES):
        return
    for name in _SHORT_PATH:
        # Its administrator may have taken one away, or keep it for root.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def settle(sock: socket.socket) -> None:
    """For a connection that has said hello: on a long path it gets what the system has chosen."""
    if min_round_trip_us(sock) < SHORT_PATH_US:
        return
    # Without a descriptor for the question, the connection stays as it is: it works.
    with contextlib.suppress(OSError), socket.socket(sock.family, socket.SOCK_STREAM) as fresh:
        wanted = _name(fresh)
        if wanted.startswith(_PACES) and _name(sock) != wanted:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted)


def min_round_trip_us(sock: socket.socket) -> int:
    """The shortest that the kernel has seen on a TCP connection lately, us."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    if len(info) < _MIN_RTT.size:
        return SHORT_PATH_US  # a kernel before 4.6 does not say
    (rtt_us,) = _MIN_RTT.unpack(info)
    return int(rtt_us)


def smoothed_round_trip(sock: socket.socket) -> tuple[int, int]:
    """Return the kernel's usual round trip of an established TCP connection, us, and the segments it sent.

    It is the mean less the mean deviation, but at least half of the mean. A receiver may keep an
    acknowledgement for up to 40 ms, for an answer to carry it: if it waits for a third host behind a slow
    cable, the mean of its own fast connections grows to some 10 ms, and their deviation as much; the
    deviation of a slow one stays small. 0 and 0 for any other socket. The round trip is as old as the last
    segment that was acknowledged.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SMOOTHED.size)
    known = _SMOOTHED.unpack(info) if len(info) == _SMOOTHED.size else (0, 0, 0, 0)
    state, mean_us, deviation_us, segments = map(int, known)
    return (max(mean_us - deviation_us, mean_us // 2), segments) if state == ESTABLISHED else (0, 0)


def _name(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")


BACKLOG: Final = 1024
"""Connections that wait to be accepted; the kernel's net.core.somaxconn bounds it too."""
ADDRESSES_MAX: Final = 8
"""Of a name: how many are tried."""
ATTEMPT_DELAY_NS: Final = 250_000_000
"""Until the next address is tried beside one that does not answer; RFC 8305 recommends it."""
PORT_TRIES_MAX: Final = 16
"""For one free port on several addresses."""
NOTSENT_BYTES_MAX: Final = 1 << 17
"""Bytes of a control connection that may wait unsent in the kernel, so that they do not grow stale."""


class HostUnknown(UserError):
    """No name server knows the host (yet)."""


class PortInUse(UserError):
    """Another process listens at the address."""


SocketAddress = tuple[Any, ...]
Resolved = tuple[socket.AddressFamily, SocketAddress]


def set_options(sock: socket.socket, deadlines: Deadlines, *, control: bool) -> None:
    """Options of every connection: no delay, and the end of a silent peer by the recovery budget.

    control: whether it carries a link, which sends little and soon, and whose reader may pause for as long as
    it likes. The user timeout also ends connections whose window stays shut, of which tcp(7) says nothing:
    it is for bulk data alone, which always has a place to go; links watch for `silence`.
    """
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, deadlines.tcp_keepalive_idle_s)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, deadlines.tcp_keepalive_interval_s)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, deadlines.tcp_keepalive_count)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 0 if control else deadlines.tcp_user_timeout_ms)
    sock.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES_MAX if control else 0)


# --- resolving ------------------------------------------------------------------------------------------


async def resolve(address: TcpAddress, deadline_ns: int, *, passive: bool = False) -> list[Resolved]:
    """The socket addresses of `address`, at most `ADDRESSES_MAX`, families in turn, best first (RFC 6724).

    Raises `HostUnknown` if the name is not known, `DeadlineExceeded` if nobody says so in time.
    """
    flags = (socket.AI_PASSIVE if passive else 0) | (socket.AI_NUMERICHOST if address.is_numeric else 0)
    loop = asyncio.get_running_loop()
    lookup = loop.getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=flags
    )
    try:
        async with asyncio.timeout(max(0, deadline_ns - now_ns()) / 1e9):
            found = await lookup
    except TimeoutError:
        raise DeadlineExceeded(
            f"the name {address.host!r} was not resolved in time: the name server does not answer"
        ) from None
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else str(error)
        raise HostUnknown(
            f"the host of {address} is not known ({why}). Check its spelling, DNS and /etc/hosts, "
            "or write its IP address."
        ) from None
    return _interleaved([(family, sockaddr) for family, _, _, _, sockaddr in found])[:ADDRESSES_MAX]


def _interleaved(found: list[Resolved]) -> list[Resolved]:
    """Without repetitions, the families in turn, beginning with that of the first."""
    unique = list(dict.fromkeys(found))
    first = [each for each in unique if each[0] == unique[0][0]]
    others = [each for each in unique if each[0] != unique[0][0]]
    mixed: list[Resolved] = []
    for n in range(max(len(first), len(others))):
        mixed += first[n : n + 1] + others[n : n + 1]
    return mixed


# --- listening ------------------------------------------------------------------------------------------


def listen_on(addresses: Sequence[Resolved], *, asked: str) -> list[socket.socket]:
    """Listening sockets on all of `addresses`, on one port. asked: what the user asked for.

    A family that this machine does not have is left out if there is another. Raises `UserError` and
    `OutOfDescriptors`.
    """
    port_is_free = all(sockaddr[1] == 0 for _, sockaddr in addresses)
    for tries_left in reversed(range(PORT_TRIES_MAX)):
        try:
            with descriptors.exhaustion_is_typed(f"the listener at {asked}"):
                return _listen_on(addresses)
        except OSError as error:
            # Another process may have taken our free port on the second address.
            if port_is_free and error.errno == errno.EADDRINUSE and len(addresses) > 1 and tries_left:
                continue
            kind = PortInUse if error.errno == errno.EADDRINUSE else UserError
            raise kind(f"cannot listen at {asked}: {_listen_advice(error)}") from None
    raise AssertionError("the last try returns or raises")


FREE_PORTS: Final = range(12_000, 29_000)
"""Below these are ports of services, above them those of PyTorch, of Kubernetes' nodes and of the kernel."""
KERNELS_PORTS: Final = (32_768, 60_999)
"""Those that Linux gives out as it comes."""
PORT_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port that is free now, for a process that listens there later.

    The kernel gives it to no process by itself, as it may meanwhile do with a port that it has chosen. Where
    the kernel's own range leaves none, the kernel chooses.
    """
    try:
        first, last = map(int, PORT_RANGE_FILE.read_text().split())
    except OSError:
        first, last = KERNELS_PORTS  # a sandbox may hide the file
    ours = [port for port in FREE_PORTS if not first <= port <= last]
    for port in (*random.SystemRandom().sample(ours, min(len(ours), PORT_TRIES_MAX)), 0):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            found: int = listener.getsockname()[1]
            return found
    raise UserError("expected a free TCP port on this host, found none; `ss -tanp` shows who has them")


def _listen_on(addresses: Sequence[Resolved]) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    port = 0
    with contextlib.ExitStack() as undo:
        for family, sockaddr in addresses:
            try:
                sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                undo.callback(sock.close)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                begin_short(sock)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((sockaddr[0], sockaddr[1] or port, *sockaddr[2:]))
            except OSError as error:
                if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and len(addresses) > 1:
                    missing = error
                    continue
                raise
            sock.listen(BACKLOG)
            port = sock.getsockname()[1]
            sockets.append(sock)
        if not sockets:
            assert missing is not None
            raise missing
        undo.pop_all()
    return sockets


def _listen_advice(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "the port is in use. Choose another, or 0 for any free one; `ss -ltnp` shows who has it."
        case errno.EADDRNOTAVAIL:
            return "no interface of this machine has that address. `ip addr` shows those that there are."
        case errno.EACCES:
            return "ports below 1024 are for root. Choose a higher one."
        case _:
            return f"{error.strerror}."


# --- connecting -----------------------------------------------------------------------------------------


async def connect(address: TcpAddress, deadline_ns: int, *, local_hosts: Sequence[str] = ()) -> socket.socket:
    """A connected, non-blocking socket to the first of the host's addresses that answers.

    They are tried in turn, each `ATTEMPT_DELAY_NS` after the one before or as soon as that has failed, and
    the first to stand wins (RFC 8305, simplified). local_hosts: numeric addresses of which the one of the
    right family is ours; none for the kernel's choice. Raises `PeerLost` if nobody listens there,
    `DeadlineExceeded`, `UserError` if the name is unknown, and `OutOfDescriptors`.
    """
    targets = await resolve(address, deadline_ns)
    loop = asyncio.get_running_loop()
    waiting = list(targets)
    running: set[asyncio.Task[socket.socket]] = set()
    errors: list[OSError] = []
    try:
        # Bounded: each round begins an attempt, or ends one, or is the last.
        while waiting or running:
            if waiting:
                running.add(loop.create_task(_attempt(*waiting.pop(0), local_hosts, deadline_ns)))
            pause_ns = max(0, deadline_ns - now_ns())
            if waiting:
                pause_ns = min(pause_ns, ATTEMPT_DELAY_NS)
            done, running = await asyncio.wait(
                running, timeout=pause_ns / 1e9 + 0.01, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                try:
                    return task.result()
                except OSError as error:
                    errors.append(error)
    finally:
        await _abandon(running)
    refused = [error for error in errors if error.errno == errno.ECONNREFUSED]
    most = (refused or errors)[-1]  # a refusal tells most: the host is there, and nobody listens
    raise _unreachable(address, most) from most


async def _abandon(tasks: set[asyncio.Task[socket.socket]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is None:
            task.result().close()


async def _attempt(
    family: socket.AddressFamily, sockaddr: SocketAddress, local_hosts: Sequence[str], deadline_ns: int
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        begin_short(sock)
        for host in local_hosts:
            if (":" in host) == (family == socket.AF_INET6):
                sock.bind((host, 0))
                break
        code = sock.connect_ex(sockaddr)
        if code == errno.EINPROGRESS:
            if not await writable(sock, deadline_ns):
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        undo.pop_all()
    return sock


def _unreachable(address: TcpAddress, error: OSError) -> Exception:
    """Return the error to raise when no address answered."""
    match error.errno:
        case errno.ECONNREFUSED | errno.ECONNRESET:
            return PeerLost(str(address), "nobody listens at its address")
        case errno.ETIMEDOUT:
            return DeadlineExceeded(
                f"{address} did not answer in time: the host is down, or a firewall drops what we send"
            )
        case errno.EMFILE | errno.ENFILE as number:
            return OutOfDescriptors(f"no file descriptor to dial {address}: {descriptors.advice(number)}")
        case _:
            return PeerLost(str(address), f"it cannot be reached: {error.strerror}")


# --- from a connected socket to a session: TLS if it is asked for, the hello, one exchange of setup messages
#
# All of it by one deadline. Until the hello has been accepted, nothing is kept of what a stranger sends but
# the hello's one message, and it is bounded.

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
