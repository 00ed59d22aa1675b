# cython: boundscheck=False, wraparound=False
"""The stepper that walks a program, and the native executor built on it. See _stepper.pyi."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stddef cimport size_t
from libc.errno cimport ESRCH
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from zbmd.transport.native._slots cimport ZBMD_MAX_SLOTS, zbmd_base, zbmd_load64, zbmd_slots

cdef extern from "transport/native/segment.h" nogil:
    int ZBMD_OFF_ABORT, ZBMD_OFF_DESCRIPTORS, ZBMD_OFF_END, ZBMD_CHANNELS, ZBMD_FAR_CHANNELS
    int ZBMD_WAIT_OK, ZBMD_WAIT_LOST, ZBMD_WAIT_ABORTED, ZBMD_WAIT_DEADLINE
    void zbmd_slots_none(zbmd_slots *slots)
    void zbmd_slots_add(zbmd_slots *slots, uint32_t slot)
    void zbmd_store64(zbmd_base base, uint64_t off, uint64_t v)
    uint64_t zbmd_cell_offset(uint32_t slot, uint32_t channel)
    uint64_t zbmd_abort_offset(uint32_t channel)
    void zbmd_notify(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint64_t value)
    void zbmd_end_channel(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint32_t epoch)
    int zbmd_lost_in(zbmd_base own, uint32_t channel, uint64_t last, const zbmd_slots *group)
    void zbmd_abort_channel(zbmd_base own, uint32_t channel, uint32_t epoch)
    uint64_t zbmd_now_ns()
    int zbmd_spin(zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value, uint32_t looks, uint32_t *used)
    int zbmd_wait(zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value, const zbmd_slots *group,
                  uint64_t deadline_ns, uint32_t spins)

cdef extern from "collectives/native/kernels.h" nogil:
    int ZBMD_DTYPES, ZBMD_REDUCTIONS, ZBMD_AVG
    const size_t *zbmd_itemsize
    zbmd_kernel zbmd_kernel_of(int dtype, int reduction)

cdef extern from * nogil:
    """
    #include <signal.h>
    static inline void zbmd_fence(void) { atomic_thread_fence(memory_order_seq_cst); }
    static inline void zbmd_fence_acquire(void) { atomic_thread_fence(memory_order_acquire); }
    static inline void zbmd_fence_release(void) { atomic_thread_fence(memory_order_release); }
    static inline void zbmd_die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
    """
    void zbmd_fence()
    void zbmd_fence_acquire()
    void zbmd_fence_release()
    void zbmd_die()

PUB_BYTES_MAX = PAYLOAD_BYTES
DESCRIPTOR_HEADER_BYTES = HEADER_BYTES
COUNTER_MAX = 0xffffffff

STATUS_DONE, STATUS_LOST, STATUS_ABORTED = 0, 1, 2
STATUS_DEADLINE, STATUS_DESYNCHRONISED, STATUS_BAD_DESCRIPTOR, STATUS_UNREADABLE = 3, 4, 5, 6


def let_siblings_read():
    return zbmd_let_siblings_read()


def read_memory(int32_t pid, uint64_t address, uint64_t nbytes):
    """Bytes of a process's memory."""
    cdef bytearray into = bytearray(nbytes)
    cdef char *at = into
    cdef int error
    with nogil:
        error = zbmd_read_peer(pid, address, at, nbytes)
    if error:
        raise OSError(error, f"the memory of process {pid} cannot be read")
    return bytes(into)


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    # The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    x ^= x >> 30
    x *= <uint64_t>0xbf58476d1ce4e5b9
    x ^= x >> 27
    x *= <uint64_t>0x94d049bb133111eb
    return x ^ (x >> 31)


