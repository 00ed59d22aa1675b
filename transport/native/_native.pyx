# cython: language_level=3, embedsignature=False, boundscheck=True
"""The compiled part of transport: mappings, notify cells, byte rings, life and watch threads.

The C lives in segment.h (segment layout, notify and wait), ring.h and life.h; this file only gives it types.
Functions that take a `base` trust it to be the address of a live mapping of a segment.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.errno cimport errno
from libc.stdlib cimport calloc, free
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_AS_STRING
from cpython.ref cimport Py_INCREF, Py_DECREF

import os

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

from zbmd.transport.native._slots cimport (
    ZBMD_MAX_SLOTS, ZBMD_OFF_LOST, lost_mask_of, slots_of, zbmd_load64, zbmd_slots,
)

cdef extern from "sys/mman.h" nogil:
    int mprotect(void *address, size_t length, int protection)
    int madvise(void *address, size_t length, int advice)
    int PROT_READ, PROT_WRITE
    void *MAP_FAILED

cdef extern from "transport/native/segment.h" nogil:
    enum:
        ZBMD_CHANNELS
        ZBMD_FAR_CHANNELS
        ZBMD_LINE
        ZBMD_OFF_MAGIC
        ZBMD_OFF_TOTAL
        ZBMD_OFF_INBOX
        ZBMD_OFF_ARENA
        ZBMD_OFF_PID
        ZBMD_OFF_INCARNATION
        ZBMD_OFF_GOODBYE
        ZBMD_OFF_SLOT
        ZBMD_OFF_PATIENT
        ZBMD_OFF_MUTEX
        ZBMD_OFF_NOTIFY
        ZBMD_OFF_DESCRIPTORS
        ZBMD_OFF_END
        ZBMD_WAIT_OK
        ZBMD_WAIT_LOST
        ZBMD_WAIT_ABORTED
        ZBMD_WAIT_DEADLINE
    const unsigned long long ZBMD_MAGIC
    void zbmd_store64(zbmd_base base, uint64_t offset, uint64_t value)
    uint64_t zbmd_cell_offset(uint32_t slot, uint32_t channel)
    void zbmd_ring(zbmd_base base)
    void zbmd_notify(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint64_t value)
    int zbmd_wait(zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value,
                  const zbmd_slots *group, uint64_t deadline_ns, uint32_t spins)
    void zbmd_set_lost(zbmd_base own, uint32_t slot)
    void zbmd_clear_lost(zbmd_base own, uint32_t slot)
    void zbmd_abort_channel(zbmd_base own, uint32_t channel, uint32_t epoch)
    uint32_t zbmd_load32(zbmd_base base, uint64_t offset)
    void zbmd_store32(zbmd_base base, uint64_t offset, uint32_t value)

cdef extern from "transport/native/numa.h" nogil:
    enum:
        ZBMD_MADV_HUGEPAGE
        ZBMD_MADV_POPULATE_WRITE
        ZBMD_HUGE_BYTES
    void *zbmd_map(int fd, size_t nbytes)
    int zbmd_map_over(void *start, int fd, size_t nbytes)
    void zbmd_unmap(void *start, size_t nbytes)
    int zbmd_current_node()
    int zbmd_prefer_node(void *start, size_t nbytes, uint32_t node)

cdef extern from "unistd.h" nogil:
    int getpid()

cdef extern from "transport/native/ring.h" nogil:
    enum:
        ZBMD_RING_OFF_WRITER_PARKED
        ZBMD_RING_OFF_DATA
        ZBMD_RING_BLOCKS
        ZBMD_RING_MARK
    void zbmd_ring_copy_in(zbmd_ring_end *end, uint64_t at, const char *source, uint64_t n)
    void zbmd_ring_copy_out(zbmd_ring_end *end, uint64_t at, char *target, uint64_t n)
    int64_t zbmd_ring_free(zbmd_ring_end *writer)
    int64_t zbmd_ring_used(zbmd_ring_end *reader)
    void zbmd_pause()
    void zbmd_ring_publish_head(zbmd_ring_end *writer)
    void zbmd_ring_publish_tail(zbmd_ring_end *reader)
    bint zbmd_ring_park_reader(zbmd_ring_end *reader)
    bint zbmd_ring_park_writer(zbmd_ring_end *writer)
    void zbmd_ring_ask(zbmd_ring_end *end, uint64_t parked_offset)
    void zbmd_ring_wake(zbmd_ring_end *end, uint64_t parked_offset)
    bint zbmd_block_is_back(zbmd_ring_end *writer, uint32_t block)
    bint zbmd_block_is_unread(zbmd_ring_end *writer, uint32_t block)
    void zbmd_block_set(zbmd_base ring, uint32_t block, zbmd_block state)
    void zbmd_ring_reader_done(zbmd_ring_end *reader)

cdef extern from "transport/native/life.h" nogil:
    enum:
        ZBMD_WATCH_NOTICED
    struct zbmd_life:
        pass
    struct zbmd_watch:
        zbmd_base own
        zbmd_base peer
        uint32_t own_slot
        uint32_t peer_slot
        int event_fd
        uint32_t clean
        uint64_t at_ns
    int zbmd_life_start(zbmd_life *life, zbmd_base own, uint32_t slots)
    void zbmd_life_leave(zbmd_life *life)
    int zbmd_watch_start(zbmd_watch *watch)
    int zbmd_watch_stop(zbmd_watch *watch)
    bint zbmd_watch_noticed(zbmd_watch *watch)
    bint zbmd_life_held(zbmd_base peer, uint32_t our_slot)

MAX_SLOTS = ZBMD_MAX_SLOTS
CHANNELS = ZBMD_CHANNELS
FAR_CHANNELS = ZBMD_FAR_CHANNELS
LINE_BYTES = ZBMD_LINE
MAGIC = ZBMD_MAGIC
OFF_MAGIC = ZBMD_OFF_MAGIC
OFF_TOTAL = ZBMD_OFF_TOTAL
OFF_INBOX = ZBMD_OFF_INBOX
OFF_ARENA = ZBMD_OFF_ARENA
OFF_PID = ZBMD_OFF_PID
OFF_INCARNATION = ZBMD_OFF_INCARNATION
OFF_GOODBYE = ZBMD_OFF_GOODBYE
OFF_SLOT = ZBMD_OFF_SLOT
OFF_PATIENT = ZBMD_OFF_PATIENT
OFF_LOST = ZBMD_OFF_LOST
OFF_MUTEX = ZBMD_OFF_MUTEX
OFF_NOTIFY = ZBMD_OFF_NOTIFY
OFF_DESCRIPTORS = ZBMD_OFF_DESCRIPTORS
OFF_END = ZBMD_OFF_END
WAIT_OK = ZBMD_WAIT_OK
WAIT_LOST = ZBMD_WAIT_LOST
WAIT_ABORTED = ZBMD_WAIT_ABORTED
WAIT_DEADLINE = ZBMD_WAIT_DEADLINE
RING_HEADER_BYTES = ZBMD_RING_OFF_DATA
RING_BLOCKS = ZBMD_RING_BLOCKS
MADV_HUGEPAGE = ZBMD_MADV_HUGEPAGE
MADV_POPULATE_WRITE = ZBMD_MADV_POPULATE_WRITE
HUGE_BYTES = ZBMD_HUGE_BYTES


cdef class _View:
    """Exports one range of a mapping and keeps the mapping alive."""

    cdef Mapping mapping
    cdef char *start
    cdef Py_ssize_t nbytes
    cdef bint writable

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.start, self.nbytes, not self.writable, flags)

    def __releasebuffer__(self, Py_buffer *buffer):
        pass


cdef class Mapping:
    def __cinit__(self, int fd, size_t nbytes, size_t writable_bytes, int tail_fd=-1, size_t tail=0):
        cdef void *start
        self.start = NULL
        if nbytes == 0 or writable_bytes > nbytes:
            raise LocalProtocolError(f"cannot map {nbytes} bytes, {writable_bytes} of them writable")
        start = zbmd_map(fd, nbytes)
        if start == MAP_FAILED:
            raise OSError(errno, f"cannot map {nbytes} bytes of shared memory: {os.strerror(errno)}")
        self.start = <char *>start
        self.nbytes = nbytes
        if tail_fd >= 0:
            if tail >= nbytes:
                raise LocalProtocolError(f"a second file begins at {tail} of {nbytes} bytes")
            if zbmd_map_over(self.start + tail, tail_fd, nbytes - tail) != 0:
                raise OSError(errno, f"cannot map {nbytes - tail} bytes of shared memory: {os.strerror(errno)}")
        if writable_bytes and mprotect(start, writable_bytes, PROT_READ | PROT_WRITE) != 0:
            raise OSError(errno, f"cannot map shared memory for writing: {os.strerror(errno)}")
        self.writable_bytes = writable_bytes

    def __dealloc__(self):
        if self.start != NULL:
            zbmd_unmap(self.start, self.nbytes)

    def madvise(self, int advice, size_t offset=0, object nbytes=None):
        cdef size_t length = self.nbytes - offset if nbytes is None else nbytes
        cdef int failed
        if offset > self.nbytes or length > self.nbytes - offset:
            raise LocalProtocolError(f"range {offset}+{length} is outside a mapping of {self.nbytes} bytes")
        with nogil:
            failed = madvise(self.start + offset, length, advice)
        if failed:
            raise OSError(errno, os.strerror(errno))

    def prefer_node(self, uint32_t node):
        if zbmd_prefer_node(self.start, self.nbytes, node) != 0:
            raise OSError(errno, os.strerror(errno))

    @property
    def address(self):
        return <size_t>self.start

    def view(self, size_t offset, size_t nbytes, *, bint writable=False):
        cdef _View view
        if offset > self.nbytes or nbytes > self.nbytes - offset:
            raise LocalProtocolError(f"range {offset}+{nbytes} is outside a mapping of {self.nbytes} bytes")
        if writable and offset + nbytes > self.writable_bytes:
            raise LocalProtocolError(f"range {offset}+{nbytes} is mapped read-only")
        view = _View.__new__(_View)
        view.mapping = self
        view.start = self.start + offset
        view.nbytes = nbytes
        view.writable = writable
        return memoryview(view)

    cdef zbmd_base word(self, size_t offset) except NULL:
        if offset % 8 or offset > self.nbytes or 8 > self.nbytes - offset:
            raise LocalProtocolError(f"word at {offset} is outside a mapping")
        return self.start + offset

    cdef zbmd_base at(self, size_t offset, size_t nbytes) except NULL:
        if offset % 8 or offset > self.writable_bytes or nbytes > self.writable_bytes - offset:
            raise LocalProtocolError(f"word at {offset} is outside the writable part of a mapping")
        return self.start + offset

    def load64(self, size_t offset):
        return zbmd_load64(self.word(offset), 0)

    def store64(self, size_t offset, uint64_t value):
        zbmd_store64(self.at(offset, 8), 0, value)

    def load32(self, size_t offset):
        return zbmd_load32(self.word(offset & ~<size_t>4), offset & 4)

    def store32(self, size_t offset, uint32_t value):
        zbmd_store32(self.at(offset & ~<size_t>4, 8), offset & 4, value)


def now_ns():
    return zbmd_now_ns()


def current_node():
    return zbmd_current_node()


def address_of(object buffer):
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_ANY_CONTIGUOUS)
    address = <size_t>view.buf
    PyBuffer_Release(&view)
    return address


cdef int _check_cell(uint32_t slot, uint32_t channel) except -1:
    if slot >= ZBMD_MAX_SLOTS:
        raise LocalProtocolError(f"slot {slot} is not below {ZBMD_MAX_SLOTS}")
    if channel >= ZBMD_CHANNELS:
        raise LocalProtocolError(f"channel {channel} is not below {ZBMD_CHANNELS}")
    return 0


def load_cell(size_t own_base, uint32_t slot, uint32_t channel):
    _check_cell(slot, channel)
    return zbmd_load64(<zbmd_base>own_base, zbmd_cell_offset(slot, channel))


def notify(size_t peer_base, uint32_t our_slot, uint32_t channel, uint64_t value):
    _check_cell(our_slot, channel)
    zbmd_notify(<zbmd_base>peer_base, our_slot, channel, value)


def wait(size_t own_base, uint32_t slot, uint32_t channel, uint64_t value, *,
         object group_mask=0, uint64_t deadline_ns=0, uint32_t spins=0):
    cdef zbmd_slots group
    cdef int result
    _check_cell(slot, channel)
    slots_of(group_mask, &group)
    with nogil:
        result = zbmd_wait(<zbmd_base>own_base, slot, channel, value, &group, deadline_ns, spins)
    return result


def ring(size_t own_base):
    zbmd_ring(<zbmd_base>own_base)


def lost_mask(size_t own_base):
    return lost_mask_of(<zbmd_base>own_base)


def set_lost(size_t own_base, uint32_t slot):
    _check_cell(slot, 0)
    zbmd_set_lost(<zbmd_base>own_base, slot)


def clear_lost(size_t own_base, uint32_t slot):
    _check_cell(slot, 0)
    zbmd_clear_lost(<zbmd_base>own_base, slot)


def abort_channel(size_t own_base, uint32_t channel, uint32_t epoch):
    _check_cell(0, channel)
    zbmd_abort_channel(<zbmd_base>own_base, channel, epoch)


cdef zbmd_ring_end _ring_end(Mapping mapping, size_t offset, size_t capacity, int peer_event_fd) except *:
    cdef zbmd_ring_end end
    if capacity == 0 or capacity & (capacity - 1) or offset % 64:
        raise LocalProtocolError(f"a ring of {capacity} bytes at {offset}: not a power of two, or unaligned")
    end.ring = mapping.at(offset, ZBMD_RING_OFF_DATA + capacity)
    end.capacity = capacity
    end.position = 0
    end.peer_event_fd = peer_event_fd
    return end


cdef class _Taken(_View)


cdef class RingWriter:
    def __cinit__(self, Mapping mapping, size_t offset, size_t capacity, int peer_event_fd):
        self.end = _ring_end(mapping, offset, capacity, peer_event_fd)
        self.mapping = mapping

    def write(self, const unsigned char[::1] head, const unsigned char[::1] body, size_t done,
              bint marked=False):
        """Write as much as fits of the frame length + head + body from its byte `done`; return the new
        `done`. The frame is complete when that is 4 + len(head) + len(body)."""
        cdef uint64_t head_bytes = head.shape[0]
        cdef uint64_t body_bytes = body.shape[0]
        cdef uint32_t length = <uint32_t>(head_bytes + body_bytes)
        cdef int64_t room = zbmd_ring_free(&self.end)
        if room < 0:
            raise RemoteProtocolError("ring: the reader's position is past everything written")
        if room == 0:
            return done
        if marked:
            length |= <uint32_t>ZBMD_RING_MARK
        done = self._part(<const char *>&length, 4, 0, done, &room)
        if head_bytes:
            done = self._part(<const char *>&head[0], head_bytes, 4, done, &room)
        if body_bytes:
            done = self._part(<const char *>&body[0], body_bytes, 4 + head_bytes, done, &room)
        zbmd_ring_publish_head(&self.end)
        return done

    cdef bint put(self, const char *head, uint64_t head_bytes, const char *body, uint64_t body_bytes) except -1:
        """All of a frame, or nothing of it and False if there is no room now."""
        cdef uint32_t length = <uint32_t>(head_bytes + body_bytes)
        cdef int64_t room = zbmd_ring_free(&self.end)
        if room < 0:
            raise RemoteProtocolError("ring: the reader's position is past everything written")
        if <uint64_t>room < 4 + head_bytes + body_bytes:
            return False
        zbmd_ring_copy_in(&self.end, self.end.position, <const char *>&length, 4)
        zbmd_ring_copy_in(&self.end, self.end.position + 4, head, head_bytes)
        zbmd_ring_copy_in(&self.end, self.end.position + 4 + head_bytes, body, body_bytes)
        self.end.position += 4 + head_bytes + body_bytes
        zbmd_ring_publish_head(&self.end)
        return True

    cdef uint64_t _part(self, const char *source, uint64_t nbytes, uint64_t begins, uint64_t done,
                        int64_t *room) noexcept:
        cdef uint64_t skip, n
        if done < begins or done >= begins + nbytes:
            return done
        skip = done - begins
        n = min(nbytes - skip, <uint64_t>room[0])
        zbmd_ring_copy_in(&self.end, self.end.position, source + skip, n)
        self.end.position += n
        room[0] -= <int64_t>n
        return done + n

    def park(self):
        """Ask to be woken once half of the ring is free; false if it is already."""
        return zbmd_ring_park_writer(&self.end)

    def lend(self, uint32_t block):
        _check_block(block)
        zbmd_block_set(self.end.ring, block, ZBMD_BLOCK_LENT)

    def is_back(self, uint32_t block):
        _check_block(block)
        return zbmd_block_is_back(&self.end, block)

    def is_unread(self, uint32_t block):
        _check_block(block)
        return zbmd_block_is_unread(&self.end, block)

    def park_for_block(self):
        """Ask to be woken when a block is taken or brought back; the caller looks again after this."""
        zbmd_ring_ask(&self.end, ZBMD_RING_OFF_WRITER_PARKED)


cdef int _check_block(uint32_t block) except -1:
    if block >= ZBMD_RING_BLOCKS:
        raise LocalProtocolError(f"block {block} is not below {ZBMD_RING_BLOCKS}")
    return 0


cdef class RingReader:
    def __cinit__(self, Mapping mapping, size_t offset, size_t capacity, int peer_event_fd,
                  uint32_t frame_bytes_max):
        self.end = _ring_end(mapping, offset, capacity, peer_event_fd)
        self.mapping = mapping
        self.frame_bytes_max = frame_bytes_max
        self.frame = None
        self.have = 0

    def read(self):
        return self.next()

    cdef bytes next(self):
        """The next whole frame, or None if it has not arrived. Keeps what has arrived of it."""
        cdef int64_t used = zbmd_ring_used(&self.end)
        cdef uint32_t length
        cdef uint64_t n
        if used < 0:
            raise RemoteProtocolError("ring: the writer's position is past the ring's end")
        if self.frame is None:
            if used < 4:
                return None
            zbmd_ring_copy_out(&self.end, self.end.position, <char *>&length, 4)
            self.marked = length & <uint32_t>ZBMD_RING_MARK != 0
            length &= ~<uint32_t>ZBMD_RING_MARK
            if length > self.frame_bytes_max:
                raise RemoteProtocolError(
                    f"ring: a frame of {length} bytes, over the bound of {self.frame_bytes_max}")
            self.frame = PyBytes_FromStringAndSize(NULL, length)
            self.length = length
            self.have = 0
            self.end.position += 4
            used -= 4
        n = min(<uint64_t>used, self.length - self.have)
        if n:
            zbmd_ring_copy_out(&self.end, self.end.position,
                               PyBytes_AS_STRING(self.frame) + self.have, n)
            self.have += n
            self.end.position += n
        zbmd_ring_publish_tail(&self.end)
        if self.have < self.length:
            return None
        frame = <bytes>self.frame
        self.frame = None
        return frame

    @property
    def partial(self):
        return self.frame is not None or zbmd_ring_used(&self.end) != 0

    def ready(self, uint64_t look_ns=0):
        return self.comes(look_ns)

    cdef bint comes(self, uint64_t look_ns) except -1:
        """Whether bytes have come, or come within that time, or the writer's position is impossible."""
        cdef uint64_t end_ns
        if zbmd_ring_used(&self.end) != 0 or look_ns == 0:
            return zbmd_ring_used(&self.end) != 0
        with nogil:
            end_ns = zbmd_now_ns() + look_ns
            while zbmd_ring_used(&self.end) == 0 and zbmd_now_ns() < end_ns:
                zbmd_pause()
        return zbmd_ring_used(&self.end) != 0

    def park(self):
        return self.parks()

    cdef bint parks(self) noexcept:
        """Ask to be woken at the next write; false if there is something to read already."""
        return zbmd_ring_park_reader(&self.end)

    def take(self, uint32_t block, Mapping memory not None, size_t offset, size_t nbytes):
        cdef _Taken taken
        _check_block(block)
        if offset > memory.nbytes or nbytes > memory.nbytes - offset:
            raise LocalProtocolError(f"block {offset}+{nbytes} is outside a mapping of {memory.nbytes} bytes")
        taken = _Taken.__new__(_Taken)
        taken.mapping = memory
        taken.start = memory.start + offset
        taken.nbytes = nbytes
        taken.writable = False
        taken.reader = self
        taken.block = block
        taken.pid = getpid()
        self.set_block(block, ZBMD_BLOCK_TAKEN)
        return memoryview(taken)

    cdef void set_block(self, uint32_t block, zbmd_block state) noexcept:
        zbmd_block_set(self.end.ring, block, state)
        if not self.ended:
            zbmd_ring_wake(&self.end, ZBMD_RING_OFF_WRITER_PARKED)

    def done(self):
        self.ended = True
        zbmd_ring_reader_done(&self.end)


