"""A stripe of the bulk stream on its socket, and how many stripes a connection uses.

A `StripeSocket` receives into destinations, sends from sources, and never blocks. `StripeUse` goes by what
the kernel says keeps the stripes back.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from zbmd.transport.bulk.records import Forged, Record
from zbmd.transport.bulk.stream import PayloadArrived, StripeReader, StripeWriter
from zbmd.transport.errors import PeerLost
from zbmd.transport.host.tcp_silence import Silence, read_progress
from zbmd.transport.native._native import now_ns
from zbmd.transport.secure.protection import STRIPES_MAX, Keys, RecordMac, Session, TagHelper

# ---- how many stripes are used
#
# A path is full when it carries its rate for a round trip, however many stripes that takes; a stripe more
# costs then, and gains nothing. The rate of a path is unknown, but the kernel reports what it waits for: for
# the network, or for room in a buffer of either end (`tcpi_rwnd_limited`, `tcpi_sndbuf_limited` beside
# `tcpi_busy_time`, in linux/tcp.h since 4.10). While it waits for buffers, they hold less than the path does,
# and more stripes carry more.

# How many it gets, and with how many of them it begins: one connection has at most a socket buffer of bytes
# on the way, so over a long path it carries at most that much in each round trip: as many stripes are needed
# as buffers fit into bandwidth times round trip (RFC 7323, section 1.1, has the sums). On a short path one
# stripe is best: it needs no reordering, and a single thread moves the bytes of all stripes anyway. Measured
# on loopback, 16 MiB puts: two stripes cost a tenth more than one.

LINK_BYTES_PER_S: Final = 1_250_000_000
"""The rate that a path between hosts may have: 10 Gbit/s."""
SLOW_BYTES_PER_S: Final = 125_000_000
"""The rate that is assumed while nothing is known of a path."""
BUFFER_BYTES_DEFAULT: Final = 4 << 20
"""The largest send buffer of a stock kernel."""
STRIPES_DEFAULT_MAX: Final = 8

_RTT: Final = struct.Struct("68xI")
"""`tcpi_rtt` in Linux's struct tcp_info, us."""


