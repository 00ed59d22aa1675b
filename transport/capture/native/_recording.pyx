"""The part of recording that runs at every message. See _recording.pyi."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from time import monotonic_ns as _monotonic_ns

from zbmd.transport.memory.scattered import Scattered

cdef extern from "transport/native/segment.h" nogil:
    uint64_t zbmd_now_ns()

cdef enum:
    FRAME_IN = 4
    FRAME_OUT = 5
    RUN_BYTES = 16 << 10
    PACKED_MAX = 1024  # a larger frame is kept by reference: a copy would cost more than what it saves

cdef int64_t RECORD_WEIGHT = 256
RECORD_WEIGHT_BYTES = RECORD_WEIGHT
PACKED_FRAME_BYTES_MAX = PACKED_MAX


cdef packed struct Entry:
    uint32_t frame_bytes
    uint16_t head_bytes
    uint16_t kind
    int64_t stream
    int64_t at_ns
    uint64_t hlc


cdef class PackedFrames:
    def __cinit__(self):
        self._start = <char *>PyMem_Malloc(RUN_BYTES)
        if self._start is NULL:
            raise MemoryError()
        self._used = self.records = 0

    def __dealloc__(self):
        PyMem_Free(self._start)

    def __len__(self):
        return self.records

    cdef bint has_room(self, Py_ssize_t frame_bytes) noexcept:
        return <Py_ssize_t>sizeof(Entry) + frame_bytes <= RUN_BYTES - self._used

    cdef void put(self, int kind, int64_t stream, int64_t at_ns, uint64_t hlc, const char *head,
                  Py_ssize_t head_bytes, const char *rest, Py_ssize_t rest_bytes) noexcept:
        cdef char *place = self._start + self._used
        cdef Entry *entry = <Entry *>place
        entry.frame_bytes = <uint32_t>(head_bytes + rest_bytes)
        entry.head_bytes, entry.kind = <uint16_t>head_bytes, <uint16_t>kind
        entry.stream, entry.at_ns, entry.hlc = stream, at_ns, hlc
        memcpy(place + sizeof(Entry), head, head_bytes)
        memcpy(place + sizeof(Entry) + head_bytes, rest, rest_bytes)
        self._used += sizeof(Entry) + head_bytes + rest_bytes
        self.records += 1

    def unfold(self):
        cdef Py_ssize_t at = 0
        cdef Entry entry
        cdef list records = []
        while at < self._used:
            memcpy(&entry, self._start + at, sizeof(Entry))
            at += sizeof(Entry)
            head = PyBytes_FromStringAndSize(self._start + at, entry.head_bytes)
            rest = PyBytes_FromStringAndSize(
                self._start + at + entry.head_bytes, <Py_ssize_t>entry.frame_bytes - entry.head_bytes)
            at += entry.frame_bytes
            records.append(_record(entry.kind, entry.stream, entry.at_ns, entry.hlc, head, rest))
        return records


cdef tuple _record(int kind, stream, at_ns, hlc, bytes head, bytes rest):
    if kind == FRAME_IN:
        return FRAME_IN, stream, at_ns, hlc, head + rest
    return FRAME_OUT, stream, at_ns, hlc, head, rest


cdef class LongFrame:
    """A frame whose pieces are joined when it is written down."""
    cdef int _kind
    cdef object _stream, _at_ns, _hlc, _payload
    cdef bytes _header

    def __len__(self):
        return 1

    def unfold(self):
        payload = b"".join(self._payload.pieces)
        return [_record(self._kind, self._stream, self._at_ns, self._hlc, self._header, payload)]


cdef class Taking:
    def __init__(self, monotonic_ns, append):
        self.now_ns = monotonic_ns
        self._append = append
        self._taken_bytes = self._taken_records = 0
        self._alarm_bytes = 0
        self._packs = False
        self._real_time = monotonic_ns is _monotonic_ns

    cdef int64_t read_clock(self) except? -1:
        if self._real_time:
            return <int64_t>zbmd_now_ns()
        return self.now_ns()

    cdef bint has_room(self, int64_t payload_bytes) except -1:
        cdef int64_t weight = payload_bytes + RECORD_WEIGHT
        self._taken_bytes += weight
        if self._taken_bytes > self._alarm_bytes:
            self._run = None  # what comes now may belong to another part
            if not self._make_room(weight):
                return False
        self._taken_records += 1
        return True

    cdef int keep(self, taken) except -1:
        self._run = None  # which keeps the order
        self._append(taken)
        return 0

    cdef PackedFrames _run_for(self, Py_ssize_t frame_bytes):
        if self._run is None or not self._run.has_room(frame_bytes):
            run = PackedFrames.__new__(PackedFrames)
            self.keep(run)
            self._run = run
        return self._run

    def frame_in(self, stream, bytes frame not None, hlc):
        self.takes_in(stream, frame, PyBytes_AS_STRING(frame), PyBytes_GET_SIZE(frame), hlc)

    cdef int takes_in(self, int64_t stream, frame, const char *start, Py_ssize_t nbytes, uint64_t hlc) except -1:
        if not self.has_room(nbytes):
            return 0
        if self._packs and nbytes <= PACKED_MAX:
            self._run_for(nbytes).put(FRAME_IN, stream, self.read_clock(), hlc, start, nbytes, start, 0)
        else:
            self.keep((FRAME_IN, stream, self.read_clock(), hlc, bytes(frame)))
        return 0

    def frame_out(self, stream, bytes header not None, payload, hlc):
        self.takes_out(stream, header, payload, hlc)

    cdef int takes_out(self, int64_t stream, bytes header, payload, uint64_t hlc) except -1:
        cdef bytes kept
        cdef Py_ssize_t nbytes
        if type(payload) is Scattered:
            return self.takes_long(FRAME_OUT, stream, header, payload, hlc)
        kept = payload if type(payload) is bytes else bytes(payload)
        nbytes = PyBytes_GET_SIZE(header) + PyBytes_GET_SIZE(kept)
        if not self.has_room(PyBytes_GET_SIZE(kept)):
            return 0
        if self._packs and nbytes <= PACKED_MAX:
            self._run_for(nbytes).put(
                FRAME_OUT, stream, self.read_clock(), hlc, PyBytes_AS_STRING(header), PyBytes_GET_SIZE(header),
                PyBytes_AS_STRING(kept), PyBytes_GET_SIZE(kept))
        else:
            self.keep((FRAME_OUT, stream, self.read_clock(), hlc, header, kept))
        return 0

    def long_frame_in(self, stream, bytes header not None, payload, hlc):
        self.takes_long(FRAME_IN, stream, header, payload, hlc)

    cdef int takes_long(self, int kind, int64_t stream, bytes header, payload, uint64_t hlc) except -1:
        cdef LongFrame frame
        if self.has_room(len(payload)):
            frame = LongFrame.__new__(LongFrame)
            frame._kind, frame._stream, frame._at_ns, frame._hlc = kind, stream, self.read_clock(), hlc
            frame._header, frame._payload = header, payload
            self.keep(frame)
        return 0

    def _take(self, tuple record not None, int64_t payload_bytes=0):
        if self.has_room(payload_bytes):
            self.keep(record)

    def _break_run(self):
        self._run = None
