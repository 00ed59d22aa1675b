"""What of recording runs at every message. See _recording.pyi."""

from libc.stdint cimport int64_t, uint64_t
from time import monotonic_ns as _monotonic_ns

cdef extern from "native.h" nogil:
    uint64_t zbmd_now_ns()

cdef enum:
    FRAME_IN = 4
    FRAME_OUT = 5

cdef int64_t RECORD_WEIGHT = 256
RECORD_WEIGHT_BYTES = RECORD_WEIGHT


cdef class Taking:
    def __init__(self, monotonic_ns, append):
        self.now_ns = monotonic_ns
        self._append = append
        self._taken_bytes = 0
        self._alarm_bytes = 0
        self._real_time = monotonic_ns is _monotonic_ns

    cdef int64_t read_clock(self) except? -1:
        if self._real_time:
            return <int64_t>zbmd_now_ns()
        return self.now_ns()

    cdef bint has_room(self, int64_t payload_bytes) except -1:
        cdef int64_t weight = payload_bytes + RECORD_WEIGHT
        self._taken_bytes += weight
        return self._taken_bytes <= self._alarm_bytes or self._make_room(weight)

    def frame_in(self, stream, bytes frame not None, hlc):
        if self.has_room(len(frame)):
            self._append((FRAME_IN, stream, self.read_clock(), hlc, frame))

    def frame_out(self, stream, header, payload, hlc):
        cdef bytes kept = payload if type(payload) is bytes else bytes(payload)
        if self.has_room(len(kept)):
            self._append((FRAME_OUT, stream, self.read_clock(), hlc, header, kept))

    def _take(self, tuple record not None, int64_t payload_bytes=0):
        if self.has_room(payload_bytes):
            self._append(record)
