from libc.stdint cimport int64_t, uint64_t


cdef class PackedFrames:
    cdef char *_start
    cdef Py_ssize_t _used
    cdef readonly Py_ssize_t records

    cdef bint has_room(self, Py_ssize_t frame_bytes) noexcept
    cdef void put(self, int kind, int64_t stream, int64_t at_ns, uint64_t hlc, const char *head,
                  Py_ssize_t head_bytes, const char *rest, Py_ssize_t rest_bytes) noexcept


cdef class Taking:
    cdef public object now_ns
    cdef public object _append
    cdef public int64_t _taken_bytes
    cdef public int64_t _taken_records
    cdef public int64_t _alarm_bytes
    cdef public bint _packs
    cdef PackedFrames _run
    cdef bint _real_time

    cdef int64_t read_clock(self) except? -1
    cdef bint has_room(self, int64_t payload_bytes) except -1
    cdef int keep(self, taken) except -1
    cdef PackedFrames _run_for(self, Py_ssize_t frame_bytes)
    cdef int takes_in(self, int64_t stream, frame, const char *start, Py_ssize_t nbytes, uint64_t hlc) except -1
    cdef int takes_out(self, int64_t stream, bytes header, payload, uint64_t hlc) except -1
    cdef int takes_long(self, int kind, int64_t stream, bytes header, payload, uint64_t hlc) except -1
