"""Run a hello over whatever carries its bytes; the machine decides everything.

`ByteSocket` is a connected, non-blocking stream socket, with or without TLS, as links and hellos use it.
`HELLO` is the kind under which captures record the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, assert_never

import msgspec

from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.capture.tap import Tap
from zbmd.transport.handshake import hello
from zbmd.transport.identity import Identity, PeerInfo, Side
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.native._native import now_ns
from zbmd.transport.secure.protection import Buffer
from zbmd.transport.secure.tls import tls_error

PIECES_PER_WRITE_MAX: Final = 64
"""Of one sendmsg; the kernel takes 1,024."""
TLS_RECORD_BYTES: Final = 1 << 12
"""Of a TLS record at most: whoever reads a byte of it takes all of it from the kernel."""
HELLO_READ_BYTES_MAX: Final = 1 << 14


class ByteSocket(ABC):
    """Owns its socket. peer: names the other end in errors."""

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self.sock = sock
        self.peer = peer

    @abstractmethod
    def read_into(self, buffer: memoryview) -> int | None:
        """Read what there is, at least one byte; 0 at the end of the stream, None if there is nothing yet.

        Raises OSError if the connection has broken, and `TlsError` if TLS has.
        """

    @abstractmethod
    def write(self, pieces: Sequence[Buffer]) -> int | None:
        """Write `pieces`, one after the other; return how many bytes were accepted, None if there is no room.

        After None the same bytes must be offered again. Raises as `read_into`.
        """

    @property
    def pending(self) -> bool:
        """Whether there is something to read although the kernel has nothing more."""
        return False

    def finish(self) -> None:
        """Nothing more will be written: the peer reads what there is, then the end. Reading goes on raw."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()

    # -- a hello's `Wire`

    async def send(self, data: bytes, deadline_ns: int) -> None:
        """See `Wire`. What does not fit until the deadline is left out, and the hello ends by it."""
        rest = memoryview(data)
        try:
            while rest:
                taken = self.write([rest])
                if taken is None and not await writable(self.sock, deadline_ns):
                    return
                rest = rest[taken or 0 :]
        except OSError:
            return

    async def receive(self, deadline_ns: int, nbytes_max: int = HELLO_READ_BYTES_MAX) -> bytes | None:
        """See `Wire`. Nothing is kept back: the next read begins where this one ended."""
        buffer = bytearray(nbytes_max)
        reset = False
        while True:
            try:
                taken = self.read_into(memoryview(buffer))
            except ConnectionResetError:
                # Reported once, before the peer's final message: why it refused us, perhaps.
                taken = None if not reset else 0
                if not reset:
                    reset = True
                    continue
            if taken is not None:
                return bytes(buffer[:taken])
            if not self.pending and not await readable(self.sock, deadline_ns):
                return None


class PlainSocket(ByteSocket):
    """Without TLS."""

    def read_into(self, buffer: memoryview) -> int | None:
        """See `ByteSocket`."""
        try:
            return self.sock.recv_into(buffer)
        except BlockingIOError:
            return None

    def write(self, pieces: Sequence[Buffer]) -> int | None:
        """See `ByteSocket`."""
        try:
            return self.sock.sendmsg(pieces[:PIECES_PER_WRITE_MAX], [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None


class TlsSocket(ByteSocket):
    """With TLS; the handshake must be over before anything is read or written."""

    sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, *, peer: str) -> None:
        super().__init__(sock, peer=peer)

    async def handshake(self, deadline_ns: int) -> bool:
        """Run the handshake; False if the deadline comes first. Raises `TlsError`, `HungUp`, OSError."""
        while True:
            try:
                self.sock.do_handshake()
                return True
            except ssl.SSLWantReadError:
                ready = await readable(self.sock, deadline_ns)
            except ssl.SSLWantWriteError:
                ready = await writable(self.sock, deadline_ns)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError):
                raise hello.HungUp(
                    f"{self.peer} ended the connection in the TLS handshake: it has ended, or does not speak "
                    "TLS (set the same ZBMD_PROTECTION on both sides)"
                ) from None
            except ssl.SSLError as error:
                raise tls_error(error, peer=self.peer) from None
            if not ready:
                return False

    def read_into(self, buffer: memoryview) -> int | None:
        """See `ByteSocket`."""
        try:
            return self.sock.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return None
        except ssl.SSLError as error:
            raise tls_error(error, peer=self.peer) from None

    def write(self, pieces: Sequence[Buffer]) -> int | None:
        """See `ByteSocket`. OpenSSL wants to see the same bytes, or more, after it had no room for them."""
        try:
            return self.sock.send(_first_bytes(pieces, TLS_RECORD_BYTES))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLEOFError:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None
        except ssl.SSLError as error:
            raise tls_error(error, peer=self.peer) from None

    @property
    def pending(self) -> bool:
        """Whether OpenSSL has decrypted more than was asked for."""
        return self.sock.pending() > 0


def _first_bytes(pieces: Sequence[Buffer], nbytes_max: int) -> bytes:
    chosen: list[Buffer] = []
    room = nbytes_max
    for piece in pieces:
        chosen.append(piece if len(piece) <= room else memoryview(piece)[:room])
        room -= len(chosen[-1])
        if room == 0:
            break
    return b"".join(chosen)


