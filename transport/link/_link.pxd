from libc.stdint cimport int64_t, uint64_t

from zbmd.transport.clock._hlc cimport HybridClock
from zbmd.transport.capture.native._recording cimport Taking


cdef packed struct Header:  # see frames.py; all hosts that this is built for are little-endian
    unsigned int magic
    unsigned short version
    unsigned short flags
    unsigned int payload_bytes
    unsigned int epoch
    uint64_t job
    uint64_t incarnation
    uint64_t hlc
    uint64_t trace_id


cdef class FrameSink:
    cdef int takes_frame(self, uint64_t trace_id, payload) except -1


cdef class LinkCore:
    cdef public FrameSink _sink
    cdef public object _limits, _identity, _peer, _on_frame, _queue, _peer_end, _wall_ns
    cdef public Taking _recorder
    cdef public int64_t _queue_bytes, _stream
    cdef public bint _closed, _drain_scheduled, _takes_pieces, _gives_pieces
    cdef HybridClock _clock
    cdef int64_t _frame_bytes_max, _queue_bytes_max, _queue_frames_max, _frames_per_wake
    cdef uint64_t _job, _incarnation, _peer_job, _peer_incarnation
    cdef object _peer_job_told, _peer_incarnation_told
    cdef bint _real_time

    # The work of a transport; one that is compiled overrides these, any other the methods that they call.
    cdef bint pushes(self, bytes header, payload) except -1
    cdef object next_frame(self)
    cdef bint parks(self) except -1

    cdef int drains(self) except -1
    cdef int delivers(self, frame) except -1
    cdef uint64_t _now(self) except? 0
    cdef bytes _header(self, Py_ssize_t payload_bytes, epoch, trace_id, flags, uint64_t hlc)
    cdef bint _is_fine(self, Header *header, Py_ssize_t frame_bytes) noexcept
    cdef object _told(self, Header *header)
