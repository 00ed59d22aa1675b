# cython: boundscheck=False, wraparound=False
"""Messages between the members of a group on one host. See _messages.pyi."""

cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport ESRCH, ETIMEDOUT
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from zbmd.transport.native._native cimport zbmd_now_ns
from zbmd.transport.native._slots cimport ZBMD_MAX_SLOTS, zbmd_base, zbmd_load64

cdef extern from "transport/native/segment.h" nogil:
    int ZBMD_CHANNELS, ZBMD_OFF_END, ZBMD_OFF_PARKED, ZBMD_OFF_DOORBELL
    uint64_t ZBMD_PARK_NS
    uint64_t zbmd_cell_offset(uint32_t slot, uint32_t channel)
    uint64_t zbmd_abort_offset(uint32_t channel)
    void zbmd_store64(zbmd_base base, uint64_t off, uint64_t v)
    uint32_t zbmd_load32(zbmd_base base, uint64_t off)
    int zbmd_is_lost(zbmd_base own, uint32_t slot)
    void zbmd_ring(zbmd_base base)
    void zbmd_pause()

cdef extern from "transport/native/life.h" nogil:
    int zbmd_life_ended(zbmd_base peer, uint32_t our_slot)

cdef extern from "collectives/native/peers.h" nogil:
    int zbmd_read_peer_by_two(int32_t pid, uint64_t start, char *to, uint64_t n)

cdef extern from "collectives/native/messages.h" nogil:
    void zbmd_park(zbmd_base own, int change)
    void zbmd_messages_fence()
    uint32_t zbmd_doorbell(zbmd_base own)
    void zbmd_sleep(zbmd_base own, uint32_t seen, uint64_t ns)
    int zbmd_same_kind(const char *theirs, uint32_t length, const char *mine, uint32_t most)
    void zbmd_stage(char *to, const char *source, uint64_t n, uint64_t *copied)
    int zbmd_message_is_readable(uint64_t staged, uint64_t end, uint64_t address, uint64_t n)
    int zbmd_unstage(char *to, const char *source, uint64_t n, const uint64_t *copied, zbmd_base peer, uint32_t slot,
                     uint64_t deadline_ns)

cdef enum:
    SLOTS = 64           # messages of one member to another that are not received yet
    SLOT_BYTES = 256
    LABEL_BYTES = 64
    INLINE_BYTES = 64
    COPIED_BYTES = 65536
    STAGED_BYTES_MIN = 32768
    STAGED_BYTES = 1 << 20  # of a block that a longer message goes through
    BLOCKS = 2           # of them, made for the first such message
    LOOKS = 8            # between two readings of the clock
    PATIENCE_NS_MIN = 1000
    PROBE_WAITS = 32     # one wait of so many looks for as long as any, whatever those before it came to

cnp.import_array()
SLOTS_MAX, MEMBER_BYTES = SLOTS, SLOTS * SLOT_BYTES
LABEL_BYTES_MAX, COPIED_BYTES_MAX = LABEL_BYTES, COPIED_BYTES
STAGED_BYTES_MAX, STAGE_BYTES = STAGED_BYTES, BLOCKS * STAGED_BYTES

cdef enum:
    WAITING_, MOVING_, DONE_, FAILED_
cdef enum:
    NO_FAILURE_, LOST_, LEFT_, ABORTED_, DEADLINE_, MISMATCH_, GIVEN_UP_, UNREADABLE_

LOST, LEFT, ABORTED, DEADLINE = LOST_, LEFT_, ABORTED_, DEADLINE_
MISMATCH, GIVEN_UP, UNREADABLE = MISMATCH_, GIVEN_UP_, UNREADABLE_

cdef struct Slot:            # in the receiver's inbox
    uint64_t number          # of the message; stored last by its sender
    uint64_t withdrawn       # by the sender: its bytes may change
    uint64_t nbytes
    uint64_t address         # in the sender's memory; 0: they are in `data`, or staged
    uint32_t tag
    uint32_t label_bytes
    uint64_t staged          # offset in the sender's segment, or 0
    uint64_t copied, spare   # bytes that are there
    uint64_t taken           # the number of the last message that was received here; by the receiver
    uint64_t spare_too[7]
    char label[LABEL_BYTES]
    char data[INLINE_BYTES]

