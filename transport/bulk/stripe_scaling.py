"""How many of its stripes a bulk connection uses, by what the kernel says keeps them back.

A path is full when it carries its rate for a round trip, however many stripes that takes; a stripe more costs
then, and gains nothing. The rate of a path is unknown, but the kernel reports what it waits for: for the
network, or for room in a buffer of either end (`tcpi_rwnd_limited`, `tcpi_sndbuf_limited` beside
`tcpi_busy_time`, in linux/tcp.h since 4.10). While it waits for buffers, they hold less than the path does,
and more stripes carry more.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from zbmd.transport.secure.protection import STRIPES_MAX

# How many stripes a bulk connection gets, and with how many of them it begins (`stripe_scaling` tells what
# follows).
#
# One connection has at most a socket buffer of bytes on the way, so over a long path it carries at most that
# much in each round trip: as many stripes are needed as buffers fit into bandwidth times round trip (RFC
# 7323, section 1.1, has the sums). On a short path one stripe is best: it needs no reordering, and a single
# thread moves the bytes of all stripes anyway. Measured on loopback, 16 MiB puts: two stripes cost a tenth
# more than one.

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
