# cython: language_level=3, embedsignature=False, boundscheck=True
"""The compiled part of regions: copies into and out of peers' memory, and the notifications behind them."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memmove
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.long cimport PyLong_AsLongLongAndOverflow

from asyncio import _get_running_loop

from zbmd.transport.native._native import Mapping
from zbmd.transport.native._slots cimport ZBMD_MAX_SLOTS, slots_of, zbmd_base, zbmd_load64, zbmd_slots
from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.memory.transfer import DONE

cdef extern from "transport/native/segment.h" nogil:
    ctypedef uint64_t atomic_u64 "_Atomic uint64_t"
    enum:
        ZBMD_CHANNELS
        ZBMD_OFF_END
    bint zbmd_is_lost(zbmd_base own, uint32_t slot)
    void zbmd_notify_max(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint64_t value, atomic_u64 *hint)
    int zbmd_arrived(uint64_t cell, uint64_t value)
    uint64_t zbmd_cell_offset(uint32_t slot, uint32_t channel)
    int zbmd_spin(zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value, uint32_t looks, uint32_t *used)
    int zbmd_wait(zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value,
                  const zbmd_slots *group, uint64_t deadline_ns, uint32_t spins)

cdef extern from "transport/native/copy.h" nogil:
    void zbmd_stream(char *target, const char *source, uint64_t nbytes)
    bint zbmd_life_ended(zbmd_base peer, uint32_t our_slot)
    bint zbmd_copy(char *target, const char *source, uint64_t nbytes, uint64_t whole_bytes, zbmd_base peer,
                   uint32_t our_slot)

cdef enum:
    GIL_BYTES_MAX = 32 << 10    # a copy of more lets other threads run meanwhile
    LOOP_BYTES_MAX = 1 << 20    # a copy of more is not for the thread of an event loop

cdef enum:
    PUT = 0
    GET = 1
    NOTIFY = 2

cdef object _done = DONE

cdef enum:
    LOOKS_HOLDING_GIL = 16      # a microsecond or less: cheaper than to release it
    LOOKS_MIN = 64
    LOOKS_MAX = 4096            # 25 to 100 us by the length of a pause: a few times what a wake-up costs
    PROBE_EVERY = 16            # so often, look LOOKS_MAX times whatever the past has been


cdef class Cells:
    """The notify cells of our own segment. The looks before a thread parks adapt to how long waits take."""

    cdef object mapping
    cdef zbmd_base base
    cdef uint32_t looks
    cdef uint32_t waits

    def __cinit__(self, *arguments, **options):
        self.looks = LOOKS_MAX
        self.base = NULL

    def _open_cells(self, object mapping):
        if not isinstance(mapping, Mapping) or mapping.writable_bytes < ZBMD_OFF_END:
            raise LocalProtocolError("notify cells need the mapping of a segment")
        self.base = <zbmd_base><size_t>mapping.address
        self.mapping = mapping

    def _close_cells(self):
        self.base = NULL
        self.mapping = None

    def wait(self, uint32_t slot, uint32_t channel, uint64_t value, *,
             object group_mask=0, uint64_t deadline_ns=0, object spins=None):
        cdef zbmd_base base = self.base
        cdef zbmd_slots group
        cdef object keep
        cdef int result
        cdef uint32_t looks, used = 0
        if base == NULL:
            raise LocalProtocolError("wait on a segment that is closed")
        if slot >= ZBMD_MAX_SLOTS or channel >= ZBMD_CHANNELS:
            raise LocalProtocolError(
                f"slot {slot} is not below {ZBMD_MAX_SLOTS}, or channel {channel} not below {ZBMD_CHANNELS}")
        result = zbmd_spin(base, slot, channel, value, LOOKS_HOLDING_GIL, &used)
        if result >= 0:
            return result
        slots_of(group_mask, &group)
        looks = self.budget() if spins is None else spins
        keep = self.mapping
        with nogil:
            result = zbmd_spin(base, slot, channel, value, looks, &used)
            if result < 0:
                result = zbmd_wait(base, slot, channel, value, &group, deadline_ns, 0)
        if spins is None:
            self.learn(used < looks, used)
        return result

    cdef void look(self, uint32_t slot, uint32_t channel, uint64_t value):
        """Look for a notification as `wait` does before its thread parks."""
        cdef zbmd_base base = self.base
        cdef object keep = self.mapping
        cdef uint32_t looks, used = 0
        if zbmd_spin(base, slot, channel, value, LOOKS_HOLDING_GIL, &used) >= 0:
            return
        looks = self.budget()
        with nogil:
            zbmd_spin(base, slot, channel, value, looks, &used)
        self.learn(used < looks, used)

    cdef uint32_t budget(self) noexcept:
        self.waits += 1
        return LOOKS_MAX if self.waits % PROBE_EVERY == 0 else self.looks

    cdef void learn(self, bint arrived, uint32_t used) noexcept:
        """Twice what it took when that was enough, half when it was not."""
        if arrived:
            self.looks = min(<uint32_t>LOOKS_MAX, max(<uint32_t>LOOKS_MIN, max(2 * used, self.looks)))
        else:
            self.looks = max(<uint32_t>LOOKS_MIN, self.looks // 2)


cdef class Deferred:
    """The share of one peer's requests that has been put off."""

    cdef readonly int deferred

    def defer(self, int change):
        self.deferred += change


