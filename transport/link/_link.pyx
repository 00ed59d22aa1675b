"""The part of a link that runs at every frame: its header, its stamps, its way in and out. See _link.pyi."""

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from time import time_ns as _time_ns

from zbmd.transport import frames as _frames
from zbmd.transport.clock._hlc cimport HybridClock
from zbmd.transport.errors import LinkFull, LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.frame_loans import BorrowedFrame
from zbmd.transport.frames import FrameHeader, pack_fields, require_origin, unpack_frame
from zbmd.transport.memory.scattered import Scattered, copied

cdef extern from "Python.h":
    object PyObject_Vectorcall(object callable, PyObject **arguments, size_t count, PyObject *names)
    object PyMemoryView_FromObject(object buffer)
    object PySequence_GetSlice(object sequence, Py_ssize_t first, Py_ssize_t last)

cdef enum:
    FRAME_IN = 4
    COPIED_MAX = 1024  # a longer payload is not copied once more

assert sizeof(Header) == _frames.HEADER_BYTES

cdef uint32_t _MAGIC = int.from_bytes(_frames.FRAME_MAGIC, "little")
cdef uint16_t _VERSION = _frames.FORMAT_VERSION
cdef uint16_t _FLAGS = _frames.USER_FLAGS_MASK
cdef uint32_t _PAYLOAD_MAX = _frames.MAX_PAYLOAD_BYTES
cdef tuple _NAMES = ("payload_bytes", "job", "incarnation", "epoch", "hlc", "trace_id", "flags")


cdef class FrameSink:
    cdef int takes_frame(self, uint64_t trace_id, payload) except -1:
        raise NotImplementedError


