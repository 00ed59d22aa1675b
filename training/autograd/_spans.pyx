# cython: boundscheck=False, wraparound=False, cdivision=True
"""Spans of a step's time. See _spans.pyi."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport PyObject
from libc.stdint cimport int16_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, qsort
from libc.string cimport memset

from zbmd.collectives.flight._flight cimport F_RUNNING, Flight, FlightRing

from zbmd.transport.errors import LocalProtocolError

cdef extern from "transport/native/segment.h" nogil:
    uint64_t zbmd_now_ns()

cdef extern from *:
    """
    /* The recorder of this thread's spans; borrowed from the Recording that set it. */
    static _Thread_local PyObject *zbmd_spans_current;
    """
    PyObject *zbmd_spans_current

cdef enum:
    C_FORWARD = 0
    C_BACKWARD = 1
    C_RECOMPUTE = 2
    C_OPTIMIZER = 3
    C_GRAD_CLIP = 4
    C_DATA = 5
    C_TRANSFER = 6
    C_COMM = 7
    C_BUBBLE = 8
    C_CHECKPOINT = 9
    C_EVALUATE = 10
    C_DIGEST = 11
    C_SAMPLE_GEN = 12
    CATEGORIES_COUNT = 13
    NESTED_MAX = 32
    INTERVALS_MAX = 8192     # of a kind, in a step; behind them its overlap is not known
    UNITS_LIMIT = 2048
    GROUPS_LIMIT = 256
    NAMES_LIMIT = 255
    T_STEP = 0
    T_OPERATION = 1
    T_OP = 2

CATEGORIES = (
    "forward", "backward", "recompute", "optimizer", "grad_clip", "data", "host_device", "comm", "bubble",
    "checkpoint", "evaluate", "digest", "sample_gen",
)
PER_UNIT = (C_FORWARD, C_BACKWARD, C_RECOMPUTE)
UNITS_MAX = UNITS_LIMIT
GROUPS_MAX = GROUPS_LIMIT
TRACK_STEP = T_STEP
TRACK_OPERATION = T_OPERATION
TRACK_OP = T_OP

cdef struct Record:          # as `zbmd.training.profiler.files` reads it
    uint64_t begin_ns
    uint64_t end_ns
    uint64_t amount          # of a span: ns of its own; of an operation: bytes
    uint32_t step
    uint32_t sequence        # of an operation, in its group
    int16_t unit             # -1: none
    uint16_t group
    uint8_t category         # of an operation or an op: which of the recorder's names
    uint8_t track
    uint8_t depth
    uint8_t spare

cdef struct Open:
    uint64_t begin_ns
    uint64_t inner_ns        # of it spent in spans within
    int category
    int unit
    bint is_pass             # of its unit, and no part of one

cdef struct Interval:
    uint64_t begin_ns
    uint64_t end_ns

cdef struct Intervals:
    Interval *at
    size_t count
    size_t dropped

RECORD_BYTES = sizeof(Record)


cdef int by_begin(const void *a, const void *b) noexcept nogil:
    cdef uint64_t first = (<const Interval *>a).begin_ns, second = (<const Interval *>b).begin_ns
    return (first > second) - (first < second)


cdef inline void keep(Intervals *into, uint64_t begin_ns, uint64_t end_ns) noexcept nogil:
    if into.count == INTERVALS_MAX:
        into.dropped += 1
        return
    into.at[into.count].begin_ns, into.at[into.count].end_ns = begin_ns, end_ns
    into.count += 1


cdef uint64_t united(Intervals *these) noexcept nogil:
    """Make them disjoint and sorted; how long they are together."""
    cdef size_t i, last = 0
    cdef uint64_t total = 0
    if these.count == 0:
        return 0
    qsort(these.at, these.count, sizeof(Interval), by_begin)
    for i in range(1, these.count):
        if these.at[i].begin_ns <= these.at[last].end_ns:
            if these.at[i].end_ns > these.at[last].end_ns:
                these.at[last].end_ns = these.at[i].end_ns
        else:
            last += 1
            these.at[last] = these.at[i]
    these.count = last + 1
    for i in range(these.count):
        total += these.at[i].end_ns - these.at[i].begin_ns
    return total


cdef uint64_t shared(Intervals *a, Intervals *b) noexcept nogil:
    """The length of both, each disjoint and sorted."""
    cdef size_t i = 0, j = 0
    cdef uint64_t total = 0, begin_ns, end_ns
    while i < a.count and j < b.count:
        begin_ns = max(a.at[i].begin_ns, b.at[j].begin_ns)
        end_ns = min(a.at[i].end_ns, b.at[j].end_ns)
        if begin_ns < end_ns:
            total += end_ns - begin_ns
        if a.at[i].end_ns < b.at[j].end_ns:
            i += 1
        else:
            j += 1
    return total


cdef class SpanRecorder:
    """Spans of one rank's steps. For one thread at a time, under the GIL."""

    cdef Py_buffer view
    cdef bint viewed
    cdef Record *records
    cdef uint64_t *written
    cdef uint64_t capacity
    cdef Open stack[NESTED_MAX]
    cdef int depth
    cdef int comm_depth
    cdef readonly int units
    cdef bint running
    cdef uint32_t number
    cdef uint64_t begin_ns
    cdef uint64_t *sums          # categories by units and, last, no unit
    cdef uint32_t *counts
    cdef Intervals waits
    cdef Intervals tops
    cdef Intervals operations
    cdef list flights            # of (ring, place, how many seen), the open groups
    cdef readonly list names
    cdef readonly int groups

    def __cinit__(self, buffer, int units):
        if not 0 <= units <= UNITS_LIMIT:
            raise ValueError(f"{units} units")
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.viewed = True
        if self.view.len < <Py_ssize_t>(sizeof(uint64_t) + sizeof(Record)):
            raise ValueError("a ring holds one record at least")
        self.written = <uint64_t *>self.view.buf
        self.records = <Record *>(<char *>self.view.buf + sizeof(uint64_t))
        self.capacity = (self.view.len - sizeof(uint64_t)) // sizeof(Record)
        self.units = units
        self.sums = <uint64_t *>calloc(CATEGORIES_COUNT * (units + 1), sizeof(uint64_t))
        self.counts = <uint32_t *>calloc(CATEGORIES_COUNT * (units + 1), sizeof(uint32_t))
        self.waits.at = <Interval *>calloc(INTERVALS_MAX, sizeof(Interval))
        self.tops.at = <Interval *>calloc(INTERVALS_MAX, sizeof(Interval))
        self.operations.at = <Interval *>calloc(INTERVALS_MAX, sizeof(Interval))
        if not (self.sums and self.counts and self.waits.at and self.tops.at and self.operations.at):
            raise MemoryError
        self.flights, self.names, self.groups = [], [], 0

    def __dealloc__(self):
        if self.viewed:
            PyBuffer_Release(&self.view)
        free(self.sums)
        free(self.counts)
        free(self.waits.at)
        free(self.tops.at)
        free(self.operations.at)

    def release(self):
        if self.depth:
            raise LocalProtocolError("a span is open")
        self.running, self.capacity = False, 0
        if self.viewed:
            self.viewed = False
            PyBuffer_Release(&self.view)

    # ---- spans

    cdef void enter(self, int category, int unit) noexcept:
        cdef Open *mine
        if category == C_COMM:
            self.comm_depth += 1
        if self.depth < NESTED_MAX:
            mine = &self.stack[self.depth]
            mine.category, mine.inner_ns, mine.is_pass = category, 0, unit >= 0 or category == C_RECOMPUTE
            mine.unit = self.stack[self.depth - 1].unit if unit < 0 and self.depth else unit
            mine.begin_ns = zbmd_now_ns()
        self.depth += 1

    cdef void leave(self, int category) noexcept:
        cdef Open *mine
        cdef uint64_t end_ns, took_ns
        self.depth -= 1
        if self.depth < NESTED_MAX:
            mine = &self.stack[self.depth]
            end_ns = zbmd_now_ns()
            took_ns = end_ns - mine.begin_ns
            if self.depth:
                self.stack[self.depth - 1].inner_ns += took_ns
            if self.running:
                self.count(mine.category, mine.unit, took_ns - mine.inner_ns, mine.is_pass)
                self.write(T_STEP, mine.begin_ns, end_ns, took_ns - mine.inner_ns, mine.category, mine.unit)
                if self.depth == 0:
                    keep(&self.tops, mine.begin_ns, end_ns)
                if category == C_COMM and self.comm_depth == 1:
                    keep(&self.waits, mine.begin_ns, end_ns)
        if category == C_COMM:
            self.comm_depth -= 1

    cdef void count(self, int category, int unit, uint64_t own_ns, bint is_pass) noexcept:
        cdef int place = category * (self.units + 1) + (unit if 0 <= unit < self.units else self.units)
        self.sums[place] += own_ns
        self.counts[place] += is_pass

    cdef Record *write(self, int track, uint64_t begin_ns, uint64_t end_ns, uint64_t amount, int category,
                       int unit) noexcept:
        cdef Record *into = &self.records[self.written[0] % self.capacity]
        into.begin_ns, into.end_ns, into.amount = begin_ns, end_ns, amount
        into.step, into.sequence, into.group = self.number, 0, 0
        into.unit, into.category, into.track, into.depth = unit, category, track, self.depth
        self.written[0] += 1
        return into

    def add(self, int category, uint64_t begin_ns, uint64_t end_ns):
        if not 0 <= category < CATEGORIES_COUNT:
            raise ValueError(category)
        if self.depth:
            raise LocalProtocolError("spans are open: enter this one too")
        if not self.running or end_ns <= begin_ns:
            return
        begin_ns = max(begin_ns, self.begin_ns)
        if self.tops.count:
            begin_ns = max(begin_ns, self.tops.at[self.tops.count - 1].end_ns)
        if end_ns <= begin_ns:
            return
        self.count(category, -1, end_ns - begin_ns, False)
        self.write(T_STEP, begin_ns, end_ns, end_ns - begin_ns, category, -1)
        keep(&self.tops, begin_ns, end_ns)
        if category == C_COMM:
            keep(&self.waits, begin_ns, end_ns)

    # ---- groups

    def follow(self, FlightRing ring not None):
        if self.groups >= GROUPS_LIMIT:
            return -1
        self.flights.append([ring, self.groups, ring.begun, {}])
        self.groups += 1
        return self.groups - 1

    def forget(self, int group):
        if self.running:
            self.take_flights(zbmd_now_ns())
        self.flights = [entry for entry in self.flights if entry[1] != group]

    cdef take_flights(self, uint64_t end_ns):
        """The operations that have ended since they were taken last."""
        cdef FlightRing ring
        cdef Flight *found
        cdef Record *into
        cdef uint64_t number
        cdef int name
        for entry in self.flights:
            ring = entry[0]
            number = entry[2]
            if number + ring.capacity < ring.begun:
                self.operations.dropped += ring.begun - ring.capacity - number
                number = ring.begun - ring.capacity
            while number < ring.begun:
                found = &ring.records[number % ring.capacity]
                if found.state == F_RUNNING or found.end_ns > end_ns:
                    break
                name = self.name_of(entry[3], ring, found.call)
                if found.end_ns > self.begin_ns:
                    keep(&self.operations, max(found.start_ns, self.begin_ns), found.end_ns)
                into = self.write(T_OPERATION, found.start_ns, found.end_ns, found.nbytes, name, -1)
                into.sequence, into.group = <uint32_t>found.sequence, entry[1]
                number += 1
            entry[2] = number

    cdef int name_of(self, dict known, FlightRing ring, int call) except -1:
        name = known.get(call)
        if name is None:
            name = known[call] = self.number_of(ring.names[call][0])
        return name

    cdef int number_of(self, str operation) except -1:
        if operation not in self.names and len(self.names) < NAMES_LIMIT:
            self.names.append(operation)
        return self.names.index(operation) if operation in self.names else NAMES_LIMIT

    def op(self, str name not None, int unit, uint64_t begin_ns, uint64_t end_ns, uint64_t own_ns):
        if self.running:
            self.write(T_OP, begin_ns, end_ns, own_ns, self.number_of(name), unit)

    # ---- steps

    def begin_step(self, uint32_t number, uint64_t at_ns=0):
        """The step before ends here, and is returned; None if there was none."""
        if self.depth:
            raise LocalProtocolError("a step begins in the middle of a span")
        if not self.capacity:
            raise LocalProtocolError("this recorder is released")
        at_ns = at_ns or zbmd_now_ns()
        ended = self.ended(at_ns)
        self.running, self.number, self.begin_ns = True, number, at_ns
        return ended

    def end_step(self, uint64_t at_ns=0):
        if self.depth:
            raise LocalProtocolError("a step ends in the middle of a span")
        ended = self.ended(at_ns or zbmd_now_ns())
        self.running = False
        return ended

    cdef ended(self, uint64_t end_ns):
        cdef uint64_t together_ns, waited_ns, beside_ns
        cdef int row = self.units + 1, category, unit
        if not self.running:
            return None
        self.take_flights(end_ns)
        known = not (self.operations.dropped or self.waits.dropped or self.tops.dropped)
        together_ns = united(&self.operations)
        united(&self.waits)
        united(&self.tops)
        waited_ns = shared(&self.operations, &self.waits)
        beside_ns = shared(&self.operations, &self.tops)
        totals = [0] * CATEGORIES_COUNT
        for category in range(CATEGORIES_COUNT):
            for unit in range(row):
                totals[category] += self.sums[category * row + unit]
        by_unit = [
            (
                [self.sums[category * row + unit] for unit in range(self.units)],
                [self.counts[category * row + unit] for unit in range(self.units)],
            )
            for category in PER_UNIT
        ]
        memset(self.sums, 0, CATEGORIES_COUNT * row * sizeof(uint64_t))
        memset(self.counts, 0, CATEGORIES_COUNT * row * sizeof(uint32_t))
        self.waits.count = self.tops.count = self.operations.count = 0
        self.waits.dropped = self.tops.dropped = self.operations.dropped = 0
        overlap = (together_ns, waited_ns, beside_ns - min(beside_ns, waited_ns)) if known else None
        return self.number, self.begin_ns, end_ns, totals, by_unit, overlap

    def recording(self):
        return Recording(self)


