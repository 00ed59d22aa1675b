from libc.stdint cimport int64_t, uint64_t


cdef class HybridClock:
    cdef public uint64_t last
    cdef public int64_t max_drift_ns
    cdef public uint64_t refused
    cdef public uint64_t refused_ahead_ns_max

    cdef uint64_t ticks(self, uint64_t wall_ns) except? 0
    cdef uint64_t merges(self, uint64_t remote, uint64_t wall_ns) except? 0
    cdef uint64_t advance(self, uint64_t latest, uint64_t wall_ns) except? 0
