# cython: boundscheck=False, wraparound=False, cdivision=True
"""When each rank of a large group is done: its programs walked in time over a model of a network.

See _timeline.pyi.
"""

from libc.math cimport NAN, fmax
from libc.stdint cimport int8_t, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

import numpy as np

from zbmd.collectives.native._stepper cimport COPY, FINISH, NOTIFY, PUT, REDUCE, WAIT, WIDTH, step

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


cdef enum:
    ROOM_KEPT = 64  # a mailbox of more room is freed once it is empty

cdef struct Mail:
    # Notifications from one neighbour: when the one numbered `count` arrives, for those not yet waited for.
    # The latest is in `last`; there is room elsewhere once two have not been waited for.
    double *at
    uint32_t room
    uint32_t waited
    double last


cdef struct Reads:
    # Requests to other hosts for data to reduce, and when each arrives.
    double *at
    uint32_t room
    uint32_t asked
    uint32_t taken


cdef class Timeline:
    cdef int n
    cdef list _codes
    cdef const int32_t **code
    cdef int64_t *length
    cdef const int64_t[::1] first
    cdef const int32_t[::1] peers, back
    cdef const int32_t[::1] host, port
    cdef double near_ns, far_ns, post_ns, near_ns_per_byte, far_ns_per_byte, own_ns_per_byte, chunk_bytes
    cdef uint32_t reads_ahead
    cdef Mail *mail
    cdef Reads *reads
    cdef uint64_t[::1] received
    cdef int64_t[::1] pc, looked
    cdef double[::1] landing
    cdef int8_t[::1] asking
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
        self.reads = NULL
        self.heap_at = NULL
        self.heap_rank = NULL
        self.woken = NULL

    def __init__(self, list codes not None, const int32_t[::1] which not None, const int64_t[::1] first not None,
                 const int32_t[::1] peers not None, const int32_t[::1] back not None,
                 const int32_t[::1] host not None, const int32_t[::1] port not None, *, int ports, double near_ns, double far_ns, double post_ns,
                 double near_ns_per_byte, double far_ns_per_byte, double own_ns_per_byte, double chunk_bytes,
                 uint32_t reads_ahead):
        cdef const int32_t[:, ::1] code
        cdef int64_t i
        self.n = which.shape[0]
        if not first.shape[0] - 1 == host.shape[0] == port.shape[0] == self.n or back.shape[0] != peers.shape[0]:
            raise ValueError("the tables are not of one group")
        if first[0] != 0 or first[self.n] != peers.shape[0] or np.min(np.diff(first)) < 0:
            raise ValueError("the neighbours are not in the order of the ranks")
        if ports < 1 or np.min(port) < 0 or np.max(port) >= ports:
            raise ValueError("a rank's port is out of bounds")
        self._codes = codes
        self._check_neighbours(first, peers, back)
        self.first, self.peers, self.back, self.host, self.port = first, peers, back, host, port
        self.near_ns, self.far_ns, self.post_ns = near_ns, far_ns, post_ns
        self.near_ns_per_byte, self.far_ns_per_byte = near_ns_per_byte, far_ns_per_byte
        self.own_ns_per_byte, self.chunk_bytes = own_ns_per_byte, chunk_bytes
        self.reads_ahead = max(1, reads_ahead)
        self.code = <const int32_t **>malloc(self.n * sizeof(void *))
        self.length = <int64_t *>malloc(self.n * sizeof(int64_t))
        self.mail = <Mail *>calloc(peers.shape[0] + 1, sizeof(Mail))
        self.reads = <Reads *>calloc(self.n, sizeof(Reads))
        self.heap_at = <double *>malloc(self.n * sizeof(double))
        self.heap_rank = <int32_t *>malloc(self.n * sizeof(int32_t))
        self.woken = <int32_t *>malloc(self.n * sizeof(int32_t))
        if not (self.code and self.length and self.mail and self.reads and self.heap_at and self.heap_rank and self.woken):
            raise MemoryError
        for i in range(self.n):
            code = codes[which[i]]
            self._check(code, i)
            self.code[i] = &code[0, 0] if code.shape[0] else NULL
            self.length[i] = code.shape[0]
        self.received = np.zeros(peers.shape[0] + 1, np.uint64)
        self.pc, self.looked = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        self.state, self.asking = np.zeros(self.n, np.int8), np.zeros(self.n, np.int8)
        self.landing = np.zeros(self.n)
        self.leaving, self.coming, self.crossed = np.zeros(ports), np.zeros(ports), np.zeros(ports)

    def __dealloc__(self):
        cdef int64_t i
        if self.mail != NULL and self.peers is not None:
            for i in range(self.peers.shape[0]):
                free(self.mail[i].at)
        if self.reads != NULL:
            for i in range(self.n):
                free(self.reads[i].at)
        free(self.mail)
        free(self.reads)
        free(self.code)
        free(self.length)
        free(self.heap_at)
        free(self.heap_rank)
        free(self.woken)

    cdef _check_neighbours(self, const int64_t[::1] first, const int32_t[::1] peers, const int32_t[::1] back):
        """Everybody is a neighbour of its neighbours, under the number that it is said to have."""
        cdef int64_t i
        cdef int32_t rank, peer
        for rank in range(self.n):
            for i in range(first[rank], first[rank + 1]):
                peer = peers[i]
                if not 0 <= peer < self.n or not 0 <= back[i] < first[peer + 1] - first[peer]:
                    raise ValueError(f"rank {rank} has a neighbour that is none")
                if peers[first[peer] + back[i]] != rank:
                    raise ValueError(f"rank {rank} is not the neighbour of rank {peer} that it should be")

    cdef _check(self, const int32_t[:, ::1] code, int64_t rank):
        cdef int64_t i
        cdef int64_t width = self.first[rank + 1] - self.first[rank]
        cdef int column, k
        if code.shape[1] != WIDTH:
            raise ValueError(f"an encoding has {WIDTH} columns, not {code.shape[1]}")
        for i in range(code.shape[0]):
            if not PUT <= code[i, 0] <= FINISH:
                raise ValueError(f"row {i} encodes no instruction")
            for column in (PEER, FIRST, SECOND):
                k = code[i, column]
                if not OWN <= k < width:
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
                if self.asking[rank]:
                    self._ask(rank)
                else:
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
        """Walk on to the next instruction that needs a port, which has to wait for its turn in time.

        What is read of other hosts up to the next wait is asked for first (`remote_walk.py`).
        """
        cdef int64_t at
        cdef const int32_t *row
        self.state[rank] = READY
        while True:
            at = step(self.code[rank], self.length[rank], self.pc[rank], &self.received[self.first[rank]])
            if at == ENDED_NOW:
                self.clock[rank] = fmax(self.clock[rank], self.landing[rank])
                self.state[rank] = ENDED
                return
            if self.clock[rank] >= self.dies[rank]:
                self.state[rank] = DEAD
                return
            if at == BLOCKED_NOW:
                self.state[rank] = BLOCKED_AT_WAIT
                return
            self.asking[rank] = self._has_to_ask(rank)
            row = self.code[rank] + at * WIDTH
            if self.asking[rank] or (row[0] == PUT and self._far(rank, row[PEER])):
                self._push(rank)
                return
            self._perform(rank)

    cdef bint _far(self, int32_t rank, int32_t k) noexcept nogil:
        return k != OWN and self.host[rank] != self.host[self.peers[self.first[rank] + k]]

    cdef bint _has_to_ask(self, int32_t rank) noexcept nogil:
        """Whether there is a read of another host before the next wait that was not asked for, at `looked`."""
        cdef const int32_t *row
        cdef int64_t at = self.looked[rank]
        if at < self.pc[rank]:
            at = self.pc[rank]
        while at < self.length[rank]:
            row = self.code[rank] + at * WIDTH
            if row[0] == WAIT:
                break
            if row[0] >= REDUCE and (self._far(rank, row[FIRST]) or (row[0] == REDUCE and self._far(rank, row[SECOND]))):
                self.looked[rank] = at
                return row[0] == COPY or self.reads[rank].asked - self.reads[rank].taken < self.reads_ahead
            at += 1
        self.looked[rank] = at
        return False

    cdef void _ask(self, int32_t rank) noexcept nogil:
        """Ask for what the instruction at `looked` reads of other hosts. A copy lands where it belongs."""
        cdef const int32_t *row = self.code[rank] + self.looked[rank] * WIDTH
        self.looked[rank] += 1
        self.asking[rank] = False
        if row[0] == COPY:
            self.landing[rank] = fmax(self.landing[rank], self._fetch(rank, row[FIRST]))
            return
        if self._far(rank, row[FIRST]):
            self._remember(&self.reads[rank], self._fetch(rank, row[FIRST]))
        if self._far(rank, row[SECOND]):
            self._remember(&self.reads[rank], self._fetch(rank, row[SECOND]))

    cdef double _fetch(self, int32_t rank, int32_t k) noexcept nogil:
        """When what is asked for now has come; who asks goes on at once."""
        cdef int32_t owner = self.peers[self.first[rank] + k]
        self.clock[rank] += self.post_ns
        return self._cross(
            owner, rank, fmax(self.clock[rank] + self.far_ns, self.leaving[self.port[owner]]),
            self.chunk_bytes * self.far_ns_per_byte
        )

    cdef void _remember(self, Reads *reads, double comes) noexcept nogil:
        cdef uint32_t room, i
        cdef double *at
        if reads.asked - reads.taken == reads.room:
            room = 2 * reads.room if reads.room else 4
            at = <double *>malloc(room * sizeof(double))
            if at == NULL:
                self.exhausted = True
                return
            for i in range(reads.taken, reads.asked):
                at[i % room] = reads.at[i % reads.room]
            free(reads.at)
            reads.at, reads.room = at, room
        reads.at[reads.asked % reads.room] = comes
        reads.asked += 1

    cdef void _perform(self, int32_t rank) noexcept nogil:
        cdef const int32_t *row = self.code[rank] + self.pc[rank] * WIDTH
        cdef double arrives
        self.pc[rank] += 1
        self.steps += 1
        if row[0] == WAIT:
            self._meet(rank, row[PEER], row[COUNT])
        elif row[0] == NOTIFY:
            self.clock[rank] = fmax(self.clock[rank], self.landing[rank]) + self.post_ns
            arrives = self.clock[rank] + (self.far_ns if self._far(rank, row[PEER]) else self.near_ns)
            self._notify(rank, row[PEER], arrives)
        elif row[0] == PUT:
            self.clock[rank] = fmax(self.clock[rank], self.landing[rank]) + self.post_ns
            self._notify(rank, row[PEER], self._put(rank, row[PEER]))
        elif row[0] == COPY:
            if not self._far(rank, row[FIRST]):
                self._read(rank, row[FIRST])
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
        arrives = self._cross(rank, self.peers[self.first[rank] + k], self.clock[rank], takes)
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
        """Read a chunk: from own memory or the host's by loads; of another host it was asked for."""
        cdef Reads *reads = &self.reads[rank]
        if self._far(rank, k):
            self.clock[rank] = fmax(self.clock[rank], reads.at[reads.taken % reads.room])
            reads.taken += 1
        elif k == OWN:
            self.clock[rank] += self.chunk_bytes * self.own_ns_per_byte
        else:
            self.clock[rank] += self.chunk_bytes * self.near_ns_per_byte

    cdef void _notify(self, int32_t rank, int32_t k, double arrives) noexcept nogil:
        cdef int32_t peer = self.peers[self.first[rank] + k]
        cdef int32_t mine = self.back[self.first[rank] + k]
        cdef int64_t box = self.first[peer] + mine
        cdef Mail *mail = &self.mail[box]
        cdef const int32_t *row
        cdef uint64_t count = self.received[box] + 1
        cdef uint32_t due = <uint32_t>(count - mail.waited)
        if due > 1 and due > mail.room and not self._grow(mail, count):
            self.exhausted = True
            return
        mail.last = fmax(mail.last, arrives)
        if mail.room:
            mail.at[count % mail.room] = mail.last
        self.received[box] = count
        if self.state[peer] == BLOCKED_AT_WAIT:
            row = self.code[peer] + self.pc[peer] * WIDTH
            if row[PEER] == mine and <uint64_t>row[COUNT] <= count:
                self.state[peer] = READY
                self.woken[self.waking] = peer
                self.waking += 1

    cdef bint _grow(self, Mail *mail, uint64_t count) noexcept nogil:
        """Make room for one more: those before `count` that were not waited for are kept."""
        cdef uint32_t room = 2 * mail.room if mail.room else 4
        cdef double *at = <double *>malloc(room * sizeof(double))
        cdef uint64_t i
        if at == NULL:
            return False
        if not mail.room:
            at[(count - 1) % room] = mail.last
        else:
            for i in range(<uint64_t>mail.waited + 1, count):
                at[i % room] = mail.at[i % mail.room]
        free(mail.at)
        mail.at, mail.room = at, room
        return True

    cdef void _meet(self, int32_t rank, int32_t k, uint64_t count) noexcept nogil:
        cdef int64_t box = self.first[rank] + k
        cdef Mail *mail = &self.mail[box]
        if count <= mail.waited:
            return
        self.clock[rank] = fmax(self.clock[rank], mail.at[count % mail.room] if mail.room else mail.last)
        mail.waited = <uint32_t>count
        if mail.room > ROOM_KEPT and self.received[box] == count:
            free(mail.at)
            mail.at, mail.room = NULL, 0

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