@cython.no_gc_clear  # __dealloc__ needs the reader
cdef class _Taken(_View):
    """Exports a block that the ring's writer has lent; brought back when the last view of it is gone."""

    cdef RingReader reader
    cdef uint32_t block
    cdef int pid

    def __dealloc__(self):
        if self.reader is not None and getpid() == self.pid:  # a forked child's copy is not what was lent
            self.reader.set_block(self.block, ZBMD_BLOCK_FREE)


cdef class LifeThread:
    cdef Mapping mapping
    cdef zbmd_life *life

    def __cinit__(self, Mapping mapping, uint32_t slots=ZBMD_MAX_SLOTS - 1):
        cdef zbmd_base own = mapping.at(0, ZBMD_OFF_END)
        cdef int error
        if slots >= ZBMD_MAX_SLOTS:
            raise LocalProtocolError(f"{slots} slots and the node's are more than {ZBMD_MAX_SLOTS}")
        self.life = <zbmd_life *>calloc(1, sizeof(zbmd_life))
        if self.life == NULL:
            raise MemoryError
        with nogil:
            error = zbmd_life_start(self.life, own, slots)
        if error:
            free(self.life)
            self.life = NULL
            raise OSError(error, f"cannot start the life thread: {os.strerror(error)}")
        self.mapping = mapping
        # The kernel walks this memory when the process ends, so it must outlive every reference to it.
        Py_INCREF(self)

    def leave(self):
        if self.life == NULL:
            return
        with nogil:
            zbmd_life_leave(self.life)
        free(self.life)
        self.life = NULL
        Py_DECREF(self)


