"""Programs as the executor runs them, and what its headers declare. See _program.pyi."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

ctypedef void (*zbmd_kernel)(void *dst, const void *a, const void *b, size_t count) noexcept nogil

cdef extern from "collectives/native/run.h" nogil:
    enum:
        RANKS "ZBMD_GROUP_MAX"
        BUFFERS "ZBMD_BUFFERS"
        WIDTH "ZBMD_WIDTH"
        WIDE_BYTES "ZBMD_WIDE_BYTES"
        LENGTH "ZBMD_LENGTH"
        IN_STAGED "ZBMD_IN_STAGED"
        LAYOUT_ROWS "ZBMD_LAYOUT_ROWS"
        PUT "ZBMD_PUT"
        NOTIFY "ZBMD_NOTIFY"
        WAIT "ZBMD_WAIT"
        REDUCE "ZBMD_REDUCE"
        COPY "ZBMD_COPY"
        FINISH "ZBMD_FINISH"
        OUT "ZBMD_OUT"
        SCRATCH "ZBMD_SCRATCH"
        INBOX "ZBMD_INBOX"
        PUB "ZBMD_PUB"
        IN "ZBMD_IN"
    ctypedef struct zbmd_run:
        char *(*address)[32]
        uint64_t *in_stride
        uint64_t *out_stride
        uint64_t *seen
        uint64_t *foreign
        const int32_t *pids
        char *bounce
        char *scratch
        uint64_t count, slot_bytes, item, blocks, pub_bytes
        int per_block, dtype, narrow, streams, results_stay
        uint32_t divisor
        const uint64_t *layout
        const uint64_t *extents
        zbmd_kernel kernel
    ctypedef struct zbmd_place:
        char *at
    ctypedef struct zbmd_move:
        zbmd_place dst
        zbmd_place a
        zbmd_place b
        uint64_t count
    int zbmd_is_narrow(int dtype)
    zbmd_place zbmd_place_of(int buffer, char *at) noexcept
    zbmd_move zbmd_move_of(const zbmd_run *run, const int32_t *row, int own) noexcept
    void zbmd_apply(const zbmd_run *run, const int32_t *row, zbmd_move move) noexcept
    int zbmd_perform(const zbmd_run *run, const int32_t *row, int own) noexcept

cdef extern from "collectives/native/peers.h" nogil:
    enum:
        ZBMD_BOUNCE_BYTES
    uint64_t ZBMD_ADDRESS_MIN, ZBMD_ADDRESS_MAX
    int zbmd_read_peer(int32_t pid, uint64_t source, char *to, uint64_t n) noexcept
    int zbmd_let_siblings_read() noexcept
    ctypedef struct zbmd_readable:
        pass
    int zbmd_is_readable(zbmd_readable *known, uint64_t start, uint64_t n) noexcept

cdef extern from "collectives/native/stores.h" nogil:
    enum:
        ZBMD_STORE_CACHED
        ZBMD_STORE_STREAMED
        ZBMD_STORE_WAYS
        ZBMD_READ
        ZBMD_WAYS
        ZBMD_FROM_SLOTS
        ZBMD_FROM_KERNEL
        ZBMD_FROM_ARENA
        ZBMD_REACHES
        ZBMD_STORE_BYTES_MIN
    ctypedef struct zbmd_store_choice:
        uint8_t chosen
    ctypedef struct zbmd_store_choices:
        pass
    zbmd_store_choice *zbmd_store_choice_of(zbmd_store_choices *all, unsigned operation, unsigned reach, uint64_t nbytes) noexcept
    void zbmd_store_close(zbmd_store_choices *all) noexcept
    int zbmd_store_next(zbmd_store_choice *choice, int ways) noexcept
    void zbmd_store_note(zbmd_store_choice *choice, int way, double cost) noexcept


cdef struct Use:
    int rank
    int buffer


cdef class NativeProgram:
    cdef const int32_t[:, ::1] code
    cdef int64_t length
    cdef int n, rank, blocks, chunks, scratch_slots, inbox_slots, used
    cdef readonly bint eager
    cdef bint head_only
    cdef bint reads_results           # of peers: their `out`
    cdef uint64_t plan
    cdef NativeProgram other          # what is run instead if ranks can read all arrays and the chooser says so
    cdef uint64_t *sent               # by rank
    cdef uint64_t *awaited
    cdef Use *uses                    # `used` of them, with room for `uses_room`
    cdef int uses_room

    cdef uint64_t most_counted(self) noexcept
    cdef _take_other(self, NativeProgram other)
    cdef _take(self, int64_t i)
    cdef _check(self, int64_t i, int rank, int buffer, int index, int chunk)
    cdef _use(self, int rank, int buffer)


cdef inline int64_t last_point(NativeProgram program) noexcept nogil:
    """The end of a run, by the longer program if there are two: the last point it can be killed at."""
    if program.other is None:
        return program.n + program.length
    return program.n + max(program.length, program.other.length)


cdef inline int64_t step(const int32_t *code, int64_t length, int64_t pc, const uint64_t *received) noexcept nogil:
    """The instruction that may fire now, or BLOCKED (at a wait), or DONE."""
    cdef const int32_t *row
    if pc >= length:
        return -2
    row = code + pc * WIDTH
    if row[0] == WAIT and received[row[2]] < <uint64_t>row[3]:
        return -1
    return pc
