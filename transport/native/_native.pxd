from libc.stdint cimport int64_t, uint32_t, uint64_t

from zbmd.transport.native._slots cimport zbmd_base

cdef extern from "transport/native/segment.h" nogil:
    uint64_t zbmd_now_ns()

cdef extern from "transport/native/ring.h" nogil:
    enum zbmd_block:
        ZBMD_BLOCK_FREE
        ZBMD_BLOCK_LENT
        ZBMD_BLOCK_TAKEN
    struct zbmd_ring_end:
        zbmd_base ring
        uint64_t capacity
        uint64_t position
        int peer_event_fd


cdef class Mapping:
    cdef char *start
    cdef readonly size_t nbytes
    cdef readonly size_t writable_bytes

    cdef zbmd_base word(self, size_t offset) except NULL
    cdef zbmd_base at(self, size_t offset, size_t nbytes) except NULL


cdef class RingWriter:
    cdef Mapping mapping
    cdef zbmd_ring_end end

    cdef bint put(self, const char *head, uint64_t head_bytes, const char *body, uint64_t body_bytes) except -1
    cdef uint64_t _part(self, const char *source, uint64_t nbytes, uint64_t begins, uint64_t done,
                        int64_t *room) noexcept


cdef class RingReader:
    cdef Mapping mapping
    cdef zbmd_ring_end end
    cdef uint32_t frame_bytes_max
    cdef object frame
    cdef readonly bint marked
    cdef bint ended
    cdef uint64_t length
    cdef uint64_t have

    cdef bytes next(self)
    cdef bint comes(self, uint64_t look_ns) except -1
    cdef bint parks(self) noexcept
    cdef void set_block(self, uint32_t block, zbmd_block state) noexcept
