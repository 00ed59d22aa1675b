# cython: boundscheck=False, wraparound=False
"""Programs as the executor runs them, and the choice of a way for the bytes. See _program.pyi."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

CACHED = ZBMD_STORE_CACHED
STREAMED = ZBMD_STORE_STREAMED
READ = ZBMD_READ
BLOCKED = -1
DONE = -2


cdef class Stepper:
    """Walks one encoded program."""

    cdef const int32_t[:, ::1] code
    cdef readonly int64_t pc
    cdef int ranks

    def __init__(self, const int32_t[:, ::1] encoding not None):
        if encoding.shape[1] != WIDTH:
            raise ValueError(f"an encoding has {WIDTH} columns, not {encoding.shape[1]}")
        self.ranks = 0
        for i in range(encoding.shape[0]):
            if not PUT <= encoding[i, 0] <= FINISH or not 0 <= encoding[i, 2] < RANKS:
                raise ValueError(f"row {i} encodes no instruction")
            self.ranks = max(self.ranks, encoding[i, 2] + 1)
        self.code = encoding
        self.pc = 0

    def next(self, const uint64_t[::1] received not None):
        if received.shape[0] < self.ranks:
            raise ValueError(f"counts are needed for {self.ranks} ranks")
        if self.code.shape[0] == 0:
            return DONE
        return step(&self.code[0, 0], self.code.shape[0], self.pc, &received[0])

    def advance(self):
        if self.pc >= self.code.shape[0]:
            raise ValueError("the program has ended")
        self.pc += 1


cdef class NativeProgram:
    """One rank's program, checked once and for all and ready to run."""

    def __init__(self, const int32_t[:, ::1] encoding not None, *, int n, int rank, int blocks, int chunks,
                 int scratch_slots, int inbox_slots, bint eager, uint64_t plan, NativeProgram other=None):
        if self.sent != NULL or encoding.shape[1] != WIDTH or not 0 <= rank < n <= RANKS or chunks < 1 or blocks < 1:
            raise ValueError("the encoding, ranks or chunks are out of bounds")
        self.code, self.length = encoding, encoding.shape[0]
        self.n, self.rank, self.blocks, self.chunks = n, rank, blocks, chunks
        self.scratch_slots, self.inbox_slots = scratch_slots, inbox_slots
        self.eager, self.plan, self.used, self.head_only, self.reads_results = eager, plan, 0, eager, False
        self.sent = <uint64_t *>calloc(2 * n, sizeof(uint64_t))
        if self.sent == NULL:
            raise MemoryError
        self.awaited = self.sent + n
        if eager:
            self._use(rank, PUB)
        for i in range(self.length):
            self._take(i)
        if other is not None:
            self._take_other(other)

    cdef _take_other(self, NativeProgram other):
        if other.other is not None or other.eager or self.eager:
            raise ValueError("a choice is between two programs that publish nothing")
        if (other.n, other.rank, other.blocks) != (self.n, self.rank, self.blocks):
            raise ValueError("the other program is of another rank, group or operation")
        self.other, self.head_only = other, False

    def __dealloc__(self):
        free(self.sent)
        free(self.uses)

    def __len__(self):
        return self.length

    @property
    def kill_points(self):
        return last_point(self) + 1

    cdef uint64_t most_counted(self) noexcept:
        """The most that a run adds to a counter of the epoch, whichever program it is."""
        cdef uint64_t most = 1 if self.other is None else self.other.most_counted()
        cdef int i
        for i in range(self.n):
            most = max(most, 1 + max(self.sent[i], self.awaited[i]))
        return most

    cdef _take(self, int64_t i):
        cdef const int32_t *row = &self.code[i, 0]
        cdef int code = row[0]
        if not PUT <= code <= FINISH or not 0 <= row[2] < self.n or not 0 <= row[1] < self.chunks:
            raise ValueError(f"row {i} encodes no instruction of this program")
        if code == WAIT:
            self.awaited[row[2]] = max(self.awaited[row[2]], <uint64_t>row[3])
            return
        if code == PUT or code == NOTIFY:
            self.sent[row[2]] += 1
        if code == NOTIFY:
            return
        self._check(i, row[2] if code == PUT else self.rank, row[4], row[5], row[1])
        if row[4] != (INBOX if code == PUT else row[4]) or (code != PUT and row[4] not in (OUT, SCRATCH)):
            raise ValueError(f"row {i} writes where it may not")
        if code == FINISH and (row[4] != OUT or row[6] != self.rank or row[7] not in (SCRATCH, INBOX)):
            raise ValueError(f"row {i} finishes what is in no slot")
        self._check(i, row[6], row[7], row[8], row[1])
        if code == REDUCE:
            self._check(i, row[9], row[10], row[11], row[1])

    cdef _check(self, int64_t i, int rank, int buffer, int index, int chunk):
        if not 0 <= rank < self.n or not 0 <= buffer < BUFFERS or index < 0:
            raise ValueError(f"row {i} has an operand out of bounds")
        if buffer == SCRATCH or buffer == INBOX:
            if index >= (self.scratch_slots if buffer == SCRATCH else self.inbox_slots):
                raise ValueError(f"row {i} has a slot out of bounds")
        elif index != chunk:
            raise ValueError(f"row {i} mixes chunks")
        if buffer == SCRATCH:
            if rank != self.rank:
                raise ValueError(f"row {i} uses a peer's scratch")
        else:
            self._use(rank, buffer)

    cdef _use(self, int rank, int buffer):
        cdef Use *more
        cdef int k
        for k in range(self.used):
            if self.uses[k].rank == rank and self.uses[k].buffer == buffer:
                return
        if rank != self.rank and buffer != PUB:
            self.head_only = False
        if rank != self.rank and buffer == OUT:
            self.reads_results = True
        if self.used == self.uses_room:
            more = <Use *>realloc(self.uses, (2 * self.uses_room + 8) * sizeof(Use))
            if more == NULL:
                raise MemoryError
            self.uses, self.uses_room = more, 2 * self.uses_room + 8
        self.uses[self.used].rank, self.uses[self.used].buffer = rank, buffer
        self.used += 1


cdef class StoreChoice:
    """The way of the bytes, as the chooser of a run has it; for tests."""

    cdef zbmd_store_choice choice

    def next(self, int ways):
        if not 1 < ways <= ZBMD_WAYS:
            raise ValueError(f"{ways} ways")
        return zbmd_store_next(&self.choice, ways)

    def note(self, int way, double cost):
        if not 0 <= way < ZBMD_WAYS:
            raise ValueError(f"way {way}")
        zbmd_store_note(&self.choice, way, cost)
