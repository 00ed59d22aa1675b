# cython: boundscheck=False, wraparound=False
"""The flight recorder's ring. See _flight.pyi."""

from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

RUNNING = F_RUNNING
COMPLETE = F_COMPLETE
FAILED = F_FAILED


cdef class QuickClock:
    """Monotonic time. See quick_clock.h."""

    def __cinit__(self, bint counts):
        memset(&self.clock, 0, sizeof(self.clock))
        self.clock.trusted = counts

    def now_ns(self):
        return zbmd_quick_ns(&self.clock)


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

    def renumber(self, int32_t call):
        if self.begun == 0 or not 0 <= call < len(self.names):
            raise IndexError(call)
        self.relabel(call)

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

    cdef void relabel(self, int32_t call) noexcept nogil:
        self.records[(self.begun - 1) % self.capacity].call = call

    cdef void leave(self, int32_t state, uint64_t met_ns, uint64_t end_ns) noexcept nogil:
        cdef Flight *mine = &self.records[(self.begun - 1) % self.capacity]
        mine.state, mine.met_ns, mine.end_ns = state, met_ns, end_ns


cdef extern from *:
    """
    #include <errno.h>
    #include <semaphore.h>
    #include <signal.h>
    #include <string.h>
    static sem_t zbmd_flight_asked;
    static int zbmd_flight_ignores; /* since we left the signal so */
    static void zbmd_flight_told(int signum) {
        int saved = errno;
        (void)signum;
        sem_post(&zbmd_flight_asked);
        errno = saved;
    }
    /* 1: ours now; 0: somebody else's, and left alone; -1: errno. */
    static int zbmd_flight_listen(int signum) {
        struct sigaction action, before;
        if (sigaction(signum, NULL, &before)) return -1;
        if (before.sa_handler == SIG_IGN ? !zbmd_flight_ignores
                                         : before.sa_handler != SIG_DFL && before.sa_handler != zbmd_flight_told)
            return 0;
        memset(&action, 0, sizeof action);
        action.sa_handler = zbmd_flight_told;
        action.sa_flags = SA_RESTART;
        return sigaction(signum, &action, NULL) ? -1 : 1;
    }
    /* What comes later is ignored: whoever asks must not kill a process that has just closed its groups. */
    static void zbmd_flight_leave(int signum) {
        struct sigaction before;
        if (!sigaction(signum, NULL, &before) && before.sa_handler == zbmd_flight_told) {
            signal(signum, SIG_IGN);
            zbmd_flight_ignores = 1;
        }
    }
    static void zbmd_flight_wait(void) {
        while (sem_wait(&zbmd_flight_asked)) {}
        while (!sem_trywait(&zbmd_flight_asked)) {} /* asked twice is asked */
    }
    static void zbmd_flight_wake(void) { sem_post(&zbmd_flight_asked); }
    static void zbmd_flight_init(void) { sem_init(&zbmd_flight_asked, 0, 0); }
    """
    void zbmd_flight_init()
    int zbmd_flight_listen(int signum)
    void zbmd_flight_leave(int signum)
    void zbmd_flight_wait() nogil
    void zbmd_flight_wake()

zbmd_flight_init()


def listen(int signum):
    cdef int got = zbmd_flight_listen(signum)
    if got < 0:
        raise OSError(f"signal {signum} cannot be taken")
    return got == 1


def leave(int signum):
    zbmd_flight_leave(signum)


def wait():
    with nogil:
        zbmd_flight_wait()


def wake():
    zbmd_flight_wake()
