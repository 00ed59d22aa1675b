"""The native part that the executors of groups share. See _stepper.pyi."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from libc.stdlib cimport calloc, free

from zbmd.transport.native._slots cimport zbmd_base, zbmd_slots

from zbmd.collectives.native._program cimport (
    BUFFERS, COPY, FINISH, IN, INBOX, LAYOUT_ROWS, LENGTH, NOTIFY, OUT, PUB, PUT, RANKS, REDUCE, SCRATCH, WAIT, WIDE_BYTES, WIDTH,
    ZBMD_ADDRESS_MAX, ZBMD_ADDRESS_MIN, ZBMD_BOUNCE_BYTES, ZBMD_FROM_ARENA, ZBMD_FROM_KERNEL, ZBMD_FROM_SLOTS, ZBMD_READ, ZBMD_REACHES,
    ZBMD_STORE_BYTES_MIN, ZBMD_STORE_CACHED, ZBMD_STORE_STREAMED, ZBMD_STORE_WAYS, ZBMD_WAYS,
    NativeProgram, last_point, step, zbmd_apply, zbmd_is_narrow, zbmd_kernel, zbmd_move, zbmd_move_of, zbmd_perform, zbmd_place,
    zbmd_is_readable, zbmd_place_of, zbmd_readable, zbmd_run, zbmd_let_siblings_read, zbmd_read_peer, zbmd_store_choice,
    zbmd_store_choice_of, zbmd_store_choices, zbmd_store_close, zbmd_store_next, zbmd_store_note
)

cdef extern from "transport/native/life.h" nogil:
    int zbmd_life_ended(zbmd_base peer, uint32_t our_slot)

cdef extern from "sched.h" nogil:
    int sched_yield()

# A channel's descriptors: two, used in turn. An operation's is not overwritten before its successor's
# successor begins, when every peer has ended this one.
cdef enum:
    DESCRIPTOR_BYTES = 1792
    HEAD_BYTES = 64          # of a header: what programs need that read nothing of a peer but what it publishes
    HEADER_BYTES = 384
    PAYLOAD_BYTES = 1408

cdef enum:  # of catalogue.py's operations, those that not all ranks end alike
    BROADCAST = 2
    REDUCE_TO = 7
    GATHER = 8
    SCATTER = 9

cdef enum:
    S_DONE = 0
    S_ABORTED = 2
    S_DESYNCHRONISED = 4
    S_BAD_DESCRIPTOR = 5
    S_UNREADABLE = 6

cdef enum:
    SPINS_FEW = 16                 # looks of a group whose ranks share cores
    NEVER = 0xfffffffe             # notifications that no peer comes to
    LIFE_LOOK_NS = 50000000        # between two looks of a long wait whether the peer lives


cdef struct Header:
    uint64_t word            # epoch << 32 | sequence; 0 while the rest is being written
    uint64_t withdrawn       # the word of a run that its rank has given up
    uint64_t fingerprint
    uint64_t plan
    uint64_t count           # elements of a block, in this piece
    uint64_t total           # elements of a block, in the whole operation
    uint8_t operation
    uint8_t kind             # dtype | reduction << 4
    uint16_t root
    uint32_t piece
    uint64_t in_stride       # elements from block to block; under a layout: 1 if staged, else 0
    uint64_t out_stride
    uint64_t offsets[BUFFERS]
    uint8_t ways[ZBMD_REACHES]  # of the chooser, by reach: how all are to move their bytes (stores.h)
    uint8_t reach            # of this rank's arrays; that of the run is the least
    uint32_t foreign         # a bit for each buffer that is in the rank's own memory; its offset is then its address
    uint64_t in_bytes        # of such buffers
    uint64_t out_bytes


cdef inline int run_open(zbmd_run *run, int n) except -1:
    """Room for `n` ranks, which `run_close` gives back; `run` is all zeros."""
    run.address = <char *(*)[BUFFERS]>calloc(n, (BUFFERS + 4) * sizeof(uint64_t))
    if run.address == NULL:
        raise MemoryError
    run.in_stride = <uint64_t *>(run.address + n)
    run.out_stride = run.in_stride + n
    run.seen = run.out_stride + n
    run.foreign = run.seen + n
    return 0


cdef inline void run_close(zbmd_run *run) noexcept nogil:
    free(run.address)
    run.address = NULL


cdef inline uint64_t published(const zbmd_run *run, int rank) noexcept nogil:
    """The bytes that a rank publishes with its descriptor, if its input travels with it."""
    return (run.count if run.layout == NULL else run.extents[4 * rank + 1]) * run.item


cdef inline uint64_t extent(NativeProgram program, const zbmd_run *run, const Header *h, int rank, int buffer,
                            uint64_t high) noexcept nogil:
    """The bytes of one of a rank's buffers, as its descriptor has it; beyond `high` if that overflows."""
    cdef uint64_t stride = 0
    cdef uint64_t need = run.count * run.item
    if buffer == INBOX:
        need = program.inbox_slots * run.slot_bytes
    elif buffer == OUT:
        stride = h.out_stride
    elif buffer == IN:
        stride = h.in_stride
    if run.layout != NULL and (buffer == OUT or buffer == IN):
        return run.extents[4 * rank + (2 if buffer == OUT else 0) + stride] * run.item if stride <= 1 else high + 1
    if stride > high or need > high:
        return high + 1
    return need + (program.blocks - 1) * stride * run.item


cdef inline bint lies_within(uint64_t begin, uint64_t need, uint64_t low, uint64_t high) noexcept nogil:
    return need == 0 or (low <= begin <= high and need <= high - begin)