cdef class LinkCore:
    def _begin(self, HybridClock clock not None, wall_ns):
        """The fields that its methods need; `_identity`, `_peer` and `_limits` are set before."""
        limits = self._limits
        self._frame_bytes_max, self._frames_per_wake = limits.frame_bytes_max, limits.frames_per_wake
        self._queue_bytes_max, self._queue_frames_max = limits.queue_bytes_max, limits.queue_frames_max
        self._job, self._incarnation = self._identity.job, self._identity.incarnation
        self._peer_job_told, self._peer_incarnation_told = self._peer.job, self._peer.incarnation
        self._peer_job, self._peer_incarnation = self._peer_job_told, self._peer_incarnation_told
        self._clock = clock
        self._wall_ns = wall_ns
        self._real_time = wall_ns is _time_ns

    cdef uint64_t _now(self) except? 0:
        cdef timespec now
        if not self._real_time:
            return self._wall_ns()
        clock_gettime(CLOCK_REALTIME, &now)
        return <uint64_t>now.tv_sec * 1_000_000_000 + <uint64_t>now.tv_nsec

    # -- out

    cdef bint pushes(self, bytes header, payload) except -1:
        return self._push(header, payload)

    def send(self, payload, *, epoch=0, trace_id=0, flags=0):
        cdef int64_t frame_bytes = sizeof(Header) + len(payload)
        cdef uint64_t hlc
        if self._closed or self._peer_end is not None:
            raise self._closed_error()
        if frame_bytes > self._frame_bytes_max:
            raise LocalProtocolError(
                f"a frame of {frame_bytes} bytes to {self._peer.name} is over the bound of "
                f"{self._frame_bytes_max}: send bulk data as a region"
            )
        queue = self._queue
        waiting = len(queue)
        if self._queue_bytes >= self._queue_bytes_max or waiting >= self._queue_frames_max:
            raise LinkFull(
                f"{waiting} frames ({self._queue_bytes} bytes) already wait for {self._peer.name}; "
                "await writable() and send again"
            )
        if not self._takes_pieces and type(payload) is Scattered:
            payload = payload.joined()
        hlc = self._clock.ticks(self._now())
        header = self._header(len(payload), epoch, trace_id, flags, hlc)
        if self._recorder is not None:
            self._recorder.takes_out(self._stream, header, payload, hlc)
        if not waiting:
            try:
                if self.pushes(header, payload):
                    return
            except RemoteProtocolError as error:
                self._fail(error)
                raise self._closed_error() from error
        queue.append((header, payload))
        self._queue_bytes += frame_bytes

    cdef bytes _header(self, Py_ssize_t payload_bytes, epoch, trace_id, flags, uint64_t hlc):
        cdef Header header
        try:
            header.flags, header.epoch, header.trace_id = flags, epoch, trace_id
            fits = not header.flags & ~_FLAGS
        except (OverflowError, TypeError):
            fits = False
        if not fits:  # it raises
            return pack_fields(flags, payload_bytes, epoch, self._job, self._incarnation, hlc, trace_id)
        header.magic, header.version, header.payload_bytes = _MAGIC, _VERSION, payload_bytes
        header.job, header.incarnation, header.hlc = self._job, self._incarnation, hlc
        return PyBytes_FromStringAndSize(<char *>&header, sizeof(Header))

    # -- in

    cdef object next_frame(self):
        return self._next_frame()

    cdef bint parks(self) except -1:
        return self._park()

    def _drain(self):
        self.drains()

    cdef int drains(self) except -1:
        cdef int64_t _
        cdef bint more = True
        if self._closed or self._drain_scheduled:
            return 0
        if self._on_frame is None:
            if self._peer_end is not None and self._on_closed is not None:
                self._end(self._peer_end[0])
            return 0
        try:
            for _ in range(self._frames_per_wake):
                frame = self.next_frame()
                if frame is None:
                    more = self._peer_end is None and not self.parks()
                    break
                if type(frame) is BorrowedFrame:
                    self._deliver_borrowed(frame)
                else:
                    self.delivers(frame)
                frame = None  # a block that was lent is brought back at once
                if self._on_frame is None or self._closed:
                    return 0
        except RemoteProtocolError as error:
            self._fail(error)
        finally:
            # Also when the callback raised something of its own, which is the loop's to report.
            if more:
                self._schedule_drain()
        if self._peer_end is not None and not more:
            self._end(self._peer_end[0])
        return 0

    def _deliver(self, frame):
        self.delivers(frame)

    cdef int delivers(self, frame) except -1:
        cdef Header header
        cdef Py_ssize_t frame_bytes = -1
        cdef const char *start = NULL
        if type(frame) is bytes:
            start, frame_bytes = PyBytes_AS_STRING(frame), PyBytes_GET_SIZE(frame)
        elif type(frame) is bytearray:
            start, frame_bytes = PyByteArray_AS_STRING(frame), PyByteArray_GET_SIZE(frame)
        if frame_bytes >= <Py_ssize_t>sizeof(Header):
            memcpy(&header, start, sizeof(Header))
        if frame_bytes < <Py_ssize_t>sizeof(Header) or not self._is_fine(&header, frame_bytes):
            unpack_frame(frame, job=self._peer_job_told, incarnation=self._peer_incarnation_told)
            raise RemoteProtocolError(f"a frame from {self._peer.name} is in no buffer of its own")
        hlc = self._clock.merges(header.hlc, self._now())
        if self._recorder is not None:
            self._recorder.takes_in(self._stream, frame, start, frame_bytes, hlc)
        if self._sink is not None and header.payload_bytes <= COPIED_MAX:
            payload = PyBytes_FromStringAndSize(start + sizeof(Header), header.payload_bytes)
        else:
            payload = PySequence_GetSlice(PyMemoryView_FromObject(frame), sizeof(Header), frame_bytes)
        if self._sink is not None:
            return self._sink.takes_frame(header.trace_id, payload)
        self._on_frame(self._told(&header), payload)
        return 0

    cdef bint _is_fine(self, Header *header, Py_ssize_t frame_bytes) noexcept:
        return (
            header.magic == _MAGIC
            and header.version == _VERSION
            and not header.flags & ~_FLAGS
            and header.payload_bytes <= _PAYLOAD_MAX
            and header.payload_bytes == frame_bytes - <Py_ssize_t>sizeof(Header)
            and header.job == self._peer_job
            and header.incarnation == self._peer_incarnation
        )

    cdef object _told(self, Header *header):
        """The header as an object, made as `FrameHeader(payload_bytes=…, …)` would."""
        cdef object payload_bytes = header.payload_bytes, epoch = header.epoch, flags = header.flags
        cdef object hlc = header.hlc, trace_id = header.trace_id
        cdef PyObject *fields[7]
        fields[0], fields[1] = <PyObject *>payload_bytes, <PyObject *>self._peer_job_told
        fields[2], fields[3] = <PyObject *>self._peer_incarnation_told, <PyObject *>epoch
        fields[4], fields[5], fields[6] = <PyObject *>hlc, <PyObject *>trace_id, <PyObject *>flags
        return PyObject_Vectorcall(FrameHeader, fields, 0, <PyObject *>_NAMES)

    def _deliver_borrowed(self, frame):
        header, payload, packed = frame
        require_origin(header, job=self._peer_job_told, incarnation=self._peer_incarnation_told)
        hlc = self._clock.merges(header.hlc, self._now())
        if self._recorder is not None:  # what is recorded must not change, as the peer's memory may
            payload = copied(payload)
            self._recorder.takes_long(FRAME_IN, self._stream, packed, payload, hlc)
            if not self._gives_pieces:
                payload = memoryview(payload.joined())
        self._on_frame(header, payload)