def stripes_for(rtt_us: int, buffer_bytes: int, bytes_per_s: int = LINK_BYTES_PER_S) -> int:
    """The stripes that fill a path of this round trip.

    Buffer_bytes: most that one connection has under way.
    """
    under_way_bytes = bytes_per_s * rtt_us // 1_000_000
    return max(1, min(STRIPES_DEFAULT_MAX, STRIPES_MAX, -(-under_way_bytes // max(1, buffer_bytes))))


def round_trip_us(sock: socket.socket) -> int:
    """The kernel's smoothed round trip of a TCP connection, us."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size)
    (rtt_us,) = _RTT.unpack(info)
    return int(rtt_us)


def buffer_bytes_max(root: Path = Path("/proc/sys/net/ipv4")) -> int:
    """The payload that fits into the largest buffer that the kernel grows a connection to, either way.

    About half of a buffer is the kernel's own account of its packets (tcp(7), `tcp_adv_win_scale`).
    """
    sizes: list[int] = []
    for name in ("tcp_wmem", "tcp_rmem"):
        try:
            sizes.append(int((root / name).read_text().split()[2]))
        except (OSError, ValueError, IndexError):
            sizes.append(BUFFER_BYTES_DEFAULT)
    return min(sizes) // 2


BUSY_US_MIN: Final = 50_000
"""A shorter measurement says nothing."""
KEPT_BACK_PART: Final = 0.5
"""Of the time in which stripes had something to send: if they waited for buffers longer, those are small."""

_TCP_INFO: Final = struct.Struct("=168xQQQ")


class StripeReason(Enum):
    """Why a connection uses as many stripes as it does."""

    TOO_LITTLE = "too little was sent to tell"
    ALL = "all stripes are used"
    BUFFERS = "stripes waited for their buffers: the path holds more than they do"
    PATH = "stripes waited for the network: the path is full"


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeWork:
    """The kernel's counters of a connection since it was made."""

    busy_us: int
    """There was something to send or to be acknowledged."""
    kept_back_us: int
    """Of that: a buffer, ours or the peer's, had no room."""


def read_work(sock: socket.socket) -> StripeWork:
    """The kernel's word on a connected socket; nothing, from one that does not count."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return StripeWork(busy_us=0, kept_back_us=0)
    busy_us, window_us, buffer_us = _TCP_INFO.unpack(info)
    return StripeWork(busy_us=busy_us, kept_back_us=window_us + buffer_us)


class StripeUse:
    """Decides after each look at the stripes. None is taken back: what a path has held it may hold again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._before: dict[int, StripeWork] = {}

    def look(self, stripes: Mapping[int, StripeWork]) -> tuple[int, StripeReason]:
        """Return how many of `stripes`, by number, to use from now on, and why."""
        busy_us = kept_back_us = 0
        for number, work in stripes.items():
            before = self._before.get(number, StripeWork(busy_us=0, kept_back_us=0))
            busy_us += work.busy_us - before.busy_us
            kept_back_us += work.kept_back_us - before.kept_back_us
        if busy_us < BUSY_US_MIN:
            return self.count, StripeReason.TOO_LITTLE
        self._before = dict(stripes)
        if self.count >= len(stripes):
            return self.count, StripeReason.ALL
        if kept_back_us < KEPT_BACK_PART * busy_us:
            return self.count, StripeReason.PATH
        self.count = min(2 * self.count, len(stripes))
        return self.count, StripeReason.BUFFERS


# ---- a stripe: one more authenticated connection beside a control connection, handed over as a bare socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """A connection for bulk data, from its setup on. What is said on it is the data plane's own affair.

    The taker owns the socket and closes it. Nothing of the control connection ends with it, and it
    does not end with the control connection by itself.
    """

    session: Session
    """Its keys are for this connection alone; `session.stripe` is its number."""
    sock: socket.socket
    """Connected and non-blocking, with the options of `tcp.sockets.set_options`; an `ssl.SSLSocket` if the
    protection is TLS. No event loop watches it."""
    surplus: bytes
    """Bytes that the peer sent after its setup message; the socket continues after them."""


OnStripe = Callable[[Stripe], None]


GATHER_PARTS_MAX: Final = 16
"""Views in one gathering send."""
TLS_SEND_BYTES: Final = 1 << 18
"""Bytes that are given to TLS at a time: it must take all of them before the next."""
AHEAD_BYTES: Final = 4096
"""Read at a time where records begin: several small ones, or a large one's first bytes, in one call."""
WAKE_BYTES: Final = 1 << 20
"""While a payload is under way, the thread is woken for no less than that (SO_RCVLOWAT)."""
SCRATCH_BYTES: Final = 1 << 16


class ReadResult(Enum):
    """Why nothing came."""

    BLOCKED = "no bytes are there yet"
    MORE = "the bytes that came complete nothing"
    ENDED = "the peer's side has ended"


class StripeSocket:
    """The socket of a stripe, its reader and its writer. Owns the socket.

    peer: how it is called in errors; helper: makes tags beside us.
    """

    def __init__(self, stripe: Stripe, peer: int | str, helper: TagHelper | None) -> None:
        self.sock = stripe.sock
        self.peer = peer
        keys: Keys | None = stripe.session.keys
        self.reader = StripeReader(None if keys is None else RecordMac(keys.receive), helper)
        self.writer = StripeWriter(None if keys is None else RecordMac(keys.send), helper)
        self._surplus = memoryview(stripe.surplus)
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._drained = False
        """The last call gave less than there was room for: there is nothing more for now."""
        self._tls = isinstance(self.sock, ssl.SSLSocket)
        self._wake_bytes = 1
        self.paused = False
        """Nothing is to be read for now."""
        self.owed = False
        """Whether the peer's host may have something to acknowledge."""
        self._silence = Silence()
        self.sock.setblocking(False)
        # It would also end connections whose reader pauses; `is_silent` tells the one from the other.
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)

    def receive(self) -> Record | PayloadArrived | ReadResult:
        """Take what one call gives. Raises `BulkError` if it is wrong, `PeerLost` if the socket fails."""
        into = self.reader.want()
        if not self._surplus:
            ahead = len(into) < AHEAD_BYTES
            found = self._recv(self._ahead if ahead else into)
            if isinstance(found, ReadResult):
                return found
            if not ahead:
                came = self.reader.filled(found)
                return ReadResult.MORE if came is None else came
            self._surplus = self._ahead[:found]
        nbytes = min(len(into), len(self._surplus))
        into[:nbytes] = self._surplus[:nbytes]
        self._surplus = self._surplus[nbytes:]
        came = self.reader.filled(nbytes)
        return ReadResult.MORE if came is None else came

    def _recv(self, into: memoryview) -> int | ReadResult:
        """One call, unless the one before has shown that nothing is there."""
        if self._drained:
            self._drained = False
            self.set_wake_bytes()
            return ReadResult.BLOCKED
        try:
            nbytes = self.sock.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self.set_wake_bytes()
            return ReadResult.BLOCKED
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return ReadResult.ENDED
        except OSError as error:
            raise self._failed(error) from error
        # Not with TLS, which may keep what it has read beyond one of its records.
        self._drained = nbytes < len(into) and not self._tls
        return nbytes or ReadResult.ENDED

    def send(self) -> int | None:
        """Send as much as the socket accepts; return how many records have left whole, None for no byte.

        Raises `PeerLost` if the socket fails.
        """
        parts = self.writer.pending(1 if self._tls else GATHER_PARTS_MAX)
        try:
            nbytes = self.sock.send(parts[0][:TLS_SEND_BYTES]) if self._tls else self.sock.sendmsg(parts)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            raise self._failed(error) from error
        self.owed = True
        return self.writer.sent(nbytes)

    @property
    def rests(self) -> bool:
        """Whether nothing is under way on it, either way."""
        return self.writer.idle and self.reader.between_records and not self._surplus and not self.paused

    def go_on(self, *, sent_records: int, come_records: int, come: bytes) -> None:
        """So many records have gone and come past it while it rested; `come`: bytes behind those."""
        self.writer.records, self.reader.records = sent_records, come_records
        self._surplus = memoryview(come)
        self._drained = False

    @property
    def has_surplus(self) -> bool:
        """Whether bytes have been received that are not looked at yet."""
        return bool(self._surplus)

    def is_silent(self, silent_ms: int) -> bool:
        """Whether the peer's host has acknowledged nothing for so long, though it had to. Ask repeatedly."""
        progress = read_progress(self.sock)
        if not progress.owed:
            self.owed = not self.writer.idle
        return self._silence.look(progress, now_ns(), silent_ms * 1_000_000)

    def discard(self, scratch: bytearray) -> bool:
        """Throw away what comes, at most the size of `scratch`; False once the peer's side has ended."""
        try:
            return self.sock.recv_into(scratch) > 0
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False

    def shut(self) -> None:
        """Nothing more will be sent."""
        try:
            # Not SSLSocket's own: that would give up TLS and go on in the clear.
            socket.socket.shutdown(self.sock, socket.SHUT_WR)
        except OSError:
            # The peer is gone already; its end is read next.
            return

    def close(self) -> None:
        """Give the socket back. Idempotent."""
        self.sock.close()

    def set_wake_bytes(self) -> None:
        """Ask the kernel to wake us for a good part of a payload, not for every segment of it."""
        wanted = min(WAKE_BYTES, self.reader.wanted_bytes) if self.reader.in_payload else 1
        if wanted != self._wake_bytes and not self._tls:
            self._wake_bytes = wanted
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _failed(self, error: OSError) -> Forged | PeerLost:
        if isinstance(error, ssl.SSLError):
            return Forged(f"a TLS record of a stripe is wrong: {error.reason}")
        reason = os.strerror(error.errno) if error.errno else str(error)
        return PeerLost(self.peer, f"its bulk connection failed: {reason}")