cdef inline void cut(NativeProgram program, zbmd_run *run) noexcept nogil:
    """The chunks of a run, and its slots, are those of the program."""
    cdef uint64_t longest
    run.per_block = program.chunks // program.blocks
    run.results_stay = program.reads_results
    longest = (run.count + run.per_block - 1) // run.per_block
    run.slot_bytes = (longest * (WIDE_BYTES if run.narrow else run.item) + 63) // 64 * 64


cdef inline uint64_t scratch_needed(NativeProgram program, zbmd_run *run) noexcept nogil:
    """Bytes of scratch, whichever program it will be; the run is cut for `program`."""
    cdef uint64_t most = 0
    if program.other is not None:
        cut(program.other, run)
        most = program.other.scratch_slots * run.slot_bytes
    cut(program, run)
    return max(most, program.scratch_slots * run.slot_bytes)


cdef inline int chooser_of(const Header *own, int n) noexcept nogil:
    """The rank that chooses how bytes go: one that has not done its part before the last of them have come."""
    if own.operation == GATHER or own.operation == REDUCE_TO:
        return own.root % n
    return (own.root + 1) % n if own.operation == BROADCAST or own.operation == SCATTER else 0


cdef struct Peer:            # a member of a group, ourselves included
    char *base               # NULL for a rank on another host
    char *descriptors        # where its descriptors can be read here
    uint64_t sent            # notifications of this epoch
    uint64_t received
    uint64_t inbox_end
    uint64_t total
    uint32_t slot


cdef class NativeGroup:
    cdef Peer *peers                  # by rank
    cdef Header *headers
    cdef zbmd_run current             # unless the fast path has the run of its call
    cdef zbmd_run *flying             # that one, or `current`: of a group with members on other hosts
    cdef int32_t *pids                # by rank, once all can read each other's memory; else NULL
    cdef char *bounce
    cdef zbmd_slots others            # the slots of the other members
    cdef Header own
    cdef zbmd_store_choices choices
    cdef zbmd_readable readable       # arrays of ours
    cdef int chooser                  # the rank that has the say in this run
    cdef int way_always               # below 0: what is timed decides
    cdef bint is_over                 # after `let_go`
    cdef int n, rank
    cdef uint32_t channel, epoch, sequence, spins, yields
    cdef uint64_t identity
    cdef uint64_t payload_max         # bytes of input that travel with a descriptor
    cdef bint in_vain                 # the last long wait parked: the other may want this very core
    cdef bint input_stays             # not copied behind the descriptor by `_publish`
    cdef bint whole_headers           # always tell where all buffers are
    cdef char *needed                 # by rank: whether we wait for it in this run; all, in shared memory
    cdef readonly bint lags           # there are members whose part in the last run has not been looked at
    cdef uint64_t last_fingerprint    # of that run
    cdef readonly bint reads          # whether the last run was by the program's other
    cdef readonly int64_t pc
    cdef readonly int culprit
    cdef readonly uint64_t met_ns

    cdef bint _is_lost(self, int rank) noexcept
    cdef _prepare(self, NativeProgram program, zbmd_run *to, run, const uint64_t[::1] addresses, const uint8_t[::1] scratch)
    cdef _check_layout(self, NativeProgram program, const uint64_t[:, ::1] layout,
                       const uint64_t[:, ::1] extents, uint64_t count, uint64_t in_staged, uint64_t out_staged)
    cdef uint64_t _fingerprint(self, Header *h) noexcept
    cdef char *_descriptor(self, int rank) noexcept nogil
    cdef uint64_t _descriptor_offset(self) noexcept nogil
    cdef size_t _header_bytes(self, NativeProgram program) noexcept nogil
    cdef uint64_t _word(self) noexcept nogil
    cdef void _withdraw(self) noexcept nogil
    cdef bint _still_there(self) noexcept nogil
    cdef bint _still_valid(self) noexcept nogil
    cdef void _signal(self, int peer) noexcept nogil
    cdef int _await(self, int peer, uint64_t count, uint64_t deadline_ns) noexcept nogil
    cdef uint64_t _offset(self, uint64_t address) noexcept
    cdef void _tell(self, int buffer, uint64_t address) noexcept
    cdef void _measure(self, NativeProgram program, zbmd_run *run) noexcept nogil
    cdef int _after_read(self, zbmd_run *run, const int32_t *row, int error, uint64_t deadline_ns) noexcept nogil
    cdef void _announce(self, NativeProgram program, zbmd_run *run, int64_t kill_point) noexcept nogil
    cdef int _complete(self, NativeProgram program, zbmd_run *run, int64_t kill_point,
                       uint64_t deadline_ns) noexcept nogil
    cdef bint _all_are_here(self, uint32_t looks) noexcept nogil
    cdef int _carry_out(self, NativeProgram program, zbmd_run *run, int64_t kill_point, uint64_t deadline_ns) noexcept nogil
    cdef zbmd_store_choice *_choice(self, NativeProgram program, const zbmd_run *run, unsigned reach) noexcept nogil
    cdef void _propose(self, NativeProgram program, zbmd_run *run) noexcept nogil
    cdef int _reach(self, NativeProgram program, const zbmd_run *run, int buffer, uint64_t foreign_bytes) noexcept nogil
    cdef int _least_reach(self, NativeProgram program) noexcept nogil
    cdef int _compare(self, NativeProgram program) noexcept nogil
    cdef int _resolve_all(self, NativeProgram program, zbmd_run *run) noexcept nogil
    cdef void _publish(self, NativeProgram program, zbmd_run *run) noexcept nogil
    cdef int _await_all(self, uint64_t deadline_ns) noexcept nogil
    cdef bint _resolve(self, NativeProgram program, zbmd_run *run, int rank, int buffer) noexcept nogil
    cdef int _walk(self, NativeProgram program, zbmd_run *run,
                   int64_t kill_point, uint64_t deadline_ns) noexcept nogil
