"""Whom a node no longer hears: heartbeats to a few, and when their silence means something (sans-I/O).

Accrual as in Hayashibara et al., "The phi accrual failure detector" (SRDS 2004): the limit follows the mean
and spread of the intervals seen, so that a busy network does not look like a dead host. Bounds hold it
between four missed heartbeats and the `suspicion_ns` of the recovery budget.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from zbmd.actors.cluster.nodes import NodeKey
from zbmd.transport.budget import Deadlines

INTERVALS_KEPT = 32
INTERVALS_MIN = 4
"""Before so many were seen, the longest limit holds."""
PHI_SIGMAS = 5.6
"""As far from the mean lies a phi of 8: one wrong suspicion in 10^8, were the intervals normal."""
MISSED_MIN = 4


class _Heard:
    __slots__ = ("intervals_ns", "last_ns", "suspected")

    def __init__(self, now_ns: int) -> None:
        self.last_ns = now_ns
        self.intervals_ns: deque[int] = deque(maxlen=INTERVALS_KEPT)
        self.suspected = False


class Detector:
    """What a node makes of the heartbeats of the members that it observes."""

    def __init__(self, deadlines: Deadlines) -> None:
        self.heartbeat_ns = deadlines.heartbeat_ns
        self.suspicion_ns = deadlines.suspicion_ns
        self._heard: dict[NodeKey, _Heard] = {}

    def watch(self, subjects: Iterable[NodeKey], now_ns: int) -> None:
        """Observe these and nobody else; those who are new have just been heard."""
        self._heard = {key: self._heard.get(key) or _Heard(now_ns) for key in subjects}

    def heard(self, key: NodeKey, now_ns: int) -> bool:
        """A message of `key` came; whether it was suspected until now."""
        known = self._heard.get(key)
        if known is None:
            return False
        known.intervals_ns.append(now_ns - known.last_ns)
        known.last_ns = now_ns
        was, known.suspected = known.suspected, False
        return was

    def silent(self, now_ns: int) -> list[tuple[NodeKey, str]]:
        """Those who have become suspect, and why. Ask once a heartbeat."""
        found: list[tuple[NodeKey, str]] = []
        for key, known in self._heard.items():
            silence_ns = now_ns - known.last_ns
            if known.suspected or silence_ns < self.limit_ns(key):
                continue
            known.suspected = True
            found.append((key, f"not heard for {silence_ns / 1e6:.0f} ms"))
        return found

    def silence(self, key: NodeKey, now_ns: int) -> tuple[int | None, int]:
        """For how long `key` was not heard, and the silence that is suspect; None and 0 if not observed."""
        known = self._heard.get(key)
        return (None, 0) if known is None else (now_ns - known.last_ns, self.limit_ns(key))

    def limit_ns(self, key: NodeKey) -> int:
        """The silence of `key` that is suspect now."""
        intervals = self._heard[key].intervals_ns
        if len(intervals) < INTERVALS_MIN:
            return self.suspicion_ns
        mean = sum(intervals) / len(intervals)
        spread = math.sqrt(sum((interval - mean) ** 2 for interval in intervals) / len(intervals))
        limit_ns = mean + PHI_SIGMAS * max(spread, self.heartbeat_ns / 2)
        return int(min(self.suspicion_ns, max(MISSED_MIN * self.heartbeat_ns, limit_ns)))