cdef class Watch:
    cdef Mapping own
    cdef Mapping peer
    cdef zbmd_watch *watch

    def __cinit__(self, Mapping own, uint32_t own_slot, Mapping peer, uint32_t peer_slot, int event_fd):
        cdef int error
        _check_cell(own_slot, 0)
        _check_cell(peer_slot, 0)
        if not zbmd_life_held(peer.at(0, ZBMD_OFF_END), own_slot):
            raise RemoteProtocolError(f"the process in slot {peer_slot} has not started its life thread")
        self.watch = <zbmd_watch *>calloc(1, sizeof(zbmd_watch))
        if self.watch == NULL:
            raise MemoryError
        self.own = own
        self.peer = peer
        self.watch.own = own.at(0, ZBMD_OFF_END)
        self.watch.peer = peer.at(0, ZBMD_OFF_END)
        self.watch.own_slot = own_slot
        self.watch.peer_slot = peer_slot
        self.watch.event_fd = event_fd
        error = zbmd_watch_start(self.watch)
        if error:
            free(self.watch)
            self.watch = NULL
            raise OSError(error, f"cannot start a watcher thread: {os.strerror(error)}")
        # The thread uses both mappings until stop() has joined it.
        Py_INCREF(self)

    def notice(self):
        """(monotonic ns of the notice, whether the peer left cleanly), or None so far."""
        if self.watch == NULL or not zbmd_watch_noticed(self.watch):
            return None
        return self.watch.at_ns, self.watch.clean != 0

    def stop(self):
        cdef int error
        if self.watch == NULL:
            return
        with nogil:
            error = zbmd_watch_stop(self.watch)
        if error:
            raise OSError(error, "a watcher thread did not end; its memory is kept")
        free(self.watch)
        self.watch = NULL
        Py_DECREF(self)
