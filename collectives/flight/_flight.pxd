"""The flight recorder's ring. See _flight.pyi."""

from libc.stdint cimport int32_t, uint64_t

cdef enum:
    F_RUNNING = 0
    F_COMPLETE = 1
    F_FAILED = 2

cdef struct Flight:
    uint64_t sequence
    uint64_t nbytes
    uint64_t start_ns
    uint64_t met_ns
    uint64_t end_ns
    int32_t call             # which of the ring's names
    int32_t state


cdef extern from "collectives/flight/quick_clock.h" nogil:
    ctypedef struct zbmd_quick_clock:
        int trusted
    uint64_t zbmd_quick_ns(zbmd_quick_clock *clock)


cdef class QuickClock:
    cdef zbmd_quick_clock clock


cdef class FlightRing:
    cdef Flight *records
    cdef readonly uint64_t capacity
    cdef readonly uint64_t begun         # operations recorded since the ring was made
    cdef list names
    cdef dict numbers
    cdef dict errors

    cdef void enter(self, int32_t call, uint64_t sequence, uint64_t nbytes, uint64_t start_ns) noexcept nogil
    cdef void leave(self, int32_t state, uint64_t met_ns, uint64_t end_ns) noexcept nogil
    cdef void relabel(self, int32_t call) noexcept nogil
