"""Hybrid logical clock: causality in 64 bits that read as wall-clock time.

Source: Kulkarni, Demirbas, Madappa, Avva, Leone: "Logical Physical Clocks and Consistent Snapshots in
Globally Distributed Databases" (OPODIS 2014). As in its section on 64-bit timestamps, a stamp is the wall
clock in ns since 1970 with the low 16 bits replaced by the logical counter. So stamps compare as plain
integers, and a stamp is within 65.536 us of the time it tells. A counter that is full carries into the
physical part, which runs ahead by one tick.
"""

from __future__ import annotations

from zbmd.transport.errors import LocalProtocolError

LOGICAL_BITS = 16
LOGICAL_MASK = (1 << LOGICAL_BITS) - 1
STAMP_MAX = (1 << 64) - 1
_PHYSICAL_MASK = ~LOGICAL_MASK

MAX_DRIFT_NS = 60_000_000_000
"""How far a peer's stamp may be ahead of our wall clock and still be followed."""


class HybridClock:
    """The clock of one process. Pure: wall-clock time is an argument.

    `last` is the last stamp given; every stamp is greater than all those given or merged before it, also
    when the wall clock stands still or goes back. A stamp more than `max_drift_ns` ahead of the wall clock
    is not followed, as in the paper: one broken clock must not carry all others away, nor end a job. Such
    stamps are counted in `refused`, and the furthest is kept in `refused_ahead_ns_max`: their causality is
    lost until the hosts' clocks are synchronised.
    """

    __slots__ = ("last", "max_drift_ns", "refused", "refused_ahead_ns_max")

    def __init__(self, *, max_drift_ns: int = MAX_DRIFT_NS) -> None:
        self.last = 0
        self.max_drift_ns = max_drift_ns
        self.refused = 0
        self.refused_ahead_ns_max = 0

    def tick(self, wall_ns: int) -> int:
        """Stamp a local event or a send at `wall_ns` (ns since 1970): a 64-bit stamp.

        Raises `LocalProtocolError` if `wall_ns` is no such time.
        """
        return self._advance(self.last, wall_ns)

    def merge(self, remote: int, wall_ns: int) -> int:
        """Stamp the receipt at `wall_ns` of a message stamped `remote`: greater than all of ours before it,
        and than `remote` unless that is refused.

        Raises `LocalProtocolError` if `wall_ns` is no time or `remote` does not fit into 64 bits.
        """
        if not 0 <= remote <= STAMP_MAX:
            raise LocalProtocolError(f"clock stamp {remote:#x} does not fit into 64 bits")
        ahead_ns = remote - wall_ns
        if ahead_ns > self.max_drift_ns:
            self.refused += 1
            self.refused_ahead_ns_max = max(self.refused_ahead_ns_max, ahead_ns)
            remote = 0
        return self._advance(remote if remote > self.last else self.last, wall_ns)

    def _advance(self, latest: int, wall_ns: int) -> int:
        if not 0 <= wall_ns <= STAMP_MAX:
            raise LocalProtocolError(f"wall clock of {wall_ns} ns since 1970 does not fit into 64 bits")
        stamp = wall_ns & _PHYSICAL_MASK
        if stamp <= latest:
            stamp = latest + 1
        if stamp > STAMP_MAX:
            raise LocalProtocolError("the hybrid clock is at its end (year 2554): set the wall clock")
        self.last = stamp
        return stamp


def physical_ns(stamp: int) -> int:
    """The wall-clock time that a stamp tells, in ns since 1970, rounded down to 65.536 us."""
    return stamp & ~LOGICAL_MASK


def logical(stamp: int) -> int:
    """The stamp's counter: orders the events of one tick of the wall clock."""
    return stamp & LOGICAL_MASK
