"""Which congestion control a connection has: the system's, but on a short path none that paces.

BBR (Cardwell et al., "BBR: congestion-based congestion control", 2016) keeps two bandwidth-delay products
under way, sends by a timer and probes the path. That is for long paths. Where the round trip is that of a
switch, twice its product is less than what a peer leaves unread while its thread wakes up, and each burst
costs a timer: between two network namespaces on two cores, 8 MiB each way took 6.5 ms and 6.0 ms of CPU with
BBR and 5.0 ms and 2.2 ms with CUBIC, which is Reno on such a path (RFC 9438, section 4.3).

The kernel does not take back the pacing that BBR has asked for. So a connection begins as one of a short
path, and is given the system's choice once its hello has shown the path to be long.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final

SHORT_PATH_US: Final = 1_000
"""A round trip shorter than this is one within a building."""
_PACES: Final = b"bbr"
_SHORT_PATH: Final = (b"cubic", b"reno")
"""Best first; the kernel offers Reno to everybody."""
_NAME_BYTES: Final = 16
"""TCP_CA_NAME_MAX."""
_MIN_RTT: Final = struct.Struct("=148xI")
"""`tcpi_min_rtt` in Linux's struct tcp_info, us; all ones: none was measured."""


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


def _name(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")
