"""How many lanes a bulk connection gets, and with how many of them it begins (`lane_scaling` tells what
follows).

One connection has at most a socket buffer of bytes on the way, so over a long path it carries at most that
much in each round trip: as many lanes are needed as buffers fit into bandwidth times round trip (RFC 7323,
section 1.1, has the sums). On a short path one lane is best: it needs no reordering, and a single thread
moves the bytes of all lanes anyway. Measured on loopback, 16 MiB puts: two lanes cost a tenth more than one.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Final

from zbmd.transport.secure.session_keys import LANES_MAX

LINK_BYTES_PER_S: Final = 1_250_000_000
"""What a path between hosts may carry: 10 Gbit/s."""
SLOW_BYTES_PER_S: Final = 125_000_000
"""What it is taken to carry as long as nothing is known of it."""
BUFFER_BYTES_DEFAULT: Final = 4 << 20
"""The largest send buffer of a stock kernel."""
LANES_DEFAULT_MAX: Final = 8

_RTT: Final = struct.Struct("68xI")
"""`tcpi_rtt` in Linux's struct tcp_info, us."""


def lanes_for(rtt_us: int, buffer_bytes: int, bytes_per_s: int = LINK_BYTES_PER_S) -> int:
    """The lanes that fill a path of this round trip; buffer_bytes: most that one connection has under way."""
    under_way_bytes = bytes_per_s * rtt_us // 1_000_000
    return max(1, min(LANES_DEFAULT_MAX, LANES_MAX, -(-under_way_bytes // max(1, buffer_bytes))))


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
