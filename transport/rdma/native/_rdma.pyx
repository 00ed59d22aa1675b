# cython: language_level=3, embedsignature=False
"""Puts and gets over RDMA without the GIL: gives types to rdma.h, by libibverbs. See _rdma.pyi."""

from libc.errno cimport errno
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer

import os
from collections import deque

import numpy as np

from zbmd.transport.rdma.native._rdma_device cimport Device, Path, Registration, ibv_context, ibv_pd, zbmd_rdma_path
from zbmd.transport.native._slots cimport ZBMD_MAX_SLOTS, slots_of, zbmd_base, zbmd_slots
from zbmd.transport.errors import LinkFull, LocalProtocolError, UserError
from zbmd.transport.rdma.transfer import RdmaTransfer
from zbmd.transport.memory.transfer import DONE

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)

cdef extern from "transport/rdma/native/rdma_wait.h" nogil:
    enum:
        IBV_WC_REM_ACCESS_ERR
    struct ibv_qp:
        uint32_t qp_num
    enum:
        ZBMD_CHANNELS
        ZBMD_RDMA_ENDS
        ZBMD_RDMA_SENDS
        ZBMD_RDMA_CREDITS
        ZBMD_RDMA_INLINE_BYTES
        ZBMD_RDMA_SOME
        ZBMD_RDMA_ATTENTION
        ZBMD_RDMA_LATER
        ZBMD_RDMA_OPEN
        ZBMD_RDMA_FAILED
        ZBMD_RDMA_PUT
        ZBMD_RDMA_GET
        ZBMD_RDMA_NOTE
        ZBMD_RDMA_SETTLE
        ZBMD_RDMA_GOODBYE_NOTE
        ZBMD_RDMA_MALFORMED
    uint64_t ZBMD_RDMA_NOBODY
    struct zbmd_rdma_plane:
        ibv_context *context
        ibv_pd *domain
        pthread_mutex_t lock
        uint32_t ends_max
        int wake_fd
        int drivers
        int stopping
    struct zbmd_rdma_end:
        ibv_qp *qp
        zbmd_base own
        uint32_t slot
        uint64_t message_bytes_max
        uint64_t posted
        uint64_t acked
        uint64_t awaited
        bint room_wanted
        int state
        int status
        bint goodbye
    struct zbmd_rdma_op:
        uint64_t local
        uint64_t remote
        uint64_t nbytes
        uint64_t done
        uint64_t value
        uint32_t lkey
        uint32_t rkey
        uint32_t channel
        int kind
        int quiet
        uint64_t number
    int zbmd_rdma_begin(zbmd_rdma_plane *plane, uint32_t ends_max)
    void zbmd_rdma_finish(zbmd_rdma_plane *plane)
    int zbmd_rdma_poll(zbmd_rdma_plane *plane)
    void zbmd_rdma_doze(zbmd_rdma_plane *plane, int timeout_ms)
    void zbmd_rdma_wake(zbmd_rdma_plane *plane)
    int zbmd_rdma_run(zbmd_rdma_plane *plane, uint64_t spin_ns, uint64_t until_ns)
    void zbmd_rdma_stop(zbmd_rdma_plane *plane)
    void zbmd_rdma_enter(zbmd_rdma_plane *plane)
    void zbmd_rdma_leave(zbmd_rdma_plane *plane, int wanted)
    void zbmd_rdma_ask(zbmd_rdma_end *end)
    void zbmd_rdma_ask_no_more(zbmd_rdma_end *end)
    uint64_t zbmd_rdma_spin_ns()
    int zbmd_rdma_wait_acked(zbmd_rdma_end *end, uint64_t number, uint64_t deadline_ns, uint64_t spin_ns)
    int zbmd_rdma_ping(zbmd_rdma_end *end, const zbmd_rdma_op *what, int first, uint32_t rounds,
                       uint64_t deadline_ns, uint64_t spin_ns, uint64_t *samples_ns)
    int zbmd_rdma_wait(zbmd_rdma_plane *plane, zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value,
                       const zbmd_slots *group, uint64_t deadline_ns, uint64_t spin_ns)
    int zbmd_rdma_end_open(zbmd_rdma_plane *plane, zbmd_rdma_end *end)
    int zbmd_rdma_end_connect(zbmd_rdma_end *end, const zbmd_rdma_path *path)
    void zbmd_rdma_end_close(zbmd_rdma_end *end)
    int zbmd_rdma_post(zbmd_rdma_end *end, zbmd_rdma_op *op)
    bint zbmd_rdma_may_post(zbmd_rdma_end *end)

