# cython: boundscheck=False, wraparound=False
"""The run of a group with members on other hosts, one phase at a time. See _remote_stepper.pyi."""

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from zbmd.transport.native._slots cimport zbmd_base, zbmd_load64, zbmd_slots
from zbmd.collectives.native._program cimport IN_STAGED, zbmd_run
from zbmd.collectives.native._stepper cimport (
    DESCRIPTOR_BYTES, HEADER_BYTES, LENGTH, OUT, PAYLOAD_BYTES, PUB, SCRATCH, S_ABORTED, S_DESYNCHRONISED, S_DONE, Header, NativeGroup, NativeProgram,
    extent, published, zbmd_apply, zbmd_move, zbmd_move_of, zbmd_place_of
)

cdef extern from "transport/native/segment.h" nogil:
    uint64_t zbmd_abort_offset(uint32_t channel)
    uint64_t zbmd_cell_offset(uint32_t slot, uint32_t channel)
    int zbmd_arrived(uint64_t cell, uint64_t value)
    int zbmd_lost_in(zbmd_base own, uint32_t channel, uint64_t last, const zbmd_slots *group)

cdef extern from *:
    """
    #include <signal.h>
    static inline void zbmd_kill_self(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
    """
    void zbmd_kill_self() nogil


cdef inline uint64_t published_at(const zbmd_run *run, int chunk, bint end) noexcept nogil:
    """The byte at which a chunk begins, or ends, in what its rank publishes."""
    cdef int block = chunk // run.per_block
    cdef uint64_t j = <uint64_t>(chunk % run.per_block) + end
    cdef uint64_t base = 0, length = run.count
    if run.layout != NULL:
        length = run.layout[LENGTH * run.blocks + block]
        base = run.layout[IN_STAGED * run.blocks + block]
    return (base + j * length // run.per_block) * run.item


cdef class RemoteGroup(NativeGroup):
    """A group some of whose members are on other hosts: the same run, one phase at a time. See _remote_stepper.pyi."""

    cdef object run                   # the native one points into its layout
    cdef char **narrow                # by rank: descriptors as they always are
    cdef char **slots                 # and of wide runs, two slots in turn
    cdef readonly object lost_mask
    cdef uint64_t slot_stride
    cdef readonly bint wide
    cdef public bint may_lag
    cdef bint keeps_input             # our input of this run is behind our descriptor, too

    def __init__(self, list ranges not None, **settings):
        super().__init__(ranges, **settings)
        self.whole_headers, self.wide = True, False
        self.may_lag = False
        self.narrow = <char **>calloc(2 * self.n, sizeof(char *))
        if self.narrow == NULL:
            raise MemoryError
        self.slots = self.narrow + self.n
        self.flying = &self.current
        self.lost_mask = 0
        for i in range(self.n):
            self.narrow[i] = self.peers[i].descriptors
            if i != self.rank:
                self.lost_mask |= 1 << <object>self.peers[i].slot

    def __dealloc__(self):
        free(self.narrow)

    def widen(self, list addresses not None, uint64_t slot_bytes):
        if len(addresses) != self.n or slot_bytes <= HEADER_BYTES + PAYLOAD_BYTES:
            raise ValueError("a place for every rank is needed, and more room than there is")
        for i, address in enumerate(addresses):
            self.slots[i] = <char *><uintptr_t>address
        self.slot_stride, self.payload_max = slot_bytes, slot_bytes - HEADER_BYTES

    def slots_of(self, int rank):
        if not 0 <= rank < self.n:
            raise IndexError(rank)
        return self.headers[rank].offsets[SCRATCH]

    cdef void _choose_slots(self, NativeProgram program) noexcept:
        """Read and write the descriptors of the next run where they are wide enough for it."""
        cdef uint32_t parity = (self.sequence + 1) & 1
        cdef uint64_t most = 0
        cdef int i
        for i in range(self.n):
            most = max(most, published(self.flying, i))
        self.wide = self.input_stays = program.eager and most > PAYLOAD_BYTES
        self.keeps_input = not self.wide
        for i in range(self.n):
            self.peers[i].descriptors = self.narrow[i]
            if self.wide:
                self.peers[i].descriptors = self.slots[i] + parity * self.slot_stride - (self.channel * 2 + parity) * DESCRIPTOR_BYTES

    def begin(self, NativeProgram program not None, run not None, const uint64_t[::1] addresses not None,
              const uint8_t[::1] scratch not None):
        self.flying, self.run = &self.current, run
        self._prepare(program, self.flying, run, addresses, scratch)
        self._enter(program)

    def resume(self, NativeProgram program not None):
        self._enter(program)

    cdef void _enter(self, NativeProgram program) noexcept:
        """Publish our descriptor, and find out whose we need to go on."""
        cdef int k
        cdef bint apart = program.eager and self.may_lag
        memset(self.needed, not apart, self.n)
        for k in range(program.used if apart else 0):
            self.needed[program.uses[k].rank] = True
        self.needed[self.rank] = True
        self._choose_slots(program)
        self._publish(program, self.flying)
        if self.wide and self._overwrites_input(program):
            self._keep_input(0, published(self.flying, self.rank))
            self.keeps_input = True

    cdef bint _overwrites_input(self, NativeProgram program) noexcept:
        """Whether this run writes to what it reads of our own input, before it has read it."""
        cdef char *pub = self.flying.address[self.rank][PUB]
        cdef char *out = self.flying.address[self.rank][OUT]
        cdef uint64_t out_bytes = extent(program, self.flying, &self.own, self.rank, OUT, self.peers[self.rank].total)
        if program.length == 0 or pub == NULL or out == NULL:
            return False
        if pub >= out + out_bytes or out >= pub + published(self.flying, self.rank):
            return False
        # Of two ranks, each element is read where its result goes, and once.
        return not (pub == out and self.n == 2 and program.blocks == 1)

    cdef void _keep_input(self, uint64_t at, uint64_t nbytes) noexcept:
        if nbytes and self.flying.address[self.rank][PUB] != NULL:
            memcpy(self._descriptor(self.rank) + HEADER_BYTES + at, self.flying.address[self.rank][PUB] + at, nbytes)

    cdef bint _resolve(self, NativeProgram program, zbmd_run *run, int rank, int buffer) noexcept nogil:
        if rank == self.rank and buffer == PUB and not self.keeps_input:
            return True  # it is read where it lies
        return NativeGroup._resolve(self, program, run, rank, buffer)

    def published_extent(self, NativeProgram program not None, int first, int end):
        cdef uint64_t at, nbytes
        if not 0 <= first <= end <= program.chunks:
            raise IndexError(first, end)
        if first == end or self.flying.address[self.rank][PUB] == NULL:
            return 0, 0
        at, nbytes = published_at(self.flying, first, False), published(self.flying, self.rank)
        return at, min(nbytes, published_at(self.flying, end - 1, True)) - at

    def input_part(self, uint64_t at, uint64_t nbytes):
        if at > published(self.flying, self.rank) or nbytes > published(self.flying, self.rank) - at:
            raise IndexError(at, nbytes)
        return PyMemoryView_FromMemory(self.flying.address[self.rank][PUB] + at, nbytes, PyBUF_READ)

    def keep_input(self, uint64_t at, uint64_t nbytes):
        if not self.wide or at > published(self.flying, self.rank) or nbytes > published(self.flying, self.rank) - at:
            raise IndexError(at, nbytes)
        if not self.keeps_input:
            self._keep_input(at, nbytes)

    def own_extent(self, NativeProgram program not None, int buffer):
        return self.own.offsets[buffer], extent(program, self.flying, &self.own, self.rank, buffer, self.peers[self.rank].total)

    def extent(self, NativeProgram program not None, int rank, int buffer):
        cdef Header *h = &self.headers[rank]
        return h.offsets[buffer], extent(program, self.flying, h, rank, buffer, self.peers[rank].total)

    def descriptor(self, NativeProgram program not None):
        cdef char *mine = self._descriptor(self.rank)
        cdef uint64_t nbytes = HEADER_BYTES
        if program.eager and not self.wide and self.flying.address[self.rank][PUB] != NULL:
            nbytes += published(self.flying, self.rank)
        return mine[:nbytes]

    @property
    def descriptor_offset(self):
        return ((self.sequence & 1) * self.slot_stride) if self.wide else self._descriptor_offset()

    @property
    def word(self):
        return self._word()

    def tell(self, int peer):
        if not 0 <= peer < self.n or peer == self.rank:
            raise IndexError(peer)
        if self.peers[peer].base != NULL:
            self._signal(peer)
            return 0
        self.peers[peer].sent += 1
        return <uint64_t>self.epoch << 32 | self.peers[peer].sent

    cdef int _look(self, int peer, uint64_t count) noexcept nogil:
        """The status that ends the wait for `count` notifications of a peer by now; below 0: none does."""
        cdef char *own = self.peers[self.rank].base
        cdef uint64_t value = <uint64_t>self.epoch << 32 | count
        cdef int found = zbmd_arrived(zbmd_load64(own, zbmd_cell_offset(self.peers[peer].slot, self.channel)), value)
        if found < 0 and (zbmd_lost_in(own, self.channel, value | <uint64_t>0xffffffff, &self.others)
                          or zbmd_load64(own, zbmd_abort_offset(self.channel)) >= value):
            return S_ABORTED
        return found

    def all_are_here(self):
        cdef int k, peer, found
        for k in range(1, self.n):
            peer = (self.rank + k) % self.n
            found = self._look(peer, self.peers[peer].received + 1) if self.needed[peer] else 0
            if found:
                return found > 0
        return True

    def has_caught_up(self):
        cdef int peer, found
        for peer in range(self.n):
            found = self._look(peer, self.peers[peer].received) if peer != self.rank else 0
            if found:
                return found > 0
        return True

    def catch_up(self, uint64_t deadline_ns):
        """Wait for those that the last run did not wait for, and look whether they called the same."""
        cdef int peer, status = S_DONE
        if not self.lags:
            return S_DONE
        with nogil:
            for peer in range(self.n):
                if status == S_DONE and peer != self.rank:
                    status = self._await(peer, self.peers[peer].received, deadline_ns)
        if status != S_DONE:
            return status
        self.culprit = -1
        for peer in range(self.n):
            memcpy(&self.headers[peer], self._descriptor(peer), sizeof(Header))
            self.needed[peer] = True
            if self.headers[peer].fingerprint != self.last_fingerprint and self.culprit < 0:
                self.culprit = peer
        if not self._still_there():
            return S_DESYNCHRONISED if self._lie_elsewhere() else S_ABORTED
        if self.culprit >= 0:
            return S_DESYNCHRONISED
        self.lags = False
        return S_DONE if self._still_valid() else S_ABORTED

    cdef bint _lie_elsewhere(self) noexcept nogil:
        """Whether a descriptor of this run that is missing here is where calls of another size have theirs."""
        cdef uint32_t parity = self.sequence & 1
        cdef char *at
        cdef int peer
        for peer in range(self.n):
            at = self.narrow[peer] + (self.channel * 2 + parity) * DESCRIPTOR_BYTES
            if not self.wide:
                at = NULL if self.slots[peer] == NULL else self.slots[peer] + parity * self.slot_stride
            if not self.needed[peer] or at == NULL or zbmd_load64(self._descriptor(peer), 0) == self._word():
                continue
            if zbmd_load64(at, 0) == self._word():
                memcpy(&self.headers[peer], at, sizeof(Header))
                self.culprit = peer
                return True
        return False

    def has_closed(self, int rank):
        if not 0 <= rank < self.n or rank == self.rank:
            raise IndexError(rank)
        return (zbmd_load64(self.peers[self.rank].base, zbmd_cell_offset(self.peers[rank].slot, self.channel))
                == (<uint64_t>self.epoch << 32 | 0xffffffff))

    def has_told(self, int peer, uint64_t count):
        if not 0 <= peer < self.n or peer == self.rank:
            raise IndexError(peer)
        return self._look(peer, self.peers[peer].received + count) >= 0

    @property
    def over(self):
        return (zbmd_lost_in(self.peers[self.rank].base, self.channel, <uint64_t>self.epoch << 32 | <uint64_t>0xffffffff, &self.others) != 0
                or zbmd_load64(self.peers[self.rank].base, zbmd_abort_offset(self.channel)) >> 32 >= self.epoch)

    def meet(self, NativeProgram program not None, uint64_t deadline_ns):
        cdef int status
        with nogil:
            status = self._await_all(deadline_ns)
            if status == S_DONE:
                status = self._compare(program)
                if status == S_ABORTED and self.culprit < 0 and self._lie_elsewhere():
                    status = S_DESYNCHRONISED
            if status == S_DONE:
                status = self._resolve_all(program, self.flying)
        return status

    def walk(self, NativeProgram program not None, int64_t kill_point, uint64_t deadline_ns):
        cdef int status
        with nogil:
            status = self._walk(program, self.flying, kill_point, deadline_ns)
            if status == S_DONE and not self._still_valid():
                status = S_ABORTED
        return status

    def wait(self, int peer, uint64_t count, uint64_t deadline_ns):
        cdef int status
        if not 0 <= peer < self.n or peer == self.rank:
            raise IndexError(peer)
        with nogil:
            status = self._await(peer, self.peers[peer].received + count, deadline_ns)
        return status

    def at(self, int64_t pc):
        self.pc = pc

    def place(self, NativeProgram program not None, int64_t index):
        cdef zbmd_move move
        if not 0 <= index < program.length:
            raise IndexError(index)
        move = zbmd_move_of(self.flying, &program.code[index, 0], self.rank)
        return <uintptr_t>move.dst.at, <uintptr_t>move.a.at, <uintptr_t>move.b.at, move.count

    def perform(self, NativeProgram program not None, const uint64_t[:, ::1] rows not None, int64_t length):
        cdef const int32_t *row
        cdef zbmd_move move
        cdef int64_t i
        cdef int status = S_DONE
        if rows.shape[1] != 5 or not 0 <= length <= rows.shape[0]:
            raise ValueError("rows of five columns are needed, and no more than there are")
        for i in range(length):
            if rows[i, 4] >= <uint64_t>program.length:
                raise IndexError(rows[i, 4])
        with nogil:
            for i in range(length):
                if zbmd_load64(self.peers[self.rank].base, zbmd_abort_offset(self.channel)) >> 32 >= self.epoch:
                    status = S_ABORTED
                    break
                row = &program.code[<int64_t>rows[i, 4], 0]
                move.dst = zbmd_place_of(row[4], <char *>rows[i, 0])
                move.a = zbmd_place_of(row[7], <char *>rows[i, 1])
                move.b = zbmd_place_of(row[10], <char *>rows[i, 2])
                move.count = rows[i, 3]
                zbmd_apply(self.flying, row, move)
        return status

    def window(self, uintptr_t address, Py_ssize_t nbytes):
        return PyMemoryView_FromMemory(<char *>address, nbytes, PyBUF_WRITE)

    def finish(self, NativeProgram program not None):
        cdef int peer
        for peer in range(self.n):
            self.peers[peer].received += program.awaited[peer]
        return S_DONE if self._still_valid() else S_ABORTED

    def withdraw(self):
        self._withdraw()

    def die(self):
        zbmd_kill_self()
