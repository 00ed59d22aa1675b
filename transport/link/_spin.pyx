"""Spin or park: what is decided whenever a reader runs dry, and whenever it looks again. See _spin.pyi."""

from libc.stdint cimport int64_t

WAIT_WEIGHT_LOG2 = 2
WAIT_SPINS_MAX = 4
CORES_CHECK_NS = 50_000_000
BUSY_CHECK_NS = 500_000
cdef int64_t _WEIGHT_LOG2 = WAIT_WEIGHT_LOG2
cdef int64_t _SPINS_MAX = WAIT_SPINS_MAX
cdef int64_t _CORES_CHECK_NS = CORES_CHECK_NS
cdef int64_t _BUSY_CHECK_NS = BUSY_CHECK_NS

# The places of `SpinChoice`.
cdef enum:
    SPIN = 0
    OFF = 1
    ONE_PROCESSOR = 2
    NO_SPARE_PROCESSOR = 3
    TOO_LONG = 4
    CHOICES = 5


cdef class SpareCore:
    def __cinit__(self, *_, **__):
        self._check_at_ns = 0
        self._busy_for_ns = _BUSY_CHECK_NS
        self._spare = True

    def spare(self, int64_t now_ns):
        return self.is_spare(now_ns)

    cdef bint is_spare(self, int64_t now_ns) except -1:
        if now_ns < self._check_at_ns:
            return self._spare
        self._spare = self._runnable() <= self._processors
        self._check_at_ns = now_ns + (_CORES_CHECK_NS if self._spare else self._busy_for_ns)
        self._busy_for_ns = _BUSY_CHECK_NS if self._spare else min(2 * self._busy_for_ns, _CORES_CHECK_NS)
        return self._spare


cdef class SpinCore:
    def _begin(self, int64_t spin_ns, SpareCore spare not None, int64_t processors, tuple choices not None):
        if len(choices) != CHOICES:
            raise ValueError(f"{len(choices)} choices, {CHOICES} are known")
        self._spin_ns, self._spare, self._processors, self._choices = spin_ns, spare, processors, choices
        self._wait_ns = self._dry_ns = self._end_ns = 0
        self._waits = False
        self.choice = choices[OFF]
        self.parks = dict.fromkeys(choices, 0)

    cpdef object _choose(self, int64_t now_ns):
        cdef int choice = SPIN
        if not self._spin_ns:
            choice = OFF
        elif self._wait_ns > self._spin_ns:
            choice = TOO_LONG
        elif self._processors < 2:
            choice = ONE_PROCESSOR
        elif not self._spare.is_spare(now_ns):
            choice = NO_SPARE_PROCESSOR
        return self._choices[choice]

    cpdef bint begins(self, int64_t now_ns) except -1:
        self._dry_ns, self._waits = now_ns, True
        self.choice = choice = self._choose(now_ns)
        if choice is not self._choices[SPIN]:
            self.parks[choice] += 1
            return False
        self._end_ns = now_ns + self._spin_ns
        return True

    cpdef bint goes_on(self, int64_t now_ns) except -1:
        if now_ns < self._end_ns:
            return True
        self.parks[self._choices[SPIN]] += 1
        return False

    cpdef int came(self, int64_t now_ns) except -1:
        cdef int64_t waited_ns
        if self._waits:
            waited_ns = min(now_ns - self._dry_ns, _SPINS_MAX * self._spin_ns)
            self._wait_ns += (waited_ns - self._wait_ns) >> _WEIGHT_LOG2
            self._waits = False
        return 0
