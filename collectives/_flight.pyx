# cython: boundscheck=False, wraparound=False
"""The flight recorder's ring. See _flight.pyi."""

from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free

RUNNING = F_RUNNING
COMPLETE = F_COMPLETE
FAILED = F_FAILED


cdef class FlightRing:
    """The latest operations; written by whoever has the communicator's turn, read under the GIL."""

    def __cinit__(self, uint64_t capacity):
        if capacity < 1:
            raise ValueError("a ring holds one record at least")
        self.records = <Flight *>calloc(capacity, sizeof(Flight))
        if self.records == NULL:
            raise MemoryError
        self.capacity, self.begun = capacity, 0
        self.names, self.numbers, self.errors = [], {}, {}

    def __dealloc__(self):
        free(self.records)

    def number(self, str operation not None, str algorithm not None):
        name = (operation, algorithm)
        found = self.numbers.get(name)
        if found is None:
            found = self.numbers[name] = len(self.names)
            self.names.append(name)
        return found

    def begin(self, int32_t call, uint64_t sequence, uint64_t nbytes, uint64_t start_ns):
        if not 0 <= call < len(self.names):
            raise IndexError(call)
        self.enter(call, sequence, nbytes, start_ns)

    def end(self, int32_t state, uint64_t met_ns, uint64_t end_ns, str error=""):
        if self.begun == 0:
            raise ValueError("no operation has begun")
        if error:
            self.errors = {at: text for at, text in self.errors.items() if at + self.capacity > self.begun}
            self.errors[self.begun - 1] = error
        self.leave(state, met_ns, end_ns)

    def record(self, uint64_t number):
        """(operation, algorithm, sequence, nbytes, start, met, end, state, error) of the `number`-th begun."""
        cdef Flight *found
        if number >= self.begun or number + self.capacity < self.begun:
            raise IndexError(number)
        found = &self.records[number % self.capacity]
        operation, algorithm = self.names[found.call]
        return (operation, algorithm, found.sequence, found.nbytes, found.start_ns, found.met_ns, found.end_ns,
                found.state, self.errors.get(number, ""))

    cdef void enter(self, int32_t call, uint64_t sequence, uint64_t nbytes, uint64_t start_ns) noexcept nogil:
        cdef Flight *mine = &self.records[self.begun % self.capacity]
        mine.call, mine.state = call, F_RUNNING
        mine.sequence, mine.nbytes = sequence, nbytes
        mine.start_ns, mine.met_ns, mine.end_ns = start_ns, 0, 0
        self.begun += 1

    cdef void leave(self, int32_t state, uint64_t met_ns, uint64_t end_ns) noexcept nogil:
        cdef Flight *mine = &self.records[(self.begun - 1) % self.capacity]
        mine.state, mine.met_ns, mine.end_ns = state, met_ns, end_ns