cdef struct Member:
    char *base
    uint64_t end             # bytes of its segment
    uint32_t slot
    int32_t pid
    Slot *ins                # what it sends us
    Slot *outs               # what we send it
    uint64_t sent            # messages that are in slots, or were
    uint64_t offered         # messages of it that the receives which waited were offered
    uint64_t low             # all up to this have been received
    uint64_t matched[SLOTS]  # the message of each slot that a receive has got
    bint queued, ended, told


cdef inline uint64_t load(const uint64_t *word) noexcept nogil:
    return zbmd_load64(<zbmd_base><char *>word, 0)

cdef inline void store(uint64_t *word, uint64_t value) noexcept nogil:
    zbmd_store64(<zbmd_base><char *>word, 0, value)


cdef class Request:
    """See _messages.pyi."""

    cdef readonly bint sends
    cdef readonly int peer, source, failure
    cdef readonly uint32_t tag
    cdef readonly uint64_t deadline_ns
    cdef readonly bytes label, theirs
    cdef readonly uint64_t their_bytes
    cdef public object error
    cdef readonly uint64_t timeout_ns
    cdef uint64_t number, nbytes, address
    cdef int state
    cdef object memory
    cdef list calls

    @property
    def is_over(self):
        return self.state >= DONE_

    def when_over(self, call):
        if self.state >= DONE_:
            call()
        elif self.calls is None:
            self.calls = [call]
        else:
            self.calls.append(call)

    cdef _end(self, int failure):
        self.failure = failure
        self.state = FAILED_ if failure else DONE_
        self.memory = None
        calls, self.calls = self.calls, None
        if calls is not None:
            for call in calls:
                call()


