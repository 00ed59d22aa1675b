# cython: boundscheck=False, wraparound=False
"""The run of a group with members on other hosts, one phase at a time. See _remote.pyi."""

from cpython.buffer cimport PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memmove

from zbmd.collectives._stepper cimport (
    HEADER_BYTES, NativeGroup, NativeProgram, Header, PUB, PUT, REDUCE, Run, S_ABORTED, S_DONE, extent, locate
)

cdef extern from "native.h" nogil:
    ctypedef char *zbmd_base
    uint64_t zbmd_load64(zbmd_base base, uint64_t off)
    uint64_t zbmd_abort_offset(uint32_t channel)

cdef extern from *:
    """
    #include <signal.h>
    static inline void zbmd_kill_self(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
    """
    void zbmd_kill_self() nogil


cdef class RemoteGroup(NativeGroup):
    """A group some of whose members are on other hosts: the same run, one phase at a time. See _stepper.pyi."""

    cdef Run current

    def begin(self, NativeProgram program not None, const uint64_t[::1] addresses not None, *,
              int operation, int dtype, int reduction, int root, uint64_t count, uint64_t total,
              uint32_t piece, uint64_t in_stride, uint64_t out_stride, uintptr_t scratch,
              uint64_t scratch_bytes):
        self._prepare(program, &self.current, addresses, operation, dtype, reduction, root, count, total,
                      piece, in_stride, out_stride, scratch, scratch_bytes)
        self._publish(program, &self.current)

    def own_extent(self, NativeProgram program not None, int buffer):
        return self.own.offsets[buffer], extent(program, &self.current, &self.own, buffer, self.total[self.rank])

    def extent(self, NativeProgram program not None, int rank, int buffer):
        cdef Header *h = &self.headers[rank]
        return h.offsets[buffer], extent(program, &self.current, h, buffer, self.total[rank])

    def descriptor(self, NativeProgram program not None):
        cdef char *mine = self._descriptor(self.rank)
        cdef uint64_t nbytes = HEADER_BYTES
        if program.eager and self.current.address[self.rank][PUB] != NULL:
            nbytes += self.current.count * self.current.item
        return mine[:nbytes]

    @property
    def descriptor_offset(self):
        return self._descriptor_offset()

    @property
    def word(self):
        return self._word()

    @property
    def lost_mask(self):
        return self.mask

    def tell(self, int peer):
        if not 0 <= peer < self.n or peer == self.rank:
            raise IndexError(peer)
        if self.base[peer] != NULL:
            self._signal(peer)
            return 0
        self.sent[peer] += 1
        return <uint64_t>self.epoch << 32 | self.sent[peer]

    def meet(self, NativeProgram program not None, uint64_t deadline_ns):
        cdef int status
        with nogil:
            status = self._await_all(deadline_ns)
            if status == S_DONE:
                status = self._agree(program, &self.current)
        return status

    def walk(self, NativeProgram program not None, int64_t kill_point, uint64_t deadline_ns):
        cdef int status
        with nogil:
            status = self._walk(program, &self.current, kill_point, deadline_ns)
        return status

    def wait(self, int peer, uint64_t count, uint64_t deadline_ns):
        cdef int status
        if not 0 <= peer < self.n or peer == self.rank:
            raise IndexError(peer)
        with nogil:
            status = self._await(peer, self.received[peer] + count, deadline_ns)
        return status

    def at(self, int64_t pc):
        self.pc = pc

    def place(self, NativeProgram program not None, int64_t index):
        cdef const int32_t *row
        cdef Run *run = &self.current
        cdef int block
        cdef uint64_t j, first, end
        if not 0 <= index < program.length:
            raise IndexError(index)
        row = &program.code[index, 0]
        block, j = row[1] // run.per_block, row[1] % run.per_block
        first = j * run.count // run.per_block
        end = (j + 1) * run.count // run.per_block
        return (
            <uintptr_t>locate(run, row[2] if row[0] == PUT else self.rank, row[4], row[5], block, first),
            <uintptr_t>locate(run, row[6], row[7], row[8], block, first),
            <uintptr_t>locate(run, row[9], row[10], row[11], block, first) if row[0] == REDUCE else 0,
            end - first,
        )

    def perform(self, const uint64_t[:, ::1] rows not None, int64_t length):
        cdef Run *run = &self.current
        cdef int64_t i
        cdef int status = S_DONE
        if rows.shape[1] != 4 or not 0 <= length <= rows.shape[0]:
            raise ValueError("rows of four columns are needed, and no more than there are")
        with nogil:
            for i in range(length):
                if zbmd_load64(self.base[self.rank], zbmd_abort_offset(self.channel)) >> 32 >= self.epoch:
                    status = S_ABORTED
                    break
                if rows[i, 2]:
                    run.kernel(<void *>rows[i, 0], <void *>rows[i, 1], <void *>rows[i, 2], rows[i, 3])
                else:
                    memmove(<void *>rows[i, 0], <void *>rows[i, 1], rows[i, 3] * run.item)
        return status

    def window(self, uintptr_t address, Py_ssize_t nbytes):
        return PyMemoryView_FromMemory(<char *>address, nbytes, PyBUF_WRITE)

    def finish(self, NativeProgram program not None):
        cdef int peer
        for peer in range(self.n):
            self.received[peer] += program.awaited[peer]
        return S_DONE if self._still_valid() else S_ABORTED

    def check(self):
        return S_DONE if self._still_valid() else S_ABORTED

    def withdraw(self):
        self._withdraw()

    def die(self):
        zbmd_kill_self()