cdef enum:
    RANGES_MAX = 4

INLINE_BYTES = ZBMD_RDMA_INLINE_BYTES
ENDS_MAX = ZBMD_RDMA_ENDS
SENDS_MAX = ZBMD_RDMA_SENDS
CREDITS = ZBMD_RDMA_CREDITS
SOME = ZBMD_RDMA_SOME
ATTENTION = ZBMD_RDMA_ATTENTION | ZBMD_RDMA_LATER
NEVER_NS = ZBMD_RDMA_NOBODY
PUT = ZBMD_RDMA_PUT
GET = ZBMD_RDMA_GET
MALFORMED = ZBMD_RDMA_MALFORMED
ACCESS_REFUSED = IBV_WC_REM_ACCESS_ERR


cdef class Plane:
    """A completion queue for all peers of one device, and the memory that is registered for good."""

    cdef Device device
    cdef zbmd_rdma_plane plane
    cdef bint closed
    cdef uint64_t starts[RANGES_MAX]
    cdef uint64_t ends[RANGES_MAX]
    cdef uint32_t keys[RANGES_MAX]
    cdef int ranges
    cdef list kept
    cdef readonly uint64_t spin_ns

    def __cinit__(self, Device device, uint32_t ends_max=ZBMD_RDMA_ENDS):
        if not 0 < ends_max <= ZBMD_RDMA_ENDS:
            raise LocalProtocolError(f"a plane of {ends_max} queue pairs: 1 to {ZBMD_RDMA_ENDS} are possible")
        memset(&self.plane, 0, sizeof(self.plane))
        self.device = device
        self.kept = []
        self.plane.context = device.context
        self.plane.domain = device.domain
        if zbmd_rdma_begin(&self.plane, ends_max):
            raise UserError(f"the RDMA device {device.name} gives no completion queue: {os.strerror(errno)}.")
        with nogil:
            self.spin_ns = zbmd_rdma_spin_ns()

    def __dealloc__(self):
        if not self.closed:
            zbmd_rdma_finish(&self.plane)

    def keep(self, Registration registration):
        """Use this registration for what lies in it."""
        if self.ranges >= RANGES_MAX:
            raise LocalProtocolError(f"{RANGES_MAX} registrations are kept already")
        self.starts[self.ranges] = registration.address
        self.ends[self.ranges] = registration.address + registration.nbytes
        self.keys[self.ranges] = registration.region.lkey
        self.kept.append(registration)
        self.ranges += 1

    cdef bint find(self, uint64_t address, uint64_t nbytes, uint32_t *key) noexcept:
        cdef int index
        for index in range(self.ranges):
            if self.starts[index] <= address and address + nbytes <= self.ends[index]:
                key[0] = self.keys[index]
                return True
        return False

    def run(self, uint64_t spin_ns, uint64_t until_ns):
        cdef int found
        with nogil:
            found = zbmd_rdma_run(&self.plane, spin_ns, until_ns)
        return found != 0

    def poll(self):
        cdef int found
        with nogil:
            found = zbmd_rdma_poll(&self.plane)
        return found

    def doze(self, int timeout_ms):
        with nogil:
            zbmd_rdma_doze(&self.plane, timeout_ms)

    def wake(self):
        zbmd_rdma_wake(&self.plane)

    def stop(self):
        zbmd_rdma_stop(&self.plane)

    def enter(self):
        zbmd_rdma_enter(&self.plane)

    def leave(self):
        zbmd_rdma_leave(&self.plane, False)

    def wait(self, object mapping, uint32_t slot, uint32_t channel, uint64_t value, *, object group_mask=0,
             uint64_t deadline_ns=0):
        cdef zbmd_base own = <zbmd_base><size_t>mapping.address
        cdef zbmd_slots group
        cdef int result
        if slot >= ZBMD_MAX_SLOTS or channel >= ZBMD_CHANNELS:
            raise LocalProtocolError(f"there is no cell of slot {slot} and channel {channel}")
        slots_of(group_mask, &group)
        with nogil:
            result = zbmd_rdma_wait(&self.plane, own, slot, channel, value, &group, deadline_ns,
                                    self.spin_ns)
        return result

    def close(self):
        if not self.closed:
            self.closed = True
            zbmd_rdma_finish(&self.plane)
            self.kept.clear()
            self.ranges = 0
            self.device = None


