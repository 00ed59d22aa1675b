"""The hybrid logical clock, which stamps every frame. See _hlc.pyi."""

from libc.stdint cimport int64_t, uint64_t

from zbmd.transport.errors import LocalProtocolError

cdef uint64_t _LOGICAL = 0xFFFF
cdef uint64_t _MAX = 0xFFFFFFFFFFFFFFFF

LOGICAL_BITS = 16
STAMP_MAX = _MAX
MAX_DRIFT_NS = 60_000_000_000


cdef uint64_t _wall(wall_ns) except? 0:
    try:
        return wall_ns
    except OverflowError:
        raise LocalProtocolError(
            f"wall clock of {wall_ns} ns since 1970 does not fit into 64 bits"
        ) from None


cdef class HybridClock:
    def __init__(self, *, int64_t max_drift_ns=MAX_DRIFT_NS):
        self.last = 0
        self.max_drift_ns = max_drift_ns
        self.refused = 0
        self.refused_ahead_ns_max = 0

    def tick(self, wall_ns):
        return self.ticks(_wall(wall_ns))

    def merge(self, remote, wall_ns):
        cdef uint64_t stamp
        try:
            stamp = remote
        except OverflowError:
            raise LocalProtocolError(f"clock stamp {remote:#x} does not fit into 64 bits") from None
        return self.merges(stamp, _wall(wall_ns))

    cdef uint64_t ticks(self, uint64_t wall_ns) except? 0:
        return self.advance(self.last, wall_ns)

    cdef uint64_t merges(self, uint64_t remote, uint64_t wall_ns) except? 0:
        cdef uint64_t ahead_ns = remote - wall_ns if remote > wall_ns else 0
        if ahead_ns > <uint64_t>self.max_drift_ns:
            self.refused += 1
            self.refused_ahead_ns_max = max(self.refused_ahead_ns_max, ahead_ns)
            remote = 0
        return self.advance(remote if remote > self.last else self.last, wall_ns)

    cdef uint64_t advance(self, uint64_t latest, uint64_t wall_ns) except? 0:
        cdef uint64_t stamp = wall_ns & ~_LOGICAL
        if stamp <= latest:
            if latest == _MAX:
                raise LocalProtocolError("the hybrid clock is at its end (year 2554): set the wall clock")
            stamp = latest + 1
        self.last = stamp
        return stamp