cdef class NativeGroup:
    """This process's end of a group: peers' mappings, counters, descriptors."""

    def __init__(self, list ranges not None, *, int rank, uint32_t channel, uint32_t epoch,
                 uint64_t identity, uint32_t spins, uint32_t yields=0, dict mirrors=None):
        if self.peers != NULL or not 1 <= len(ranges) <= RANKS or not 0 <= rank < len(ranges) or channel >= <uint32_t>ZBMD_CHANNELS:
            raise ValueError("rank, number of ranks or channel out of bounds")
        if epoch < 1:
            raise ValueError("epochs begin at 1")
        self.n, self.rank, self.channel, self.epoch = len(ranges), rank, channel, epoch
        self.identity, self.spins, self.yields, self.sequence = identity, spins, yields, 0
        self.pc, self.culprit, self.met_ns, self.in_vain = 0, -1, 0, False
        self.payload_max, self.whole_headers, self.input_stays = PAYLOAD_BYTES, False, False
        self.reads, self.way_always, self.lags, self.last_fingerprint = False, -1, False, 0
        memset(&self.choices, 0, sizeof(self.choices))
        memset(&self.readable, 0, sizeof(self.readable))
        self.peers = <Peer *>calloc(self.n, sizeof(Peer))
        self.headers = <Header *>calloc(self.n, sizeof(Header))
        self.needed = <char *>malloc(self.n)
        if self.peers == NULL or self.headers == NULL or self.needed == NULL:
            raise MemoryError
        memset(self.needed, True, self.n)
        run_open(&self.current, self.n)
        zbmd_slots_none(&self.others)
        for i, (base, slot, inbox_end, total) in enumerate(ranges):
            if not 0 <= slot < ZBMD_MAX_SLOTS or not ZBMD_OFF_END <= inbox_end <= total:
                raise ValueError(f"the segment of rank {i} is out of bounds")
            self.peers[i].base = <char *><uintptr_t>base
            if base:
                self.peers[i].descriptors = self.peers[i].base + ZBMD_OFF_DESCRIPTORS
            elif i != rank and channel < <uint32_t>ZBMD_FAR_CHANNELS and mirrors is not None and mirrors.get(i):
                self.peers[i].descriptors = <char *><uintptr_t>mirrors[i]
            else:
                raise ValueError(f"no memory of rank {i} is here")
            self.peers[i].slot, self.peers[i].inbox_end, self.peers[i].total = slot, inbox_end, total
            if i != rank:
                zbmd_slots_add(&self.others, slot)
        for i in range(self.n):
            if i != rank and self.peers[i].base and zbmd_load64(self.peers[i].base, zbmd_cell_offset(self.peers[rank].slot, channel)) >> 32 >= epoch:
                raise ValueError(f"channel {channel} has been used in epoch {epoch} already")
        if zbmd_load64(self.peers[rank].base, zbmd_abort_offset(channel)) >> 32 >= epoch:
            raise ValueError(f"channel {channel} has been aborted in epoch {epoch} already")

    def __dealloc__(self):
        free(self.peers)
        free(self.headers)
        free(self.needed)
        free(self.pids)
        free(self.bounce)
        zbmd_store_close(&self.choices)
        run_close(&self.current)

    @property
    def reads_peers(self):
        return self.pids != NULL

    def read_peers(self, list pids not None):
        if len(pids) != self.n or self.pids != NULL or any(self.peers[i].base == NULL for i in range(self.n)):
            raise ValueError("a process number is needed for every rank, all of them on this host, and once")
        self.bounce = <char *>malloc(2 * ZBMD_BOUNCE_BYTES)
        if self.bounce == NULL:
            raise MemoryError
        self.pids = <int32_t *>calloc(self.n, sizeof(int32_t))
        if self.pids == NULL:
            raise MemoryError
        for i, pid in enumerate(pids):
            self.pids[i] = pid

    @property
    def sequence_number(self):
        return self.sequence

    def meet_anew(self):
        self.met_ns = 0

    def lost(self):
        return [i for i in range(self.n) if i != self.rank and self._is_lost(i)]

    cdef bint _is_lost(self, int rank) noexcept:
        """Whether it is known to have ended, and had not ended the channel."""
        cdef zbmd_slots one
        zbmd_slots_none(&one)
        zbmd_slots_add(&one, self.peers[rank].slot)
        return zbmd_lost_in(self.peers[self.rank].base, self.channel, <uint64_t>self.epoch << 32 | 0xffffffff, &one)

    def abort(self):
        zbmd_abort_channel(self.peers[self.rank].base, self.channel, self.epoch)

    def give_up(self):
        self.abort()
        for i in range(self.n):
            if i != self.rank and self.peers[i].base:
                zbmd_end_channel(self.peers[i].base, self.peers[self.rank].slot, self.channel, self.epoch)

    def let_go(self):
        self.is_over = True
        for i in [i for i in range(self.n) if i != self.rank and self.peers[i].base != NULL]:
            self.peers[i].base = self.peers[i].descriptors = NULL

    def header(self, int rank):
        if not 0 <= rank < self.n:
            raise IndexError(rank)
        return (<char *>&self.headers[rank])[:sizeof(Header)]

    def always(self, int way):
        if not -1 <= way < ZBMD_WAYS:
            raise ValueError(f"way {way}")
        self.way_always = way

    def capacity_left(self, NativeProgram program not None):
        """Operations of this program that fit before a counter of the epoch is used up."""
        cdef uint64_t used, most = program.most_counted(), left = 0xffffffff - self.sequence
        for i in range(self.n):
            used = max(self.peers[i].sent, self.peers[i].received)
            left = min(left, (0xffffffff - used) // most)
        return left

    def run(self, NativeProgram program not None, run not None, const uint64_t[::1] addresses not None,
            const uint8_t[::1] scratch not None, *, uint64_t deadline_ns, int64_t kill_point):
        cdef int status
        self._prepare(program, &self.current, run, addresses, scratch)
        with nogil:
            self._announce(program, &self.current, kill_point)
            status = self._complete(program, &self.current, kill_point, deadline_ns)
        return status

    cdef int _complete(self, NativeProgram program, zbmd_run *run, int64_t kill_point, uint64_t deadline_ns) noexcept nogil:
        """Everything behind the announcement."""
        cdef zbmd_store_choice *choice = NULL
        cdef uint64_t began_ns = 0
        cdef int64_t end_point
        cdef int reach, way = ZBMD_STORE_CACHED, status = self._await_all(deadline_ns)
        if status == S_DONE:
            status = self._compare(program)
        if status == S_DONE:
            reach = self._least_reach(program)
            choice = self._choice(program, run, reach)
            way = self.headers[self.chooser].ways[reach]
        if choice != NULL:
            began_ns = zbmd_now_ns()
        run.streams = way == ZBMD_STORE_STREAMED
        self.reads = program.other is not None and way == ZBMD_READ
        if status == S_DONE and self.reads:
            status = self._carry_out(program.other, run, kill_point, deadline_ns)
        elif status == S_DONE:
            status = self._carry_out(program, run, kill_point, deadline_ns)
        # Points of the longer program that the shorter one has not are its end; there are none behind the last.
        end_point = self.n + (program.other.length if self.reads else program.length)
        if status == S_DONE and end_point <= kill_point <= last_point(program):
            zbmd_die()
        if status == S_DONE and choice != NULL and self.rank == self.chooser:
            zbmd_store_note(choice, way, <double>(zbmd_now_ns() - began_ns) / <double>(run.count * run.item))
        if status != S_DONE:
            self._withdraw()
        return status

    cdef int _carry_out(self, NativeProgram program, zbmd_run *run, int64_t kill_point, uint64_t deadline_ns) noexcept nogil:
        """Carry out the program that all have agreed on."""
        cdef int status
        cut(program, run)
        status = self._resolve_all(program, run)
        if status == S_DONE:
            status = self._walk(program, run, kill_point, deadline_ns)
        if status == S_DONE and not self._still_valid():
            status = S_ABORTED
        return status

    cdef _prepare(self, NativeProgram program, zbmd_run *to, run, const uint64_t[::1] addresses, const uint8_t[::1] scratch):
        """Check the run, and fill in what the native code knows of it and our descriptor."""
        cdef Header *own = &self.own
        cdef int dtype = run.dtype, reduction = run.reduction
        cdef uint64_t count = run.count
        cdef const uint64_t[:, ::1] table, extents
        cdef int i
        if self.is_over or program.n != self.n or program.rank != self.rank or addresses.shape[0] != BUFFERS:
            raise ValueError("the group is over, the program is of another group or the addresses are incomplete")
        if not 0 <= dtype < ZBMD_DTYPES or not 0 <= reduction < ZBMD_REDUCTIONS:
            raise ValueError("no such dtype or reduction")
        to.item, to.count, to.dtype = zbmd_itemsize[dtype], count, dtype
        to.narrow = zbmd_is_narrow(dtype)
        to.divisor = self.n if reduction == ZBMD_AVG and self.n > 1 else 0
        to.kernel = zbmd_kernel_of(dtype, reduction)
        if to.kernel == NULL:
            raise ValueError("this reduction means nothing for this dtype")
        to.blocks, to.layout, to.extents = program.blocks, NULL, NULL
        own.piece, own.in_stride, own.out_stride = run.piece, run.in_stride, run.out_stride
        if run.layout is not None:
            table, extents = run.layout.table, run.layout.extents
            self._check_layout(program, table, extents, count, own.in_stride, own.out_stride)
            to.layout, to.extents = &table[0, 0], &extents[0, 0]
        to.pub_bytes = published(to, self.rank)
        to.scratch = <char *>&scratch[0] if scratch.shape[0] else NULL
        if count >= <uint64_t>1 << 48 or scratch_needed(program, to) > <uint64_t>scratch.shape[0]:
            raise ValueError("too many elements, or too little scratch")
        if program.eager and to.pub_bytes > self.payload_max:
            raise ValueError(f"an eager operation has at most {self.payload_max} bytes")
        own.plan, own.count, own.total = program.plan ^ <uint64_t>run.digest, count, run.total
        own.operation, own.kind, own.root = run.operation, dtype | reduction << 4, run.root
        for i in range(BUFFERS):
            to.address[self.rank][i] = <char *><uintptr_t>addresses[i]
            self._tell(i, addresses[i])
        own.fingerprint = self._fingerprint(own)

    cdef _check_layout(self, NativeProgram program, const uint64_t[:, ::1] layout,
                       const uint64_t[:, ::1] extents, uint64_t count, uint64_t in_staged, uint64_t out_staged):
        """That every block lies within the extents is the caller's to see to."""
        if layout.shape[0] != LAYOUT_ROWS or layout.shape[1] != program.blocks:
            raise ValueError("the layout is not of this program")
        if extents.shape[0] != self.n or extents.shape[1] != 4 or in_staged > 1 or out_staged > 1:
            raise ValueError("the layout's extents are not of this group")
        for i in range(program.blocks):
            if layout[LENGTH, i] > count:
                raise ValueError(f"block {i} is longer than the longest")

    cdef uint64_t _fingerprint(self, Header *h) noexcept:
        cdef uint64_t call = (<uint64_t>h.operation | <uint64_t>h.kind << 8 | <uint64_t>h.root << 16
                              | <uint64_t>h.piece << 32)
        return mix(mix(mix(mix(mix(h.plan) ^ h.count) ^ h.total) ^ call) ^ self.identity)

    cdef char *_descriptor(self, int rank) noexcept nogil:
        return self.peers[rank].descriptors + self._descriptor_offset()

    cdef uint64_t _descriptor_offset(self) noexcept nogil:
        return (self.channel * 2 + (self.sequence & 1)) * DESCRIPTOR_BYTES

    cdef size_t _header_bytes(self, NativeProgram program) noexcept nogil:
        return HEAD_BYTES if program.head_only and not self.whole_headers else sizeof(Header)

    cdef uint64_t _word(self) noexcept nogil:
        return <uint64_t>self.epoch << 32 | self.sequence

    cdef void _withdraw(self) noexcept nogil:
        # A peer that still reads our memory must learn that it may change: it looks at this last.
        zbmd_store64(self._descriptor(self.rank), 8, self._word())
        zbmd_fence()

    cdef bint _still_there(self) noexcept nogil:
        """Whether the descriptors that are needed are those of this run."""
        cdef int i
        zbmd_fence_acquire()
        for i in range(self.n):
            if self.needed[i] and zbmd_load64(self._descriptor(i), 0) != self._word():
                return False
        return True

    cdef bint _still_valid(self) noexcept nogil:
        """Whether no member that is needed has given the run up, or gone on to another epoch."""
        cdef int i
        if not self._still_there():
            return False
        for i in range(self.n):
            if self.needed[i] and zbmd_load64(self._descriptor(i), 8) == self._word():
                return False
        return True

    cdef void _signal(self, int peer) noexcept nogil:
        self.peers[peer].sent += 1
        zbmd_notify(self.peers[peer].base, self.peers[self.rank].slot, self.channel,
                    <uint64_t>self.epoch << 32 | self.peers[peer].sent)

    cdef int _await(self, int peer, uint64_t count, uint64_t deadline_ns) noexcept nogil:
        cdef char *own = self.peers[self.rank].base
        cdef uint64_t until_ns, value = <uint64_t>self.epoch << 32 | count
        cdef uint32_t used, yields = 1 if self.in_vain and self.spins > SPINS_FEW else self.yields
        cdef int result
        for _ in range(yields):
            result = zbmd_spin(own, self.peers[peer].slot, self.channel, value, self.spins, &used)
            if result >= 0:
                self.in_vain = False
                return result
            if zbmd_lost_in(own, self.channel, value | <uint64_t>0xffffffff, &self.others):
                break  # others may have the core for so long that a replacement clears the mark
            sched_yield()
        self.in_vain = True
        while True:  # a death marks us as it is noticed, and its replacement, which may be sooner, clears that
            until_ns = zbmd_now_ns() + LIFE_LOOK_NS
            until_ns = deadline_ns if deadline_ns and deadline_ns < until_ns else until_ns
            result = zbmd_wait(own, self.peers[peer].slot, self.channel, value, &self.others, until_ns, self.spins)
            if result != ZBMD_WAIT_DEADLINE or until_ns == deadline_ns:
                return result
            if self.peers[peer].base != NULL and zbmd_life_ended(self.peers[peer].base, self.peers[self.rank].slot):
                result = zbmd_spin(own, self.peers[peer].slot, self.channel, value, 1, &used)
                return result if result >= 0 else ZBMD_WAIT_LOST

    cdef uint64_t _offset(self, uint64_t address) noexcept:
        """The offset by which peers know our memory, if it lies in the segment; else 0."""
        cdef uint64_t base = <uint64_t><uintptr_t>self.peers[self.rank].base
        return address - base if base < address < base + self.peers[self.rank].total else 0

    cdef void _tell(self, int buffer, uint64_t address) noexcept:
        """Tell peers where a buffer lies: its offset in the segment, or its address if they can read it there.

        What lies in our inbox, as a slot of a ring of ours may, they do not map: it is read as memory of ours.
        """
        cdef uint64_t offset = self._offset(address)
        cdef bint mapped = offset >= self.peers[self.rank].inbox_end
        cdef bint foreign = not mapped and address != 0 and self.pids != NULL and (buffer == IN or buffer == OUT)
        self.own.offsets[buffer] = address if foreign else offset
        self.own.foreign = self.own.foreign & ~(<uint32_t>1 << buffer) | <uint32_t>foreign << buffer

    cdef void _measure(self, NativeProgram program, zbmd_run *run) noexcept nogil:
        """Tell peers how long those buffers are."""
        self.own.in_bytes = extent(program, run, &self.own, self.rank, IN, ZBMD_ADDRESS_MAX) if self.own.foreign >> IN & 1 else 0
        self.own.out_bytes = extent(program, run, &self.own, self.rank, OUT, ZBMD_ADDRESS_MAX) if self.own.foreign >> OUT & 1 else 0

    cdef void _announce(self, NativeProgram program, zbmd_run *run, int64_t kill_point) noexcept nogil:
        """Publish the descriptor, and tell every peer."""
        cdef int k
        if kill_point == 0:
            zbmd_die()
        self._publish(program, run)
        for k in range(1, self.n):
            if kill_point == k:
                zbmd_die()
            self._signal((self.rank + k) % self.n)

    cdef zbmd_store_choice *_choice(self, NativeProgram program, const zbmd_run *run, unsigned reach) noexcept nogil:
        """The choice of how this run's bytes go, or NULL if it has few or no puts."""
        return zbmd_store_choice_of(&self.choices, self.own.operation, reach, run.count * run.item) if program.inbox_slots else NULL

    cdef void _propose(self, NativeProgram program, zbmd_run *run) noexcept nogil:
        """Say whence peers can take the bytes of our arrays and, as the chooser, the way for each reach that it can be."""
        cdef zbmd_store_choice *choice
        cdef int reach, ways
        self.own.reach = ZBMD_FROM_SLOTS
        if program.other is not None:
            self.own.reach = min(self._reach(program, run, IN, self.own.in_bytes), self._reach(program, run, OUT, self.own.out_bytes))
        self.chooser = chooser_of(&self.own, self.n)
        for reach in range(ZBMD_REACHES):
            self.own.ways[reach] = ZBMD_STORE_CACHED
            if self.rank != self.chooser or reach > self.own.reach:
                continue
            ways = ZBMD_STORE_WAYS if reach == ZBMD_FROM_SLOTS else ZBMD_WAYS
            choice = self._choice(program, run, reach)
            if choice != NULL:
                self.own.ways[reach] = zbmd_store_next(choice, ways)
            if self.way_always >= 0:
                self.own.ways[reach] = min(self.way_always, ways - 1)

    cdef int _reach(self, NativeProgram program, const zbmd_run *run, int buffer, uint64_t foreign_bytes) noexcept nogil:
        """The reach of one of our buffers; there may be none, as `out` where another rank is the root."""
        cdef uint64_t high = self.peers[self.rank].total
        if run.address[self.rank][buffer] == NULL:
            return ZBMD_FROM_ARENA
        if self.own.foreign >> buffer & 1:  # a look at the memory of a short run costs more than it saves
            if run.count * run.item < ZBMD_STORE_BYTES_MIN:
                return ZBMD_FROM_SLOTS
            return ZBMD_FROM_KERNEL if zbmd_is_readable(&self.readable, self.own.offsets[buffer], foreign_bytes) else ZBMD_FROM_SLOTS
        if lies_within(self.own.offsets[buffer], extent(program, run, &self.own, self.rank, buffer, high), self.peers[self.rank].inbox_end, high):
            return ZBMD_FROM_ARENA
        return ZBMD_FROM_SLOTS

    cdef int _least_reach(self, NativeProgram program) noexcept nogil:
        """The reach of all arrays: only what all ranks say, and if there is a program for it."""
        cdef int i, least = ZBMD_FROM_SLOTS if program.other is None else ZBMD_FROM_ARENA
        for i in range(self.n):
            least = min(least, <int>self.headers[i].reach)
        return least

    cdef void _publish(self, NativeProgram program, zbmd_run *run) noexcept nogil:
        cdef char *mine
        self.pc = self.culprit = -1
        self.sequence += 1
        mine = self._descriptor(self.rank)
        # A reader that finds the word of this run before and after its look has read of this run (Boehm,
        # "Can seqlocks get along with programming language memory models?", MSPC 2012).
        zbmd_store64(mine, 0, 0)
        zbmd_fence_release()
        self.own.word = self.own.withdrawn = 0
        self._measure(program, run)
        self._propose(program, run)
        memcpy(mine, &self.own, self._header_bytes(program))
        if program.eager and run.address[self.rank][PUB] != NULL and not self.input_stays:
            memcpy(mine + HEADER_BYTES, run.address[self.rank][PUB], run.pub_bytes)
        self.own.word = self._word()
        zbmd_store64(mine, 0, self.own.word)

    cdef bint _all_are_here(self, uint32_t looks) noexcept nogil:
        """Look for the announcements of all peers, for so many looks at each."""
        cdef uint32_t used
        cdef int k, peer
        for k in range(1, self.n):
            peer = (self.rank + k) % self.n
            if zbmd_spin(self.peers[self.rank].base, self.peers[peer].slot, self.channel,
                         <uint64_t>self.epoch << 32 | (self.peers[peer].received + 1), looks, &used) < 0:
                return False
        return True

    cdef int _await_all(self, uint64_t deadline_ns) noexcept nogil:
        """Wait until all that are needed have entered."""
        cdef int k, peer, status
        for k in range(1, self.n):
            peer = (self.rank + k) % self.n
            status = self._await(peer, self.peers[peer].received + 1, deadline_ns) if self.needed[peer] else S_DONE
            if status != S_DONE:
                self.culprit = peer
                return status
        for peer in range(self.n):
            if peer != self.rank:
                self.peers[peer].received += 1
                self.lags |= not self.needed[peer]
        self.last_fingerprint = self.own.fingerprint
        return S_DONE

    cdef int _compare(self, NativeProgram program) noexcept nogil:
        """Check that all that are needed called the same."""
        cdef int i
        memcpy(&self.headers[self.rank], &self.own, sizeof(Header))
        for i in range(self.n):
            if i != self.rank and self.needed[i]:
                memcpy(&self.headers[i], self._descriptor(i), self._header_bytes(program))
            elif i != self.rank:
                memset(&self.headers[i], 0, sizeof(Header))
        if not self._still_there():
            return S_ABORTED
        for i in range(self.n):
            if self.needed[i] and self.headers[i].fingerprint != self.own.fingerprint and self.culprit < 0:
                self.culprit = i
        if self.culprit >= 0:
            return S_DESYNCHRONISED
        return S_DONE if self._still_valid() else S_ABORTED

    cdef int _resolve_all(self, NativeProgram program, zbmd_run *run) noexcept nogil:
        """Resolve and bound every buffer the program touches."""
        cdef int i, k, rank
        run.pids, run.bounce = self.pids, self.bounce
        memset(run.foreign, 0, self.n * sizeof(uint64_t))
        for k in range(program.used):
            rank = program.uses[k].rank
            if (rank != self.rank or program.uses[k].buffer == PUB) and not self._resolve(program, run, rank, program.uses[k].buffer):
                self.culprit = rank
                return S_BAD_DESCRIPTOR
        for i in range(self.n):
            run.in_stride[i] = self.headers[i].in_stride
            run.out_stride[i] = self.headers[i].out_stride
            run.seen[i] = 0
        if not program.eager and self.met_ns == 0:
            self.met_ns = zbmd_now_ns()
        return S_DONE

    cdef bint _resolve(self, NativeProgram program, zbmd_run *run, int rank, int buffer) noexcept nogil:
        cdef Header *h = &self.headers[rank]
        cdef uint64_t begin = h.offsets[buffer]
        cdef uint64_t low = self.peers[rank].inbox_end
        cdef uint64_t high = self.peers[rank].total
        cdef uint64_t need
        if buffer == PUB:
            run.address[rank][PUB] = self._descriptor(rank) + HEADER_BYTES
            return published(run, rank) <= self.payload_max
        if buffer == INBOX:
            low, high = ZBMD_OFF_END, self.peers[rank].inbox_end
        if h.foreign >> buffer & 1:
            if self.pids == NULL or buffer != IN and buffer != OUT:
                return False
            run.address[rank][buffer] = <char *>begin
            run.foreign[rank] |= <uint64_t>1 << buffer
            need = extent(program, run, h, rank, buffer, ZBMD_ADDRESS_MAX)
            return lies_within(begin, need, ZBMD_ADDRESS_MIN, ZBMD_ADDRESS_MAX) and need <= (h.in_bytes if buffer == IN else h.out_bytes)
        # Of a rank on another host: 0, so that places in the buffer are counted from its beginning.
        run.address[rank][buffer] = self.peers[rank].base + begin if self.peers[rank].base != NULL else NULL
        need = extent(program, run, h, rank, buffer, high)
        return lies_within(begin, need, low, high)

    cdef int _walk(self, NativeProgram program, zbmd_run *run, int64_t kill_point, uint64_t deadline_ns) noexcept nogil:
        cdef const int32_t *code = NULL
        cdef const int32_t *row
        cdef int64_t index
        cdef int status, peer
        self.pc = 0
        if program.length:
            code = &program.code[0, 0]
        while True:
            if kill_point == self.n + self.pc and self.pc < program.length:
                zbmd_die()
            index = step(code, program.length, self.pc, run.seen)
            if index == -2:
                break
            row = code + self.pc * WIDTH
            if index == -1:
                peer = row[2]
                status = self._await(peer, self.peers[peer].received + row[3], deadline_ns)
                if status != ZBMD_WAIT_OK:
                    return status
                run.seen[peer] = row[3]
                continue
            if row[0] == PUT or row[0] >= REDUCE:
                if zbmd_load64(self.peers[self.rank].base, zbmd_abort_offset(self.channel)) >> 32 >= self.epoch:
                    return S_ABORTED
                status = zbmd_perform(run, row, self.rank)
                if run.pids != NULL:
                    status = self._after_read(run, row, status, deadline_ns)
                    if status != S_DONE:
                        return status
            if row[0] <= NOTIFY:
                self._signal(row[2])
            self.pc += 1
        for peer in range(self.n):
            self.peers[peer].received += program.awaited[peer]
        return S_DONE

    cdef int _after_read(self, zbmd_run *run, const int32_t *row, int error, uint64_t deadline_ns) noexcept nogil:
        """Bytes read of a peer's memory count if the peer still lived: its process number may be another's."""
        cdef int column, status, rank, read = -1
        for column in range(6, 10 if row[0] == REDUCE else 7, 3):
            rank = row[column]
            if row[0] == PUT or not run.foreign[rank] >> row[column + 1] & 1:
                continue
            read = rank
            if error == ESRCH or zbmd_life_ended(self.peers[rank].base, self.peers[self.rank].slot):
                status = self._await(rank, NEVER, deadline_ns)  # until we are told of the loss, or of an abort
                return status if status != S_DONE else S_ABORTED
        if read < 0 or error == 0:
            return S_DONE
        if not self._still_valid():
            return S_ABORTED
        self.culprit = read
        return S_UNREADABLE
