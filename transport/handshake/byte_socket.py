"""A connected, non-blocking stream socket, with or without TLS, as links and hellos read and write it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from zbmd.transport.handshake.driver import readable, writable
from zbmd.transport.handshake.hello import HungUp
from zbmd.transport.secure.mac import Buffer
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
        """How many bytes of `pieces`, one after the other, have been taken; None if there is no room.

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
                # Told once, before the last words of the peer: why it refused us, perhaps.
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
                raise HungUp(
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
