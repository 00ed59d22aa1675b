# cython: language_level=3, embedsignature=False, boundscheck=True
"""The compiled part of regions: copies into and out of peers' memory, and the notifications behind them."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memmove
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongLongAndOverflow

from zbmd.transport._native import Mapping
from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.transfer import DONE

cdef extern from "native.h" nogil:
    ctypedef char *zbmd_base
    enum:
        ZBMD_MAX_SLOTS
        ZBMD_CHANNELS
        ZBMD_OFF_LOST
        ZBMD_OFF_END
    uint64_t zbmd_load64(zbmd_base base, uint64_t offset)
    void zbmd_notify(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint64_t value)

cdef extern from "life.h" nogil:
    bint zbmd_life_ended(zbmd_base peer, uint32_t our_slot)

cdef enum:
    COPY_STEP_BYTES = 4 << 20   # between two looks at whether the peer is still there
    GIL_BYTES_MAX = 32 << 10    # a copy of more lets other threads run meanwhile

cdef object _done = DONE


cdef bint _copy(char *target, const char *source, size_t nbytes, zbmd_base peer, uint32_t our_slot) noexcept nogil:
    """False, and given up, if the peer ends before the last step. Ranges may overlap."""
    cdef size_t at = 0, n
    if source < target and target < source + nbytes:
        memmove(target, source, nbytes)
        return True
    while True:
        n = min(<size_t>COPY_STEP_BYTES, nbytes - at)
        memmove(target + at, source + at, n)
        at += n
        if at == nbytes:
            return True
        if zbmd_life_ended(peer, our_slot):
            return False


cdef class ShmRegion:
    cdef object own_mapping
    cdef object mapping
    cdef zbmd_base own
    cdef zbmd_base peer
    cdef char *start
    cdef size_t nbytes
    cdef uint32_t our_slot
    cdef uint32_t slot
    cdef bint writable
    cdef bint closed
    cdef readonly object handle

    def __cinit__(self, object own, uint32_t our_slot, object peer, object handle):
        cdef size_t offset = handle.offset
        cdef size_t nbytes = handle.nbytes
        cdef size_t limit
        if not isinstance(own, Mapping) or not isinstance(peer, Mapping):
            raise LocalProtocolError("a region in shared memory needs two mappings")
        limit = peer.writable_bytes if handle.writable else peer.nbytes
        if our_slot >= ZBMD_MAX_SLOTS or handle.slot >= ZBMD_MAX_SLOTS:
            raise LocalProtocolError(f"slots {our_slot} and {handle.slot} are not below {ZBMD_MAX_SLOTS}")
        if own.writable_bytes < ZBMD_OFF_END or peer.writable_bytes < ZBMD_OFF_END:
            raise LocalProtocolError("a region in shared memory needs the mappings of two segments")
        if offset < ZBMD_OFF_END or offset > limit or nbytes > limit - offset:
            raise RemoteProtocolError(f"a region of {offset}+{nbytes} of slot {handle.slot}: it has no such bytes")
        self.own = <zbmd_base><size_t>own.address
        self.peer = <zbmd_base><size_t>peer.address
        self.own_mapping = own
        self.mapping = peer
        self.start = self.peer + offset
        self.nbytes = nbytes
        self.our_slot = our_slot
        self.slot = handle.slot
        self.writable = handle.writable
        self.handle = handle
        self.closed = False

    cdef int usable(self) except -1:
        if self.closed:
            raise LocalProtocolError(f"the region of slot {self.slot} is closed")
        if zbmd_life_ended(self.peer, self.our_slot) or (
                zbmd_load64(self.own, ZBMD_OFF_LOST) >> self.slot & 1):
            raise self.lost()
        return 0

    cdef object lost(self):
        return PeerLost(self.slot, f"its incarnation {self.handle.incarnation} has ended")

    cdef object outside(self, object offset, object nbytes):
        return RemoteProtocolError(
            f"bytes {offset}+{nbytes} are outside a region of {self.nbytes} of slot {self.slot}")

    def put(self, object src, object offset=0, *, object channel, object value):
        cdef Py_buffer view
        cdef char *at
        cdef bint done
        cdef uint32_t cell = _channel(channel)
        cdef uint64_t number = _u64(value, "a notification's value")
        self.usable()
        if not self.writable:
            raise RemoteProtocolError(f"the region of slot {self.slot} is read-only: it is in its arena")
        _buffer(src, &view, PyBUF_SIMPLE)
        try:
            at = self.range(offset, view.len)
            done = self.copy(at, <const char *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        if not done:
            raise self.lost()
        zbmd_notify(self.peer, self.our_slot, cell, number)
        return _done

    def get(self, object into, object offset=0):
        cdef Py_buffer view
        cdef char *at
        cdef bint done
        self.usable()
        _buffer(into, &view, PyBUF_WRITABLE)
        try:
            at = self.range(offset, view.len)
            done = self.copy(<char *>view.buf, at, view.len)
        finally:
            PyBuffer_Release(&view)
        if not done:
            raise self.lost()
        return _done

    cdef char *range(self, object offset, size_t nbytes) except NULL:
        cdef int overflow = 0
        cdef long long at = PyLong_AsLongLongAndOverflow(offset, &overflow)
        if overflow or at < 0 or <size_t>at > self.nbytes or nbytes > self.nbytes - <size_t>at:
            raise self.outside(offset, nbytes)
        return self.start + at

    cdef int copy(self, char *target, const char *source, size_t nbytes) except -1:
        cdef bint done
        if nbytes <= GIL_BYTES_MAX:
            memmove(target, source, nbytes)
            return True
        with nogil:
            done = _copy(target, source, nbytes, self.peer, self.our_slot)
        return done

    def notify(self, object channel, object value):
        cdef uint32_t cell = _channel(channel)
        cdef uint64_t number = _u64(value, "a notification's value")
        self.usable()
        zbmd_notify(self.peer, self.our_slot, cell, number)

    def view(self, object offset=0, object nbytes=None):
        cdef char *at
        cdef object count = self.nbytes - offset if nbytes is None else nbytes
        if self.closed:
            raise LocalProtocolError(f"the region of slot {self.slot} is closed")
        if not 0 <= count <= self.nbytes:
            raise self.outside(offset, count)
        at = self.range(offset, count)
        return self.mapping.view(at - self.peer, count)

    def close(self):
        self.closed = True


cdef uint64_t _u64(object value, str what) except? 0:
    cdef uint64_t number = 0
    try:
        number = value
    except OverflowError:
        raise LocalProtocolError(f"{what} is {value}, not in 0..2**64 - 1") from None
    return number


cdef uint32_t _channel(object channel) except? 0:
    cdef uint64_t number = _u64(channel, "a channel")
    if number >= ZBMD_CHANNELS:
        raise LocalProtocolError(f"channel {number} is not below {ZBMD_CHANNELS}")
    return <uint32_t>number


cdef int _buffer(object owner, Py_buffer *view, int flags) except -1:
    try:
        PyObject_GetBuffer(owner, view, flags)
    except (BufferError, TypeError, ValueError) as error:
        kind = "a writable C-contiguous buffer" if flags & PyBUF_WRITABLE else "a C-contiguous buffer"
        raise LocalProtocolError(f"{type(owner).__name__} is not {kind}: {error}") from error
    return 0
