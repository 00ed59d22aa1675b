"""The measurement of a link between two hosts: a TCP connection of its own, as ranks would make one.

The host that is measured listens, on the address of its node, for a connection that begins with a token,
which only the other node has received. All of it is bounded in time and bytes. Blocking, for threads.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import statistics
import struct
import time
from typing import Final

from zbmd.tools.node.preflight.survey import LinkSpeed

TOKEN_BYTES: Final = 32
TRIPS: Final = 30
FIRST_BYTES: Final = 1 << 18
BYTES_MAX: Final = 32 << 20
TRANSFER_S: Final = 0.3
"""Aim of a transfer, by what the first one of `FIRST_BYTES` took."""
TRIES: Final = 3
"""The best one counts, as other work on a host is no fault of its link."""
PROBE_S: Final = 7.0
"""For all of it, on either side."""
STRANGERS_MAX: Final = 16
"""Connections without the token; then the host is not measured."""
CHUNK_BYTES: Final = 1 << 18
_LENGTH: Final = struct.Struct("<Q")
_READY: Final = b"+"


class _Line:
    """A connection that ends at a deadline. Raises `OSError`."""

    def __init__(self, one: socket.socket, until_s: float) -> None:
        self._one, self._until_s = one, until_s
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _limit(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer in {PROBE_S:g} s")
        self._one.settimeout(left_s)

    def send(self, data: bytes | memoryview) -> None:
        self._limit()
        self._one.sendall(data)

    def fill(self, count: int) -> None:
        """Send `count` bytes."""
        chunk = bytes(min(count, CHUNK_BYTES))
        while count:
            part = memoryview(chunk)[:count]
            self.send(part)
            count -= len(part)

    def take(self, count: int) -> bytes:
        """Return `count` bytes, few of them."""
        data = b""
        while len(data) < count:
            data += self._more(count - len(data))
        return data

    def drain(self, count: int) -> None:
        """Receive `count` bytes."""
        while count:
            count -= len(self._more(min(count, CHUNK_BYTES)))

    def _more(self, most: int) -> bytes:
        self._limit()
        data = self._one.recv(most)
        if not data:
            raise ConnectionResetError("the connection was closed")
        return data


def serve_probe(listener: socket.socket, token: bytes) -> None:
    """Let one who knows the token measure this host, and close `listener`. Raises `OSError`."""
    until_s = time.monotonic() + PROBE_S
    with listener:
        for _ in range(STRANGERS_MAX):
            listener.settimeout(max(0.001, until_s - time.monotonic()))
            one, _ = listener.accept()
            with one, contextlib.suppress(ConnectionError):
                line = _Line(one, until_s)
                if hmac.compare_digest(line.take(TOKEN_BYTES), token):
                    _answer(line)
                    return


def _answer(line: _Line) -> None:
    for _ in range(TRIPS):
        line.send(line.take(1))
    while (count := _LENGTH.unpack(line.take(_LENGTH.size))[0]) and count <= BYTES_MAX:
        line.drain(count)
        line.send(_READY)
        line.fill(count)


def probe(address: tuple[str, int], token: bytes) -> LinkSpeed | str:
    """Return the speed of the link to the host that listens there, or why it cannot be measured."""
    until_s = time.monotonic() + PROBE_S
    try:
        with socket.create_connection(address, timeout=PROBE_S) as one:
            line = _Line(one, until_s)
            line.send(token)
            trips_ns = [_trip_ns(line) for _ in range(TRIPS)]
            count = int(_rate(line, FIRST_BYTES) * TRANSFER_S)
            rate = max(_rate(line, min(BYTES_MAX, max(FIRST_BYTES, count))) for _ in range(TRIES))
            line.send(_LENGTH.pack(0))
            return LinkSpeed(bytes_per_s=rate, trip_ns=int(statistics.quantiles(trips_ns, n=4)[0]))
    except OSError as error:
        return f"{address[0]} cannot be measured: {error.strerror or error}"


def _trip_ns(line: _Line) -> int:
    began_ns = time.monotonic_ns()
    line.send(_READY)
    line.take(1)
    return time.monotonic_ns() - began_ns


def _rate(line: _Line, count: int) -> float:
    """Return the bytes a second of the slower direction."""
    began_s = time.monotonic()
    line.send(_LENGTH.pack(count))
    line.fill(count)
    line.take(1)
    there_s = time.monotonic()
    line.drain(count)
    back_s = time.monotonic() - there_s
    return count / max(there_s - began_s, back_s, 1e-9)
