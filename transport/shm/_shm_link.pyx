"""The part of a shm link that runs at every frame: into the ring and out of it, spinning and parking. See _shm_link.pyi."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t

from zbmd.transport.link._link cimport LinkCore
from zbmd.transport.native._native cimport RingReader, RingWriter, zbmd_now_ns
from zbmd.transport.link._spin cimport SpinCore

from zbmd.transport.memory.scattered import whole

cdef enum:
    PREFIX_BYTES = 4


cdef class ShmCore(LinkCore):
    cdef public RingWriter _writer
    cdef public RingReader _reader
    cdef public SpinCore _policy
    cdef public object _loop
    cdef public bint _spinning, _dry
    cdef int64_t _look_ns
    cdef Py_ssize_t _lends_from_bytes
    cdef bint _lends

    # The part of the queue's first frame that is in the ring.
    cdef int64_t _head_done
    cdef bytes _head_record

    def _begin_rings(self, RingWriter writer not None, RingReader reader not None, SpinCore policy not None, *,
                     int64_t look_ns, Py_ssize_t lends_from_bytes, bint lends):
        self._writer, self._reader, self._policy = writer, reader, policy
        self._look_ns, self._lends_from_bytes, self._lends = look_ns, lends_from_bytes, lends
        self._head_done, self._head_record = 0, None
        self._spinning, self._dry = False, True

    # Out.

    def _push(self, bytes header not None, payload):
        return self.pushes(header, payload)

    cdef bint pushes(self, bytes header, payload) except -1:
        cdef bint begins = self._head_done == 0 and self._head_record is None
        if begins and type(payload) is bytes and PyBytes_GET_SIZE(payload) < self._lends_from_bytes:
            if self._writer.put(PyBytes_AS_STRING(header), PyBytes_GET_SIZE(header),
                                PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload)):
                return True
        elif begins and self._lends and len(payload) >= self._lends_from_bytes:
            self._head_record = self._lent(payload)
            if self._head_record is None and self._has_room_soon():
                self._head_record = self._lent(payload)
                if self._head_record is None:
                    return False
        return self._pushes_a_part(header, payload)

    cdef bint _pushes_a_part(self, bytes header, payload) except -1:
        cdef bytes body = self._head_record
        cdef bint marked = body is not None
        cdef int64_t frame_bytes
        if body is None:
            body = payload if type(payload) is bytes else whole(payload)
        frame_bytes = PREFIX_BYTES + PyBytes_GET_SIZE(header) + PyBytes_GET_SIZE(body)
        while True:
            self._head_done = self._writer.write(header, body, self._head_done, marked)
            if self._head_done == frame_bytes:
                break
            if self._writer.park():
                return False
        self._head_done, self._head_record = 0, None
        return True

    # In.

    def _next_frame(self):
        return self.next_frame()

    cdef object next_frame(self):
        cdef bytes frame
        if self._closed:
            return None
        frame = self._reader.next()
        if frame is None:
            return None
        if self._dry:
            self._dry = False
            self._policy.came(zbmd_now_ns())
        return self._borrowed(frame) if self._reader.marked else frame

    def _park(self):
        return self.parks()

    cdef bint parks(self) except -1:
        """Park, or look again on the loop's next turns: what waits there, such as our answer, goes first."""
        if not self._spinning and not self._dry:
            self._dry = True
            if self._policy.begins(zbmd_now_ns()):
                self._spinning = True
                self._loop.call_soon(self._spin)
        return self._spinning or self._reader.parks()

    def _spin(self):
        if self._closed:
            return
        if self._reader.comes(self._look_ns):
            self._spinning = False
            self.drains()
        elif self._policy.goes_on(zbmd_now_ns()):
            self._loop.call_soon(self._spin)
        else:
            self._spinning = False
            if not self._reader.parks():
                self.drains()