cdef class Pinned:
    """The bytes of somebody's buffer, which can neither move nor go while this lives."""

    cdef Py_buffer pinned
    cdef bint held

    def __cinit__(self, object owner, bint writable):
        self.held = False
        _buffer(owner, &self.pinned, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.pinned)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.pinned.buf, self.pinned.len, self.pinned.readonly, flags)


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
    cdef Deferred queue
    cdef readonly object handle
    cdef atomic_u64 hints[ZBMD_CHANNELS]

    def __cinit__(self, object own, uint32_t our_slot, object peer, object handle, Deferred queue not None):
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
        self.queue = queue
        self.closed = False

    cdef int usable(self, bint draining) except -1:
        if self.closed and not draining:
            raise LocalProtocolError(f"the region of slot {self.slot} is closed")
        if zbmd_life_ended(self.peer, self.our_slot) or zbmd_is_lost(self.own, self.slot):
            raise self.lost()
        return 0

    cdef object lost(self):
        return PeerLost(self.slot, f"its incarnation {self.handle.incarnation} has ended")

    cdef object outside(self, object offset, object nbytes):
        return RemoteProtocolError(
            f"bytes {offset}+{nbytes} are outside a region of {self.nbytes} of slot {self.slot}")

    cdef char *range(self, object offset, size_t nbytes) except NULL:
        cdef int overflow = 0
        cdef long long at = PyLong_AsLongLongAndOverflow(offset, &overflow)
        if overflow or at < 0 or <size_t>at > self.nbytes or nbytes > self.nbytes - <size_t>at:
            raise self.outside(offset, nbytes)
        return self.start + at

    cdef bint defers(self, size_t nbytes) except -1:
        return self.queue.deferred != 0 or (nbytes > LOOP_BYTES_MAX and _get_running_loop() is not None)

    cdef int copy(self, char *target, const char *source, size_t nbytes) except -1:
        cdef bint done
        if nbytes <= GIL_BYTES_MAX:
            memmove(target, source, nbytes)
            return 0
        with nogil:
            done = zbmd_copy(target, source, nbytes, nbytes, self.peer, self.our_slot)
        if not done:
            raise self.lost()
        return 0

    cdef object move(self, int kind, object buffer, object offset, uint32_t cell, uint64_t number, bint draining):
        """A put or a get, now or, unless we are the queue, put off."""
        cdef Py_buffer view
        cdef char *at
        self.usable(draining)
        _buffer(buffer, &view, PyBUF_WRITABLE if kind == GET else PyBUF_SIMPLE)
        try:
            at = self.range(offset, view.len)
            if not draining and self.defers(view.len):
                return self.queue.submit(self, kind, Pinned(buffer, kind == GET), offset, cell, number)
            if kind == GET:
                self.copy(<char *>view.buf, at, view.len)
                return _done
            self.copy(at, <const char *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        zbmd_notify_max(self.peer, self.our_slot, cell, number, &self.hints[cell])
        return _done

    def put(self, object src, object offset=0, *, object channel, object value):
        cdef uint32_t cell = _channel(channel)
        cdef uint64_t number = _u64(value, "a notification's value")
        if not self.writable:
            raise RemoteProtocolError(f"the region of slot {self.slot} is read-only: it is in its arena")
        return self.move(PUT, src, offset, cell, number, False)

    def get(self, object into, object offset=0):
        return self.move(GET, into, offset, 0, 0, False)

    def notify(self, object channel, object value):
        cdef uint32_t cell = _channel(channel)
        cdef uint64_t number = _u64(value, "a notification's value")
        self.usable(False)
        if self.queue.deferred:
            self.queue.submit(self, NOTIFY, None, 0, cell, number)
        else:
            zbmd_notify_max(self.peer, self.our_slot, cell, number, &self.hints[cell])

    def perform(self, int kind, object buffer, object offset, uint32_t channel, uint64_t value):
        if kind == NOTIFY:
            self.usable(True)
            zbmd_notify_max(self.peer, self.our_slot, channel, value, &self.hints[channel])
        else:
            self.move(kind, buffer, offset, channel, value, True)

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


cdef class SmallMessages:
    """The messages of one chunk of a staged pipe, as long as the next one need not wait for its slot.

    Each goes by one call that keeps the GIL, so that two threads' messages cannot mix.
    """

    cdef public uint64_t _sent, _received
    cdef public int _sends, _receives  # threads with a longer message, or that wait for one
    cdef Cells own
    cdef ShmRegion theirs
    cdef char *ring
    cdef uint32_t channel, chunks
    cdef size_t stride, head, most

    def __cinit__(self, *arguments, **options):
        self._sent = self._received = 0
        self._sends = self._receives = 0
        self.theirs = None

    def _open(self, Cells own not None, ShmRegion theirs not None, unsigned char[::1] ring not None, uint32_t channel,
              uint32_t chunks, size_t head, size_t most):
        if ring.shape[0] % chunks or head < sizeof(uint64_t) or <size_t>ring.shape[0] != theirs.nbytes:
            raise LocalProtocolError("a ring has slots of one size, and both sides' rings have one size")
        self.stride, self.head, self.most = ring.shape[0] // chunks, head, most
        if head + most > self.stride or channel + 1 >= <uint32_t>ZBMD_CHANNELS or not theirs.writable:
            raise LocalProtocolError("small messages need a slot each, and a ring that can be written to")
        self.own, self.ring, self.channel, self.chunks = own, <char *>&ring[0], channel, chunks
        self.theirs = theirs

    cdef inline bint has_come(self, uint32_t channel, uint64_t value) noexcept:
        return zbmd_load64(self.own.base, zbmd_cell_offset(self.theirs.slot, channel)) >= value

    cdef bint sent(self, object src) except -1:
        """Whether it was sent: if it is small, and the next slot is free."""
        cdef ShmRegion to = self.theirs
        cdef uint64_t number = self._sent
        cdef Py_buffer view
        cdef char *at
        if to is None or self._sends or self.own.base == NULL or to.queue.deferred:
            return False
        if number >= self.chunks and not self.has_come(self.channel + 1, number - self.chunks + 1):
            return False
        to.usable(False)
        _buffer(src, &view, PyBUF_SIMPLE)
        if <size_t>view.len > self.most:
            PyBuffer_Release(&view)
            return False
        at = to.start + number % self.chunks * self.stride
        (<uint64_t *>at)[0] = view.len
        memcpy(at + self.head, view.buf, view.len)
        PyBuffer_Release(&view)
        zbmd_notify_max(to.peer, to.our_slot, self.channel, number + 1, &to.hints[self.channel])
        self._sent = number + 1
        return True

    cdef bint received(self, object into) except -1:
        """Whether it was received: if it is small, has come by now, and has the size of `into`."""
        cdef ShmRegion to = self.theirs
        cdef uint64_t number = self._received
        cdef Py_buffer view
        cdef char *at
        cdef bint fits
        if to is None or self._receives or self.own.base == NULL or to.queue.deferred:
            return False
        if not self.has_come(self.channel, number + 1):
            self._receives += 1
            self.own.look(to.slot, self.channel, number + 1)
            self._receives -= 1
            if self._receives or number != self._received:
                return False  # another thread came meanwhile
            if self.own.base == NULL or not self.has_come(self.channel, number + 1):
                return False
        to.usable(False)
        _buffer(into, &view, PyBUF_WRITABLE)
        at = self.ring + number % self.chunks * self.stride
        fits = <size_t>view.len <= self.most and (<uint64_t *>at)[0] == <uint64_t>view.len
        if fits:
            memcpy(view.buf, at + self.head, view.len)
            zbmd_notify_max(to.peer, to.our_slot, self.channel + 1, number + 1, &to.hints[self.channel + 1])
            self._received = number + 1
        PyBuffer_Release(&view)
        return fits

    def send(self, object src, *, uint64_t deadline_ns=0):
        if not self.sent(src):
            self._send(src, deadline_ns)

    def receive(self, object into, *, uint64_t deadline_ns=0):
        if not self.received(into):
            self._receive(into, deadline_ns)


def copy(object into, object src, uint64_t whole_bytes):
    cdef Py_buffer target, source
    _buffers(into, &target, src, &source)
    with nogil:
        zbmd_copy(<char *>target.buf, <const char *>source.buf, source.len, whole_bytes, NULL, 0)
    PyBuffer_Release(&source)
    PyBuffer_Release(&target)


def streamed(const unsigned char[::1] source not None):
    cdef bytes made = PyBytes_FromStringAndSize(NULL, source.shape[0])
    if source.shape[0]:
        zbmd_stream(PyBytes_AS_STRING(made), <const char *>&source[0], source.shape[0])
    return made


def stream(object into, object src):
    cdef Py_buffer target, source
    _buffers(into, &target, src, &source)
    zbmd_stream(<char *>target.buf, <const char *>source.buf, source.len)
    PyBuffer_Release(&source)
    PyBuffer_Release(&target)


cdef int _buffers(object into, Py_buffer *target, object src, Py_buffer *source) except -1:
    """Both, of one size; they are the caller's to release, unless it raises."""
    _buffer(into, target, PyBUF_WRITABLE)
    try:
        _buffer(src, source, PyBUF_SIMPLE)
    except BaseException:
        PyBuffer_Release(target)
        raise
    if target.len != source.len:
        into_bytes, src_bytes = target.len, source.len
        PyBuffer_Release(source)
        PyBuffer_Release(target)
        raise LocalProtocolError(f"a copy of {src_bytes} bytes into {into_bytes}")
    return 0


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
