# cython: boundscheck=False, wraparound=False, cdivision=True
"""When each rank of a large group is done: its programs walked in time over a model of a network.

See _timeline.pyi.
"""

from libc.math cimport NAN, fmax
from libc.stdint cimport int8_t, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc

import numpy as np

from zbmd.collectives._stepper cimport COPY, NOTIFY, PUT, REDUCE, WAIT, WIDTH, step

cdef enum:
    PEER = 2
    COUNT = 3
    FIRST = 6
    SECOND = 9
    OWN = -1

cdef enum State:
    READY = 0
    BLOCKED_AT_WAIT = 1
    ENDED = 2
    DEAD = 3

cdef int64_t BLOCKED_NOW = -1
cdef int64_t ENDED_NOW = -2


cdef struct Mail:
    # Notifications from one neighbour: when the one numbered `count` arrives, for those not yet waited for.
    double *at
    uint64_t room
    uint64_t waited
    double last


cdef class Timeline:
    cdef int n, width
    cdef list _codes
    cdef const int32_t **code
    cdef int64_t *length
    cdef const int32_t[:, ::1] peers, back
    cdef const int32_t[::1] host, port
    cdef double near_ns, far_ns, post_ns, near_ns_per_byte, far_ns_per_byte, own_ns_per_byte, chunk_bytes
    cdef Mail *mail
    cdef uint64_t[:, ::1] received
    cdef int64_t[::1] pc
    cdef double[::1] clock, dies
    cdef int8_t[::1] state
    cdef double[::1] leaving, coming, crossed
    cdef double *heap_at
    cdef int32_t *heap_rank
    cdef int32_t *woken
    cdef int heaped, waking
    cdef bint exhausted
    cdef readonly int64_t steps

    def __cinit__(self):
        self.code = NULL
        self.length = NULL
        self.mail = NULL
        self.heap_at = NULL
        self.heap_rank = NULL
        self.woken = NULL

    def __init__(self, list codes not None, const int32_t[::1] which not None, const int32_t[:, ::1] peers not None,
                 const int32_t[:, ::1] back not None, const int32_t[::1] host not None,
                 const int32_t[::1] port not None, *, int ports, double near_ns, double far_ns, double post_ns,
                 double near_ns_per_byte, double far_ns_per_byte, double own_ns_per_byte, double chunk_bytes):
        cdef const int32_t[:, ::1] code
        cdef int64_t i
        self.n, self.width = peers.shape[0], peers.shape[1]
        if not which.shape[0] == back.shape[0] == host.shape[0] == port.shape[0] == self.n or back.shape[1] != self.width:
            raise ValueError("the tables are not of one group")
        if ports < 1 or np.min(port) < 0 or np.max(port) >= ports:
            raise ValueError("a rank's port is out of bounds")
        self._codes = codes
        self.peers, self.back, self.host, self.port = peers, back, host, port
        self.near_ns, self.far_ns, self.post_ns = near_ns, far_ns, post_ns
        self.near_ns_per_byte, self.far_ns_per_byte = near_ns_per_byte, far_ns_per_byte
        self.own_ns_per_byte, self.chunk_bytes = own_ns_per_byte, chunk_bytes
        self.code = <const int32_t **>malloc(self.n * sizeof(void *))
        self.length = <int64_t *>malloc(self.n * sizeof(int64_t))
        self.mail = <Mail *>malloc(self.n * self.width * sizeof(Mail))
        self.heap_at = <double *>malloc(self.n * sizeof(double))
        self.heap_rank = <int32_t *>malloc(self.n * sizeof(int32_t))
        self.woken = <int32_t *>malloc(self.n * sizeof(int32_t))
        if not (self.code and self.length and self.mail and self.heap_at and self.heap_rank and self.woken):
            raise MemoryError
        for i in range(self.n * self.width):
            self.mail[i].at, self.mail[i].room, self.mail[i].waited, self.mail[i].last = NULL, 0, 0, 0
        for i in range(self.n):
            code = codes[which[i]]
            self._check(code, i)
            self.code[i] = &code[0, 0] if code.shape[0] else NULL
            self.length[i] = code.shape[0]
        self.received = np.zeros((self.n, self.width), np.uint64)
        self.pc = np.zeros(self.n, np.int64)
        self.state = np.zeros(self.n, np.int8)
        self.leaving, self.coming, self.crossed = np.zeros(ports), np.zeros(ports), np.zeros(ports)

    def __dealloc__(self):
        cdef int64_t i
        if self.mail != NULL:
            for i in range(<int64_t>self.n * self.width):
                free(self.mail[i].at)
        free(self.mail)
        free(self.code)
        free(self.length)
        free(self.heap_at)
        free(self.heap_rank)
        free(self.woken)

    cdef _check(self, const int32_t[:, ::1] code, int64_t rank):
        cdef int64_t i
        cdef int column, k
        if code.shape[1] != WIDTH:
            raise ValueError(f"an encoding has {WIDTH} columns, not {code.shape[1]}")
        for i in range(code.shape[0]):
            if not PUT <= code[i, 0] <= COPY:
                raise ValueError(f"row {i} encodes no instruction")
            for column in (PEER, FIRST, SECOND):
                k = code[i, column]
                if not OWN <= k < self.width or (k != OWN and not 0 <= self.peers[rank, k] < self.n):
                    raise ValueError(f"row {i} has a neighbour that rank {rank} does not have")
            if code[i, 0] in (PUT, NOTIFY, WAIT) and code[i, PEER] == OWN:
                raise ValueError(f"row {i} notifies its own rank")

    def run(self, const double[::1] begin not None, const double[::1] dies not None):
        cdef int32_t rank
        if begin.shape[0] != self.n or dies.shape[0] != self.n:
            raise ValueError("a time is needed for each rank")
        if self.steps:
            raise ValueError("a timeline is run once")
        self.clock, self.dies = np.array(begin), np.array(dies)
        self.heaped = self.waking = 0
        with nogil:
            for rank in range(self.n):
                self._go_on(rank)
                self._wake()
            while self.heaped and not self.exhausted:
                rank = self._pop()
                if self.clock[rank] >= self.dies[rank]:
                    self.state[rank] = DEAD
                    continue
                self._perform(rank)
                self._go_on(rank)
                self._wake()
        if self.exhausted:
            raise MemoryError("no memory for the notifications under way")
        return np.where(np.asarray(self.state) == ENDED, np.asarray(self.clock), NAN), np.asarray(self.crossed)

    cdef void _wake(self) noexcept nogil:
        while self.waking:
            self.waking -= 1
            self._go_on(self.woken[self.waking])

    cdef void _go_on(self, int32_t rank) noexcept nogil:
        """Walk on to the next instruction that needs a port, which has to wait for its turn in time."""
        cdef int64_t at
        cdef const int32_t *row
        self.state[rank] = READY
        while True:
            at = step(self.code[rank], self.length[rank], self.pc[rank], &self.received[rank, 0])
            if at == ENDED_NOW:
                self.state[rank] = ENDED
                return
            if self.clock[rank] >= self.dies[rank]:
                self.state[rank] = DEAD
                return
            if at == BLOCKED_NOW:
                self.state[rank] = BLOCKED_AT_WAIT
                return
            row = self.code[rank] + at * WIDTH
            if self._needs_port(rank, row):
                self._push(rank)
                return
            self._perform(rank)

    cdef bint _far(self, int32_t rank, int32_t k) noexcept nogil:
        return k != OWN and self.host[rank] != self.host[self.peers[rank, k]]

    cdef bint _needs_port(self, int32_t rank, const int32_t *row) noexcept nogil:
        if row[0] == PUT:
            return self._far(rank, row[PEER])
        return row[0] >= REDUCE and (self._far(rank, row[FIRST]) or self._far(rank, row[SECOND]))

    cdef void _perform(self, int32_t rank) noexcept nogil:
        cdef const int32_t *row = self.code[rank] + self.pc[rank] * WIDTH
        cdef double arrives
        self.pc[rank] += 1
        self.steps += 1
        if row[0] == WAIT:
            self._meet(rank, row[PEER], row[COUNT])
        elif row[0] == NOTIFY:
            self.clock[rank] += self.post_ns
            arrives = self.clock[rank] + (self.far_ns if self._far(rank, row[PEER]) else self.near_ns)
            self._notify(rank, row[PEER], arrives)
        elif row[0] == PUT:
            self.clock[rank] += self.post_ns
            self._notify(rank, row[PEER], self._put(rank, row[PEER]))
        else:
            self._read(rank, row[FIRST])
            if row[0] == REDUCE:
                self._read(rank, row[SECOND])
                self.clock[rank] += self.chunk_bytes * self.own_ns_per_byte

    cdef double _put(self, int32_t rank, int32_t k) noexcept nogil:
        """When the chunk has come; the sender goes on as it has left."""
        cdef double takes
        if not self._far(rank, k):
            self.clock[rank] += self.chunk_bytes * self.near_ns_per_byte
            return self.clock[rank] + self.near_ns
        takes = self.chunk_bytes * self.far_ns_per_byte
        self.clock[rank] = fmax(self.clock[rank], self.leaving[self.port[rank]])
        arrives = self._cross(rank, self.peers[rank, k], self.clock[rank], takes)
        self.clock[rank] += takes
        return arrives

    cdef double _cross(self, int32_t source, int32_t target, double begin, double takes) noexcept nogil:
        cdef int32_t out = self.port[source]
        cdef int32_t into = self.port[target]
        cdef double comes
        self.leaving[out] = begin + takes
        self.crossed[out] += self.chunk_bytes
        comes = fmax(begin + self.far_ns, self.coming[into])
        self.coming[into] = comes + takes
        return comes + takes

    cdef void _read(self, int32_t rank, int32_t k) noexcept nogil:
        """Read a chunk: from own memory or the host's by loads, from another host by a request."""
        cdef int32_t owner
        cdef double begin
        if k == OWN:
            self.clock[rank] += self.chunk_bytes * self.own_ns_per_byte
        elif not self._far(rank, k):
            self.clock[rank] += self.chunk_bytes * self.near_ns_per_byte
        else:
            owner = self.peers[rank, k]
            begin = fmax(self.clock[rank] + self.post_ns + self.far_ns, self.leaving[self.port[owner]])
            self.clock[rank] = self._cross(owner, rank, begin, self.chunk_bytes * self.far_ns_per_byte)

    cdef void _notify(self, int32_t rank, int32_t k, double arrives) noexcept nogil:
        cdef int32_t peer = self.peers[rank, k]
        cdef int32_t mine = self.back[rank, k]
        cdef Mail *mail = &self.mail[<int64_t>peer * self.width + mine]
        cdef const int32_t *row
        cdef uint64_t count = self.received[peer, mine] + 1
        if count - mail.waited > mail.room and not self._grow(mail, count):
            self.exhausted = True
            return
        mail.last = fmax(mail.last, arrives)
        mail.at[count % mail.room] = mail.last
        self.received[peer, mine] = count
        if self.state[peer] == BLOCKED_AT_WAIT:
            row = self.code[peer] + self.pc[peer] * WIDTH
            if row[PEER] == mine and <uint64_t>row[COUNT] <= count:
                self.state[peer] = READY
                self.woken[self.waking] = peer
                self.waking += 1

    cdef bint _grow(self, Mail *mail, uint64_t count) noexcept nogil:
        cdef uint64_t room = 2 * mail.room if mail.room else 4
        cdef double *at = <double *>malloc(room * sizeof(double))
        cdef uint64_t i
        if at == NULL:
            return False
        for i in range(mail.waited + 1, count):
            at[i % room] = mail.at[i % mail.room]
        free(mail.at)
        mail.at, mail.room = at, room
        return True

    cdef void _meet(self, int32_t rank, int32_t k, uint64_t count) noexcept nogil:
        cdef Mail *mail = &self.mail[<int64_t>rank * self.width + k]
        if count > mail.waited:
            self.clock[rank] = fmax(self.clock[rank], mail.at[count % mail.room])
            mail.waited = count

    cdef void _push(self, int32_t rank) noexcept nogil:
        cdef double at = self.clock[rank]
        cdef int i = self.heaped
        cdef int above
        self.heaped += 1
        while i:
            above = (i - 1) // 2
            if self.heap_at[above] < at or (self.heap_at[above] == at and self.heap_rank[above] < rank):
                break
            self.heap_at[i], self.heap_rank[i] = self.heap_at[above], self.heap_rank[above]
            i = above
        self.heap_at[i], self.heap_rank[i] = at, rank

    cdef int32_t _pop(self) noexcept nogil:
        cdef int32_t found = self.heap_rank[0]
        cdef double at
        cdef int32_t rank
        cdef int i = 0
        cdef int below
        self.heaped -= 1
        at, rank = self.heap_at[self.heaped], self.heap_rank[self.heaped]
        while 2 * i + 1 < self.heaped:
            below = 2 * i + 1
            if below + 1 < self.heaped and (
                self.heap_at[below + 1] < self.heap_at[below]
                or (self.heap_at[below + 1] == self.heap_at[below] and self.heap_rank[below + 1] < self.heap_rank[below])
            ):
                below += 1
            if at < self.heap_at[below] or (at == self.heap_at[below] and rank < self.heap_rank[below]):
                break
            self.heap_at[i], self.heap_rank[i] = self.heap_at[below], self.heap_rank[below]
            i = below
        self.heap_at[i], self.heap_rank[i] = at, rank
        return found