cdef class Recording:
    """Has a thread's spans go to a recorder."""

    cdef SpanRecorder recorder
    cdef PyObject *before

    def __cinit__(self, SpanRecorder recorder not None):
        self.recorder = recorder

    def __enter__(self):
        self.before = zbmd_spans_current
        globals_set(self.recorder)

    def __exit__(self, kind, error, trace):
        restore(self.before)


cdef void globals_set(SpanRecorder recorder) noexcept:
    global zbmd_spans_current
    zbmd_spans_current = <PyObject *>recorder


cdef void restore(PyObject *before) noexcept:
    global zbmd_spans_current
    zbmd_spans_current = before


cdef class Span:
    """See _spans.pyi. Without state, so one serves all threads."""

    cdef readonly int category
    cdef readonly int unit
    cdef list units

    def __cinit__(self, int category, int unit=-1):
        if not 0 <= category < CATEGORIES_COUNT or not -1 <= unit < UNITS_LIMIT:
            raise ValueError((category, unit))
        self.category, self.unit, self.units = category, unit, []

    def __getitem__(self, int unit):
        if unit < 0:
            raise IndexError(unit)
        while len(self.units) <= unit:
            self.units.append(Span(self.category, len(self.units)))
        return <Span>self.units[unit]

    def __enter__(self):
        if zbmd_spans_current != NULL:
            (<SpanRecorder><object>zbmd_spans_current).enter(self.category, self.unit)

    def __exit__(self, kind, error, trace):
        if zbmd_spans_current != NULL:
            (<SpanRecorder><object>zbmd_spans_current).leave(self.category)


FORWARD = Span(C_FORWARD)
BACKWARD = Span(C_BACKWARD)
RECOMPUTE = Span(C_RECOMPUTE)
OPTIMIZER = Span(C_OPTIMIZER)
GRAD_CLIP = Span(C_GRAD_CLIP)
DATA = Span(C_DATA)
TRANSFER = Span(C_TRANSFER)
COMM = Span(C_COMM)
BUBBLE = Span(C_BUBBLE)
CHECKPOINT = Span(C_CHECKPOINT)
EVALUATE = Span(C_EVALUATE)
DIGEST = Span(C_DIGEST)
SAMPLE_GEN = Span(C_SAMPLE_GEN)