def lost_reason(error: OSError, *, silent_ms: int) -> str:
    """Why a connection broke, for `PeerLost`. silent_ms: the user timeout."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "its connection was reset without a goodbye: it ended or was killed"
    if isinstance(error, TimeoutError):
        return f"it has acknowledged nothing for {silent_ms} ms: its host or the network is down"
    return f"its connection broke: {error.strerror or os.strerror(error.errno or 0)}"


_COOKIE_CHECK = b"zbmd capture: which cookie"
"""Prefix of what is hashed to recognize a cookie in a capture, which never holds the cookie itself."""


def hello_config(
    *, side: Side, identity: Identity, cookie: bytes, nonce: bytes, deadline_ns: int
) -> dict[str, Any]:
    """Return the configuration of a hello as it is recorded, with a check value for the cookie."""
    return {
        "side": side,
        "identity": identity,
        "cookie": cookie,
        "cookie_check": _check(cookie),
        "nonce": nonce,
        "deadline_ns": deadline_ns,
    }


def _check(cookie: bytes) -> bytes:
    return hashlib.sha256(_COOKIE_CHECK + cookie).digest()


def _build(config: Mapping[str, Any]) -> hello.HelloMachine:
    if _check(config["cookie"]) != config["cookie_check"]:
        raise CaptureMismatch(
            "this cookie is not the one of the recorded job: give the job's cookie file with --cookie"
        )
    return hello.HelloMachine(
        side=Side(config["side"]),
        identity=msgspec.convert(config["identity"], Identity),
        cookie=config["cookie"],
        nonce=config["nonce"],
        deadline_ns=config["deadline_ns"],
    )


HELLO: MachineKind[hello.HelloEvent, hello.HelloAction] = register(
    "hello", 2, _build, events=hello.HelloEvent, actions=hello.HelloAction, secrets=("cookie",)
)


class Wire(Protocol):
    """A connection that carries the bytes of a hello."""

    async def send(self, data: bytes, deadline_ns: int) -> None:
        """Send all of `data`. A peer that has gone is no error here: `receive` reports it."""
        ...

    async def receive(self, deadline_ns: int) -> bytes | None:
        """Return what has come, at most one message; empty at the end of the stream, None at the deadline."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloResult:
    """The result of an accepted hello."""

    peer: PeerInfo
    surplus: bytes
    """Bytes that the peer sent after its hello."""
    secret: bytes = field(repr=False)
    """See `HelloMachine.session_secret`."""


async def say_hello(
    wire: Wire, endpoint: Endpoint, side: Side, deadline_ns: int, *, peer_uid: int | None, label: str
) -> HelloResult:
    """Run one hello on a connected wire. label: the peer's name in the log. Raises its `HelloError`."""
    nonce = secrets.token_bytes(hello.NONCE_BYTES)
    identity, cookie = endpoint.identity, endpoint.cookie
    machine = hello.HelloMachine(
        side=side, identity=identity, cookie=cookie, nonce=nonce, deadline_ns=deadline_ns
    )
    config = hello_config(side=side, identity=identity, cookie=cookie, nonce=nonce, deadline_ns=deadline_ns)
    tap = Tap(endpoint.recorder, HELLO, f"hello/{side.value}/{label}", machine, config)
    try:
        accept = await _drive(wire, tap, hello.Opened(peer_uid=peer_uid), deadline_ns)
        return HelloResult(peer=accept.peer, surplus=accept.surplus, secret=machine.session_secret())
    finally:
        tap.close(machine.state.value)


async def _drive(
    wire: Wire, tap: Tap[hello.HelloEvent, hello.HelloAction], event: hello.HelloEvent, deadline_ns: int
) -> hello.Accept:
    timer_ns = deadline_ns
    # Bounded by the machine: each message moves it on, and the deadline ends it.
    while True:
        for action in tap.handle(event, now_ns=now_ns()):
            match action:
                case hello.SendBytes(data=data):
                    await wire.send(data, timer_ns)
                case SetTimer(at_ns=at_ns):
                    timer_ns = at_ns
                case hello.Accept():
                    return action
                case hello.Reject(error=error):
                    raise error
                case _:
                    assert_never(action)
        event = _event(await wire.receive(timer_ns))


def _event(data: bytes | None) -> hello.HelloEvent:
    if data is None:
        return TimerFired()
    return hello.BytesReceived(data=data) if data else hello.PeerClosed()


async def readable(sock: socket.socket, deadline_ns: int) -> bool:
    """Wait for something to read; False if the monotonic deadline comes first."""
    return await _ready(sock, deadline_ns, writing=False)


async def writable(sock: socket.socket, deadline_ns: int) -> bool:
    """Wait for room to write; False if the monotonic deadline comes first."""
    return await _ready(sock, deadline_ns, writing=True)


async def _ready(sock: socket.socket, deadline_ns: int, *, writing: bool) -> bool:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def settle(value: bool) -> None:
        if not ready.done():
            ready.set_result(value)

    timer = loop.call_later(max(0, deadline_ns - now_ns()) / 1e9, settle, False)
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(sock.fileno(), settle, True)
    try:
        return await ready
    finally:
        timer.cancel()
        remove(sock.fileno())
