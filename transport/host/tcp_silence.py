"""Whether a peer's host has fallen silent, by what its kernel acknowledges.

That its process does not read is no sign of death: the host of a process that only pauses acknowledges data,
and the probes of a shut window.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Final

TICK_NS: Final = 10_000_000
"""Resolution of the kernel's time of an acknowledgement: a tick of 100 Hz at worst."""
LOOKS: Final = 4
"""In the time after which a silent host is given up."""
WATCHED_LOOKS: Final = 2
"""Of so many pauses between looks a longer one counts: one look may be late."""

_TCP_INFO: Final = struct.Struct("=8B13I")
"""The beginning of struct tcp_info, from linux/tcp.h: probes, unacked, last_ack_recv are 3, 12 and 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The acknowledgements of the peer's host, from TCP_INFO."""

    unacknowledged: int
    """Segments under way."""
    unanswered_probes: int
    """Of a window that is shut."""
    quiet_ms: int
    """Since anything was acknowledged."""

    @property
    def owed(self) -> bool:
        """Whether the host has something to acknowledge."""
        return self.unacknowledged > 0 or self.unanswered_probes > 0


def read_progress(sock: socket.socket) -> Progress:
    """The kernel's word on a connected socket."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    fields = _TCP_INFO.unpack(info)
    return Progress(unacknowledged=fields[12], unanswered_probes=fields[3], quiet_ms=fields[20])


class Silence:
    """Judges one connection by looks at its progress, some `LOOKS` in the time that may pass.

    A silence counts from a look that found something to acknowledge. What was sent last may have left after
    hours in which there was nothing to say, or in which this process was stopped: that is no silence of the
    peer's. Nor does all of the time between two looks count that are far apart: what kept us from looking, as
    a busy machine, may have kept the peer's process from giving back a socket that it was reading.
    """

    def __init__(self) -> None:
        self._since_ns = 0
        """The look that found something to acknowledge, behind which nothing was; 0: none did."""
        self._looked_ns = 0
        self._watched_ns = 0
        """Of the time since then, what we have been watching."""

    def look(self, progress: Progress, now_ns: int, limit_ns: int) -> bool:
        """Whether the host has acknowledged nothing for `limit_ns`, although it had to."""
        if not progress.owed:
            self._since_ns = 0
            return False
        silent_ns = now_ns - self._since_ns
        if not self._since_ns or progress.quiet_ms * 1_000_000 < silent_ns + TICK_NS:
            self._since_ns = self._looked_ns = now_ns
            self._watched_ns = 0
            return False
        self._watched_ns += min(now_ns - self._looked_ns, limit_ns * WATCHED_LOOKS // LOOKS)
        self._looked_ns = now_ns
        return self._watched_ns >= limit_ns
