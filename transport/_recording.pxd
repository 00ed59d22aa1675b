from libc.stdint cimport int64_t


cdef class Taking:
    cdef public object now_ns
    cdef public object _append
    cdef public int64_t _taken_bytes
    cdef public int64_t _alarm_bytes
    cdef bint _real_time

    cdef int64_t read_clock(self) except? -1
    cdef bint has_room(self, int64_t payload_bytes) except -1