cdef class MessageSlots:
    """See _messages.pyi."""

    cdef Member *members
    cdef char *own
    cdef readonly int size, rank
    cdef uint32_t channel, epoch, waits
    cdef uint64_t version, patience_ns, patience_most_ns
    cdef readonly int waiters
    cdef int moving
    cdef bint is_over
    cdef list posted, queues, held, blocks
    cdef object mappings, stage, staging

    def __init__(self, list members not None, *, int rank, uint32_t channel, uint32_t epoch, uint64_t patience_ns,
                 object mappings, object stage=None):
        cdef int i
        cdef uintptr_t address
        if self.members != NULL or not 0 <= rank < len(members) or channel >= <uint32_t>ZBMD_CHANNELS:
            raise ValueError("rank or channel out of bounds")
        self.size, self.rank, self.channel, self.epoch = len(members), rank, channel, epoch
        self.patience_ns = self.patience_most_ns = max(patience_ns, <uint64_t>PATIENCE_NS_MIN)
        self.mappings, self.stage, self.staging, self.blocks = mappings, stage, None, []
        self.members = <Member *>calloc(self.size, sizeof(Member))
        if self.members == NULL:
            raise MemoryError
        own_at = members[rank][3]
        for i, (base, slot, pid, at, end) in enumerate(members):
            if not 0 <= slot < ZBMD_MAX_SLOTS or not base or at < ZBMD_OFF_END or at % 64:
                raise ValueError(f"the slots of member {i} are out of bounds")
            self.members[i].base = <char *><uintptr_t>base
            self.members[i].slot, self.members[i].pid, self.members[i].end = slot, pid, end
            address = base + at + rank * MEMBER_BYTES
            self.members[i].outs = <Slot *>address
        self.own = self.members[rank].base
        for i in range(self.size):
            address = <uintptr_t>self.own + <uint64_t>own_at + <uint64_t>i * SLOTS * SLOT_BYTES
            self.members[i].ins = <Slot *>address
        self.posted = []
        self.queues = [[] for _ in members]
        self.held = [{} for _ in members]

    def __dealloc__(self):
        free(self.members)

    @property
    def is_idle(self):
        """Whether no request of this process waits."""
        return not self.posted and not any(self.queues) and not any(self._asks())

    def _asks(self):
        return [request for held in self.held for request in held.values() if type(request) is Request]

    @property
    def copies(self):
        """The members, by place, that have not received a message whose sender has gone on."""
        cdef int i
        found = []
        for i in range(0 if self.is_over else self.size):
            self._reclaim(i)
            kinds = {type(memory) for memory in self.held[i].values()}
            if kinds - {Request} and not self._ended(i) and not self._lost(i):
                found.append(i)
        return found

    def let_go(self):
        if self.waiters or self.moving:
            return False
        self.is_over, self.mappings, self.stage, self.staging, self.blocks = True, None, None, None, []
        self.held = [{} for _ in self.held]
        return True

    @property
    def lost(self):
        """The members, by place, that are known to have ended without closing the group."""
        return [] if self.is_over else [i for i in range(self.size) if self._lost(i)]

    cdef bint _ended(self, int i) noexcept nogil:
        """Whether it has said that nothing more comes."""
        cdef uint64_t last = <uint64_t>self.epoch << 32 | <uint64_t>0xffffffff
        if i == self.rank:
            return False
        return zbmd_load64(self.own, zbmd_cell_offset(self.members[i].slot, self.channel)) >= last

    cdef bint _lost(self, int i) noexcept nogil:
        if i == self.rank or self._ended(i):
            return False
        if zbmd_is_lost(self.own, self.members[i].slot):
            return True
        # A replacement in its slot clears that mark.
        return zbmd_life_ended(self.members[i].base, self.members[self.rank].slot)

    cdef bint _aborted(self) noexcept nogil:
        return zbmd_load64(self.own, zbmd_abort_offset(self.channel)) >> 32 >= self.epoch

    cdef Request _request(self, bint sends, cnp.ndarray x, int peer, uint32_t tag, bytes label, uint64_t timeout_ns):
        cdef Request request = Request.__new__(Request)
        if not cnp.PyArray_IS_C_CONTIGUOUS(x) or not sends and not cnp.PyArray_ISWRITEABLE(x):
            raise ValueError("an array is needed that is in one piece, and can be written to if it receives")
        request.sends, request.peer, request.source, request.tag, request.label = sends, peer, -1, tag, label
        request.memory, request.address, request.nbytes = x, <uint64_t><uintptr_t>cnp.PyArray_DATA(x), cnp.PyArray_NBYTES(x)
        request.timeout_ns, request.deadline_ns = timeout_ns, zbmd_now_ns() + timeout_ns
        return request

    # Sending.

    def send(self, cnp.ndarray x not None, int to, uint32_t tag, bytes label not None, uint64_t timeout_ns):
        cdef Request request = self._request(True, x, to, tag, label, timeout_ns)
        if not 0 <= to < self.size:
            raise IndexError(to)
        if not self.is_over:
            self._reclaim(to)
        cdef int failure = ABORTED_ if self.is_over else self._failure_of(to)
        if failure:
            request._end(failure)
        elif self.queues[to] or not self._has_room(to):
            self.queues[to].append(request)
            self.members[to].queued = True
        else:
            self._publish(request)
        return request

    cdef bint _has_room(self, int to) noexcept nogil:
        cdef Member *member = &self.members[to]
        cdef uint64_t number = member.sent + 1
        return number <= SLOTS or load(&member.outs[number % SLOTS].taken) >= number - SLOTS

    cdef _publish(self, Request request):
        """Fill the next slot, which is free. Memory that is let go last may let other threads in."""
        cdef uint64_t block = self._block(request.nbytes)  # the first one may let other threads in
        cdef Member *member = &self.members[request.peer]
        cdef uint64_t number = member.sent + 1
        cdef Slot *slot = &member.outs[number % SLOTS]
        cdef bytes copy
        member.sent = request.number = number
        slot.nbytes, slot.tag, slot.withdrawn, slot.address = request.nbytes, request.tag, 0, 0
        slot.staged, slot.copied = block, 0
        slot.label_bytes = min(PyBytes_GET_SIZE(request.label), LABEL_BYTES)
        memcpy(slot.label, PyBytes_AS_STRING(request.label), slot.label_bytes)
        if request.nbytes <= INLINE_BYTES:
            memcpy(slot.data, <char *><uintptr_t>request.address, request.nbytes)
        elif block:
            self.held[request.peer][number] = block
        elif request.nbytes <= COPIED_BYTES:
            copy = PyBytes_FromStringAndSize(<char *><uintptr_t>request.address, request.nbytes)
            slot.address = <uint64_t><uintptr_t>PyBytes_AS_STRING(copy)
            self.held[request.peer][number] = copy
        else:
            slot.address = request.address
            self.held[request.peer][number] = request
        store(&slot.number, number)
        zbmd_ring(member.base)
        if block:  # while its receiver begins
            zbmd_stage(self.own + block, <char *><uintptr_t>request.address, request.nbytes, &slot.copied)
        if block or request.nbytes <= COPIED_BYTES:
            request._end(NO_FAILURE_)

    cdef uint64_t _block(self, uint64_t nbytes):
        """Take a block for a message, by its offset in the segment; 0 if there is none, or none is wanted."""
        if not STAGED_BYTES_MIN <= nbytes <= STAGED_BYTES:
            return 0
        if self.stage is not None:
            stage, self.stage = self.stage, None
            self.staging = memory = stage()
            if memory is not None:
                at = <uint64_t><uintptr_t>cnp.PyArray_DATA(<cnp.ndarray>memory) - <uint64_t><uintptr_t>self.own
                self.blocks = [at + i * STAGED_BYTES for i in range(BLOCKS)]
        return self.blocks.pop() if self.blocks else 0

    cdef void _reclaim(self, int to):
        """Let go of what member `to` has received."""
        cdef dict held = self.held[to]
        if not held:
            return
        for number in list(held):
            if load(&self.members[to].outs[<uint64_t>number % SLOTS].taken) >= <uint64_t>number:
                memory = held.pop(number, None)
                if type(memory) is Request:
                    self._over(<Request>memory, NO_FAILURE_)
                elif type(memory) is int:
                    self.blocks.append(memory)

    cdef void _over(self, Request request, int failure):
        request._end(failure)
        self.version += 1
        zbmd_ring(self.own)  # for other threads that wait here

    cdef int _failure_of(self, int to):
        """Why nothing can be sent to a member, or received of it any more; LOST_ if any member is lost."""
        cdef int i
        for i in range(self.size):
            if self._lost(i):
                return LOST_
        if self._aborted():
            return ABORTED_
        return LEFT_ if to >= 0 and self._ended(to) else NO_FAILURE_

    # Receiving.

    def receive(self, cnp.ndarray x not None, int source, uint32_t tag, bytes label not None, uint64_t timeout_ns):
        cdef Request request = self._request(False, x, source, tag, label, timeout_ns)
        if source >= self.size:
            raise IndexError(source)
        if self.is_over:
            request._end(ABORTED_)
            return request
        self.progress()  # what has come belongs to earlier receives first
        if self._find(request):
            self._move(request)
        else:
            self.posted.append(request)
            self.progress()
        return request

    cdef bint _find(self, Request request):
        """Match a new receive with the first message that no earlier one has got."""
        cdef Member *member
        cdef uint64_t number
        cdef int i
        for i in range(self.size):
            if request.peer >= 0 and request.peer != i:
                continue
            member = &self.members[i]
            for number in range(member.low + 1, member.offered + 1):
                if member.matched[number % SLOTS] != number and member.ins[number % SLOTS].tag == request.tag:
                    self._match(request, i, number)
                    return True
        return False

    cdef void _match(self, Request request, int source, uint64_t number) noexcept:
        self.members[source].matched[number % SLOTS] = request.number = number
        request.source, request.state = source, MOVING_

    cdef bint _step(self):
        """Offer the next message that has come to the receives that wait; whether there was one."""
        cdef Member *member
        cdef Request request
        cdef Py_ssize_t place
        cdef int i
        for i in range(self.size):
            member = &self.members[i]
            if not self._has_come(member):
                continue
            member.offered += 1
            for place in range(len(self.posted)):
                request = <Request>self.posted[place]
                if (request.peer < 0 or request.peer == i) and request.tag == member.ins[member.offered % SLOTS].tag:
                    del self.posted[place]
                    self._match(request, i, member.offered)
                    self._move(request)
                    break
            return True
        return False

    cdef bint _has_come(self, const Member *member) noexcept nogil:
        """Whether there is a message of it that has not been offered to the receives that wait."""
        cdef uint64_t next = member.offered + 1
        return next - member.low <= SLOTS and load(&member.ins[next % SLOTS].number) == next

    cdef void _move(self, Request request):
        """Copy a message to where it is wanted."""
        cdef Member *member = &self.members[request.source]
        cdef Slot *slot = &member.ins[request.number % SLOTS]
        cdef uint64_t address = slot.address, nbytes = slot.nbytes, staged = slot.staged
        cdef uint32_t length = min(slot.label_bytes, <uint32_t>LABEL_BYTES)
        cdef int failure = NO_FAILURE_, error = 0
        if nbytes != request.nbytes or not zbmd_same_kind(slot.label, length, PyBytes_AS_STRING(request.label),
                                                               <uint32_t>PyBytes_GET_SIZE(request.label)):
            request.theirs, request.their_bytes = slot.label[:length], nbytes
            member.matched[request.number % SLOTS] = 0
            self._over(request, MISMATCH_)
            return
        if nbytes <= INLINE_BYTES:
            memcpy(<char *><uintptr_t>request.address, slot.data, nbytes)
        elif not zbmd_message_is_readable(staged, member.end, address, nbytes):
            failure = UNREADABLE_
        else:
            self.moving += 1
            with nogil:
                if staged:
                    error = zbmd_unstage(<char *><uintptr_t>request.address, member.base + staged, nbytes, &slot.copied,
                                         member.base, self.members[self.rank].slot, request.deadline_ns)
                else:
                    error = zbmd_read_peer_by_two(member.pid, address, <char *><uintptr_t>request.address, nbytes)
                zbmd_messages_fence()
            self.moving -= 1
            if error == ETIMEDOUT:  # its sender was stopped: it stays for the next receive
                member.matched[request.number % SLOTS] = 0
                self._over(request, DEADLINE_)
                return
            if error == ESRCH or zbmd_life_ended(member.base, self.members[self.rank].slot):
                failure = LOST_
            elif load(&slot.withdrawn) == request.number:
                failure = GIVEN_UP_
            elif error:
                failure = UNREADABLE_
        store(&slot.taken, request.number)
        zbmd_ring(member.base)
        while member.low < member.offered and load(&member.ins[(member.low + 1) % SLOTS].taken) >= member.low + 1:
            member.low += 1
        self._over(request, failure)

    # Both.

    cpdef progress(self):
        cdef int i, failure
        cdef bint newly
        if self.is_over:
            return
        for i in range(self.size):
            self._reclaim(i)
            if self.members[i].queued:
                self._flush(i)
        newly = False
        for i in range(self.size):  # before the look at messages: what it sent is here when it says that it ends
            if not self.members[i].ended and self._ended(i):
                self.members[i].ended = self.members[i].told = newly = True
        failure = self._failure_of(-1)
        while self._step():
            pass
        if failure or newly or self.posted:
            self._fail(failure, newly)

    cdef void _flush(self, int to):
        queue = self.queues[to]
        while queue and self._has_room(to):
            self.version += 1
            self._publish(queue.pop(0))
        self.members[to].queued = bool(self.queues[to])

    cdef void _fail(self, int failure, bint newly):
        """Fail what can have no message any more; a member's end is reported to receives from any that wait, or to the next.

        All is taken out before any is over: what that lets go may let other threads in.
        """
        cdef Request request
        cdef list waiting = [], over = []
        cdef bint reported = False
        cdef int i, why
        for request in self.posted:
            why = failure
            if not why and request.peer >= 0 and self.members[request.peer].ended:
                why = LEFT_
            elif not why and request.peer < 0:
                for i in range(self.size):
                    if self.members[i].told:
                        request.source, why, reported = i, LEFT_, True
            if why:
                over.append((request, why))
            else:
                waiting.append(request)
        self.posted = waiting
        for i in range(self.size):
            self.members[i].told &= not reported
            why = failure or (LEFT_ if newly and self.members[i].ended else 0)
            if why:
                over += [(request, why) for request in self.queues[i]]
                over += [(memory, why) for memory in self.held[i].values() if type(memory) is Request]
                self.queues[i], self.members[i].queued = [], False
                for number, memory in list(self.held[i].items()):
                    if type(memory) is Request:
                        self._withdraw_number(i, number)
        for request, why in over:
            self._over(request, why)

    def withdraw(self, Request request not None):
        if request.state >= MOVING_ or self.is_over:
            return
        if not request.sends:
            self.posted.remove(request)
        elif request.number:
            self._withdraw_number(request.peer, request.number)
        else:
            self.queues[request.peer].remove(request)
        self._over(request, DEADLINE_)

    cdef void _withdraw_number(self, int to, uint64_t number):
        """The bytes of a large message may change from now on: who reads them looks at this last."""
        store(&self.members[to].outs[number % SLOTS].withdrawn, number)
        zbmd_messages_fence()
        self.held[to].pop(number, None)

    def overdue(self, uint64_t now_ns):
        """The requests whose deadline has passed."""
        waiting = [*self.posted, *(request for queue in self.queues for request in queue), *self._asks()]
        return [request for request in waiting if (<Request>request).deadline_ns <= now_ns]

    def wait(self, Request request not None, uint64_t limit_ns):
        cdef uint64_t seen, value = 0, deadline_ns
        cdef const uint64_t *word = NULL
        if request.state >= DONE_:
            return True
        deadline_ns = zbmd_now_ns() + limit_ns
        self.waiters += 1
        try:
            while True:
                seen = self.version
                self.progress()
                if request.state >= DONE_:
                    return True
                if zbmd_now_ns() >= deadline_ns:
                    return False
                word = NULL
                if request.sends and request.number:
                    word, value = &self.members[request.peer].outs[request.number % SLOTS].taken, request.number
                with nogil:
                    self._await(seen, word, value, deadline_ns)
        finally:
            self.waiters -= 1

    cdef bint _changed(self, uint64_t seen, const uint64_t *word, uint64_t value) noexcept nogil:
        cdef Member *member
        cdef int i
        if (<volatile uint64_t *>&self.version)[0] != seen or self._aborted():
            return True
        if word != NULL and load(word) >= value:
            return True
        for i in range(self.size):
            member = &self.members[i]
            if self._has_come(member):
                return True
            if i != self.rank and (not member.ended and self._ended(i) or self._lost(i)):
                return True
            if member.queued and self._has_room(i):
                return True
        return False

    cdef void _await(self, uint64_t seen, const uint64_t *word, uint64_t value, uint64_t deadline_ns) noexcept nogil:
        """Return once something has changed, or the deadline has passed.

        Looking pays if the other side runs on a core of its own; if it waits for this one, parking does. How long to
        look before that follows from what the last waits came to.
        """
        cdef uint32_t bell
        cdef int look
        cdef uint64_t now_ns, park_ns, end_ns
        cdef uint64_t patience_ns = self.patience_ns, least_ns = PATIENCE_NS_MIN
        self.waits += 1
        if self.waits % PROBE_WAITS == 0:
            patience_ns = self.patience_most_ns
        end_ns = zbmd_now_ns() + patience_ns
        while True:
            for look in range(LOOKS):
                if self._changed(seen, word, value):
                    self.patience_ns = min(self.patience_most_ns, 2 * patience_ns)
                    return
                zbmd_pause()
            if zbmd_now_ns() >= end_ns:
                break
        self.patience_ns = max(least_ns, self.patience_ns // 2)
        zbmd_park(self.own, 1)
        while True:
            bell = zbmd_doorbell(self.own)
            now_ns = zbmd_now_ns()
            if self._changed(seen, word, value) or now_ns >= deadline_ns:
                break
            park_ns = min(ZBMD_PARK_NS, deadline_ns - now_ns)
            zbmd_sleep(self.own, bell, park_ns)
        zbmd_park(self.own, -1)

