"""How many of its lanes a bulk connection uses, by what the kernel says keeps them back.

A path is full when it carries its rate for a round trip, however many lanes that takes; a lane more costs
then, and gains nothing. Nobody tells how fast a path is, but the kernel tells what it waits for: for the
network, or for room in a buffer of either end (`tcpi_rwnd_limited`, `tcpi_sndbuf_limited` beside
`tcpi_busy_time`, in linux/tcp.h since 4.10). While it waits for buffers, they hold less than the path does,
and more lanes carry more.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

BUSY_US_MIN: Final = 50_000
"""What was sent in less time than that tells nothing."""
KEPT_BACK_PART: Final = 0.5
"""Of the time in which lanes had something to send: if they waited for buffers longer, those are small."""

_TCP_INFO: Final = struct.Struct("=168xQQQ")


class LaneReason(Enum):
    """Why a connection uses as many lanes as it does."""

    TOO_LITTLE = "too little was sent to tell"
    ALL = "all lanes are used"
    BUFFERS = "lanes waited for their buffers: the path holds more than they do"
    PATH = "lanes waited for the network: the path is full"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneWork:
    """What the kernel has counted of a connection since it stands."""

    busy_us: int
    """There was something to send or to be acknowledged."""
    kept_back_us: int
    """Of that: a buffer, ours or the peer's, had no room."""


def read_work(sock: socket.socket) -> LaneWork:
    """The kernel's word on a connected socket; nothing, from one that does not count."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return LaneWork(busy_us=0, kept_back_us=0)
    busy_us, window_us, buffer_us = _TCP_INFO.unpack(info)
    return LaneWork(busy_us=busy_us, kept_back_us=window_us + buffer_us)


class LaneUse:
    """Decides after each look at the lanes. None is taken back: what a path has held it may hold again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._before: dict[int, LaneWork] = {}

    def look(self, lanes: Mapping[int, LaneWork]) -> tuple[int, LaneReason]:
        """How many of `lanes`, by number, to use from now on, and why."""
        busy_us = kept_back_us = 0
        for number, work in lanes.items():
            before = self._before.get(number, LaneWork(busy_us=0, kept_back_us=0))
            busy_us += work.busy_us - before.busy_us
            kept_back_us += work.kept_back_us - before.kept_back_us
        if busy_us < BUSY_US_MIN:
            return self.count, LaneReason.TOO_LITTLE
        self._before = dict(lanes)
        if self.count >= len(lanes):
            return self.count, LaneReason.ALL
        if kept_back_us < KEPT_BACK_PART * busy_us:
            return self.count, LaneReason.PATH
        self.count = min(2 * self.count, len(lanes))
        return self.count, LaneReason.BUFFERS