cdef class Op:
    """One that waits for room."""

    cdef zbmd_rdma_op op
    cdef object transfer
    cdef object kept


cdef class End:
    """A queue pair, and the transfers over it. mapping: of our segment, whose cells tell of the peer."""

    cdef Plane plane
    cdef object mapping
    cdef zbmd_rdma_end end
    cdef object queue
    cdef object waiting
    cdef int transfers_max
    cdef readonly object error
    cdef object lend
    cdef readonly uint64_t in_segment
    cdef readonly uint64_t reused
    cdef readonly uint64_t registered
    cdef readonly uint64_t inlined, copied

    def __cinit__(self, Plane plane, object mapping, uint32_t slot, uint32_t message_bytes_max,
                  int transfers_max, object lend):
        memset(&self.end, 0, sizeof(self.end))
        self.plane = plane
        self.mapping = mapping
        self.queue = deque()
        self.waiting = deque()
        self.transfers_max = transfers_max
        self.lend = lend
        self.end.own = <zbmd_base><size_t>mapping.address
        self.end.slot = slot
        self.end.message_bytes_max = message_bytes_max
        if plane.closed or slot >= ZBMD_MAX_SLOTS:
            raise LocalProtocolError(f"slot {slot} is not below {ZBMD_MAX_SLOTS}, or the plane is closed")
        if zbmd_rdma_end_open(&plane.plane, &self.end):
            why = os.strerror(errno)
            zbmd_rdma_end_close(&self.end)
            raise UserError(
                f"the RDMA device {plane.device.name} gives no queue pair: {why}. A plane has "
                f"{plane.plane.ends_max} at most.")

    def __dealloc__(self):
        if self.plane is not None:
            zbmd_rdma_end_close(&self.end)

    @property
    def number(self):
        return self.end.qp.qp_num

    @property
    def failed(self):
        return self.end.state == ZBMD_RDMA_FAILED

    @property
    def status(self):
        return self.end.status

    @property
    def goodbye(self):
        return bool(self.end.goodbye)

    def connect(self, Path path not None):
        cdef int error = zbmd_rdma_end_connect(&self.end, &path.path)
        if error:
            raise UserError(f"an RDMA device cannot connect its queue pair: {os.strerror(error)}.")

    def submit(self, int kind, object view, object owner, uint64_t remote, uint32_t key, uint32_t channel,
               uint64_t value):
        """Put or get the flat bytes `view` of `owner`. What can be checked has been."""
        cdef Op op = self.described(kind, view, owner, remote, key, channel, value)
        if self.waiting and self.waiting[0].number <= self.end.acked:
            self.settle()
        if not op.op.quiet:
            op.transfer = RdmaTransfer(self, *op.kept)
        # From here on nothing runs that could let another thread in between.
        self.require_open()
        if not self.queue and self.post(op):
            return DONE if op.op.quiet else self.await_it(op)
        if op.op.quiet:  # the caller may have its buffer back at once
            data = bytes(view)
            self.copied += op.op.nbytes != 0
            op.op.local = <size_t><const char *>data
            op.transfer = RdmaTransfer(self, data)
        self.queue.append(op)
        self.look()
        return DONE if op.op.quiet else op.transfer

    cdef Op described(self, int kind, object view, object owner, uint64_t remote, uint32_t key, uint32_t channel,
                      uint64_t value):
        cdef Op op = Op.__new__(Op)
        cdef Py_buffer buffer
        cdef Registration registration
        PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE)
        op.op.local = <size_t>buffer.buf
        op.op.nbytes = buffer.len
        PyBuffer_Release(&buffer)  # `view` itself keeps the memory in its place
        op.op.kind, op.op.remote, op.op.rkey = kind, remote, key
        op.op.channel, op.op.value = channel, value
        op.op.quiet = not op.op.nbytes or (kind == ZBMD_RDMA_PUT and op.op.nbytes <= ZBMD_RDMA_INLINE_BYTES)
        op.kept = (owner, view)
        if op.op.quiet:
            self.inlined += op.op.nbytes != 0
            return op
        if self.plane.find(op.op.local, op.op.nbytes, &op.op.lkey):
            self.in_segment += 1
            return op
        registration, reused = self.lend(owner, op.op.local, op.op.nbytes)
        op.op.lkey = registration.region.lkey
        op.kept = (owner, view, registration)
        self.reused += reused
        self.registered += not reused
        return op

    def ping(self, object view, object owner, uint64_t remote, uint32_t key, uint32_t channel, uint64_t value, *,
             bint first, uint32_t rounds, uint64_t deadline_ns):
        """See `RdmaRegion.ping`."""
        cdef Op op = self.described(ZBMD_RDMA_PUT, view, owner, remote, key, channel, value)
        samples = np.zeros(max(1, rounds), np.uint64)
        cdef uint64_t[::1] places = samples
        cdef int ended
        self.require_open()
        if self.queue:
            raise LocalProtocolError("puts wait for room: await them first")
        op.op.quiet = True
        with nogil:
            ended = zbmd_rdma_ping(&self.end, &op.op, first, rounds, deadline_ns, self.plane.spin_ns, &places[0])
        return ended, samples[:rounds]

    def settled(self):
        """Done once all that was asked for before is."""
        cdef Op op = Op.__new__(Op)
        op.op.kind = ZBMD_RDMA_SETTLE
        op.transfer = RdmaTransfer(self)
        self.require_open()
        if not self.queue and self.post(op):
            return self.await_it(op)
        self.queue.append(op)
        self.look()
        return op.transfer

    def say_goodbye(self):
        """Behind everything that was asked for."""
        cdef Op op = Op.__new__(Op)
        op.op.kind = ZBMD_RDMA_NOTE
        op.op.channel = ZBMD_RDMA_GOODBYE_NOTE
        op.transfer = RdmaTransfer(self)
        self.queue.append(op)
        self.settle()
        return op.transfer

    cdef require_open(self):
        if self.error is not None:
            raise self.error.with_traceback(None)
        if len(self.waiting) + len(self.queue) >= self.transfers_max:
            raise LinkFull(f"{self.transfers_max} transfers with one peer are under way: wait for some")

    cdef bint post(self, Op op) noexcept:
        cdef bint whole
        pthread_mutex_lock(&self.plane.plane.lock)
        whole = zbmd_rdma_post(&self.end, &op.op)
        pthread_mutex_unlock(&self.plane.plane.lock)
        return whole

    cdef object await_it(self, Op op):
        op.transfer.number = op.op.number
        self.waiting.append(op.transfer)
        self.look()
        return op.transfer

    def wait_for(self, uint64_t number, uint64_t deadline_ns):
        """Poll natively until so many work requests are done, but not for ever."""
        with nogil:
            zbmd_rdma_wait_acked(&self.end, number, deadline_ns, self.plane.spin_ns)
        self.settle()

    def ask(self):
        """Somebody waits for what is under way, and does not poll."""
        zbmd_rdma_ask(&self.end)
        self.look()

    cdef bint watch(self) noexcept:
        """Say what we want to know; whether it has come already."""
        cdef uint64_t awaited = ZBMD_RDMA_NOBODY
        cdef bint due
        if self.waiting:
            awaited = self.waiting[0].number
        pthread_mutex_lock(&self.plane.plane.lock)
        self.end.awaited = awaited
        self.end.room_wanted = len(self.queue) > 0
        due = self.end.acked >= awaited or (self.end.room_wanted and zbmd_rdma_may_post(&self.end))
        if not self.waiting and not self.queue:
            zbmd_rdma_ask_no_more(&self.end)
        pthread_mutex_unlock(&self.plane.plane.lock)
        return due

    cdef look(self):
        if self.watch():
            self.settle()

    def settle(self):
        """Finish what is done, and post what waits, as far as there is room. For any thread."""
        cdef Op op
        done = []
        while True:
            while self.waiting and self.waiting[0].number <= self.end.acked:
                done.append(self.waiting.popleft())
            while self.queue:
                op = self.queue[0]
                if not self.post(op):
                    break
                self.queue.popleft()
                if not op.op.quiet:  # else its bytes are in the work request
                    op.transfer.number = op.op.number
                    self.waiting.append(op.transfer)
            if not self.watch():
                break
        for transfer in done:
            transfer.finish()

    def refuse_new(self, object error):
        """Raise this from now on."""
        if self.error is None:
            self.error = error

    def close(self, object error):
        """End the queue pair; what was under way is finished with `error`."""
        self.refuse_new(error)
        with nogil:
            zbmd_rdma_end_close(&self.end)
        left = [transfer for transfer in self.waiting if transfer.number > self.end.acked]
        done = [transfer for transfer in self.waiting if transfer.number <= self.end.acked]
        left += [(<Op>op).transfer for op in self.queue]
        self.waiting.clear()
        self.queue.clear()
        for transfer in done:
            transfer.finish()
        for transfer in left:
            transfer.finish(error)
