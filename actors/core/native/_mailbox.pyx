"""Mailboxes and what waits in them: what runs at every message. See _mailbox.pyi."""

cimport cython
from libc.stdint cimport int64_t

from collections import deque

from zbmd.actors.errors import DeadActor, MailboxFull

cdef enum:
    DELIVERY_BYTES = 256  # the message's object, its `Delivery`, its place
    VALUE_BYTES = 32  # a number, and what every other value has on top of its content
    SAMPLE = 64  # items of a collection that are looked at; the others are taken to be like them
    DEPTH_MAX = 16
    RING_MIN = 8
    CLASSES_MAX = 4096

SENDERS_WAITING_MAX = 65_536
SIGNALS_MAX = 65_536
cdef Py_ssize_t _WAITING_MAX = SENDERS_WAITING_MAX
cdef Py_ssize_t _SIGNALS_MAX = SIGNALS_MAX

cdef dict _fields = {}


cdef tuple _field_names(cls):
    names = _fields.get(cls)
    if names is None:
        if len(_fields) >= CLASSES_MAX:
            _fields.clear()
        names = _fields[cls] = getattr(cls, "__struct_fields__", ())
    return <tuple>names


cdef int64_t _content_bytes(value, int depth) except -1:
    """About what a value takes in memory on top of `VALUE_BYTES`."""
    kind = type(value)
    if kind is int or kind is float or kind is bool or value is None:
        return 0
    if kind is bytes:
        return len(<bytes>value)
    if kind is str:
        return len(<str>value)
    if depth == DEPTH_MAX:
        return 0
    if kind is dict:
        return _items_bytes((<dict>value).items(), len(<dict>value), depth)
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return _items_bytes(value, len(value), depth)
    if kind is bytearray or kind is memoryview:
        return memoryview(value).nbytes
    return _struct_bytes(value, depth)


cdef int64_t _items_bytes(items, Py_ssize_t count, int depth) except -1:
    cdef int64_t nbytes = 0
    cdef Py_ssize_t seen = 0
    for item in items:
        nbytes += VALUE_BYTES + _content_bytes(item, depth + 1)
        seen += 1
        if seen == SAMPLE:
            break
    return nbytes if seen == count else nbytes * count // max(seen, 1)


cdef int64_t _struct_bytes(message, int depth) except -1:
    cdef int64_t nbytes = 0
    for name in _field_names(type(message)):
        nbytes += VALUE_BYTES + _content_bytes(getattr(message, name), depth + 1)
    return nbytes


def message_bytes(message):
    return DELIVERY_BYTES + _struct_bytes(message, 0)


@cython.freelist(64)
cdef class LocalReply:
    def __cinit__(self, future):
        self._future = future

    def reply(self, message):
        if not self._future.done():
            self._future.set_result(message)

    def post(self, message):
        if not self._future.done():
            self._future.set_result(message)

    def fail(self, error):
        if not self._future.done():
            self._future.set_exception(error)


@cython.freelist(256)
cdef class Delivery:
    def __init__(self, message, int64_t deadline_ns, trace_id, sender, peer, reply_to):
        self.message = message
        self.deadline_ns = deadline_ns
        self.trace_id = trace_id
        self.sender = sender
        self.peer = peer
        self.reply_to = reply_to

    @property
    def waits(self):
        return self.nbytes != 0


cdef class MailboxMemory:
    def __init__(self, bound, refusal):
        self.used = 0
        self.bound = bound
        self._refusal = refusal

    cdef int admit(self, Delivery delivery) except -1:
        cdef int64_t nbytes = DELIVERY_BYTES + _struct_bytes(delivery.message, 0)
        if self.used + nbytes > self.bound:
            raise self._refusal(nbytes)
        self.used += nbytes
        delivery.nbytes = nbytes
        return 0

    cdef void release(self, Delivery delivery) noexcept:
        self.used -= delivery.nbytes
        delivery.nbytes = 0


cdef class Mailbox:
    def __cinit__(self, Py_ssize_t capacity, MailboxMemory memory not None):
        self._capacity = capacity
        self._memory = memory
        self._head = self._count = self._mask = 0
        self._ring = None
        self._waiting = self._stash = self.signals = None
        self.dropped = self.nbytes = 0

    def __len__(self):
        return self._count

    @property
    def stashed(self):
        return 0 if self._stash is None else len(self._stash)

    # The ring.

    cdef int _grow(self) except -1:
        cdef list ring = self._ring
        cdef Py_ssize_t size
        if ring is None:
            self._ring = [None] * RING_MIN
            self._head, self._mask = 0, RING_MIN - 1
        else:
            size = len(ring)
            self._ring = ring[self._head:] + ring[:self._head] + [None] * size
            self._head, self._mask = 0, 2 * size - 1
        return 0

    cdef int _append(self, Delivery delivery) except -1:
        if self._ring is None or self._count > self._mask:
            self._grow()
        self._ring[(self._head + self._count) & self._mask] = delivery
        self._count += 1
        return 0

    cdef int _prepend(self, Delivery delivery) except -1:
        if self._ring is None or self._count > self._mask:
            self._grow()
        self._head = (self._head - 1) & self._mask
        self._ring[self._head] = delivery
        self._count += 1
        return 0

    cdef int _admit(self, Delivery delivery) except -1:
        self._memory.admit(delivery)
        self.nbytes += delivery.nbytes
        return 0

    cdef int _release(self, Delivery delivery) except -1:
        self.nbytes -= delivery.nbytes
        self._memory.release(delivery)
        return 0

    # Messages in.

    cdef bint take_in(self, Delivery delivery) except -1:
        """As `offer`, if there is room and nobody waits for any."""
        if self._count >= self._capacity or self._waiting is not None:
            return False
        self._admit(delivery)
        self._append(delivery)
        return True

    def offer(self, Delivery delivery not None):
        return self.take_in(delivery) or self._offer_full(delivery)

    def put(self, Delivery delivery not None):
        self._admit(delivery)
        self._append(delivery)

    cdef bint _offer_full(self, Delivery delivery) except -1:
        if self._waiting is not None and not self._has_waiting() and self._count < self._capacity:
            self._admit(delivery)
            self._append(delivery)
            return True
        if not type(delivery.message).__zbmd_telemetry__:
            return False
        cdef Py_ssize_t place
        cdef Delivery oldest
        for place in range(self._count):
            oldest = self._ring[(self._head + place) & self._mask]
            if type(oldest.message).__zbmd_telemetry__:
                self._remove(place)
                self._drop(oldest)
                self._admit(delivery)
                self._append(delivery)
                return True
        self._drop(delivery)
        return True

    cdef int _drop(self, Delivery delivery) except -1:
        self._release(delivery)
        self.dropped += 1
        if delivery.reply_to is not None:
            delivery.reply_to.fail(MailboxFull("the telemetry was dropped: the mailbox is full"))
        return 0

    cdef int _remove(self, Py_ssize_t place) except -1:
        cdef list ring = self._ring
        while place:
            ring[(self._head + place) & self._mask] = ring[(self._head + place - 1) & self._mask]
            place -= 1
        ring[self._head] = None
        self._head = (self._head + 1) & self._mask
        self._count -= 1
        return 0

    cdef bint _has_waiting(self) except -1:
        """Whether a sender waits that has not given up; those at the front that have are let go."""
        while self._waiting:
            if not self._waiting[0][1].done():
                return True
            self._release(self._waiting.popleft()[0])
        self._waiting = None
        return False

    def wait(self, Delivery delivery not None, room):
        self._has_waiting()
        if self._waiting is None:
            self._waiting = deque()
        elif len(self._waiting) >= _WAITING_MAX:
            raise MailboxFull(f"{SENDERS_WAITING_MAX} senders already wait for this mailbox")
        try:
            self._admit(delivery)
        except BaseException:
            self._has_waiting()
            raise
        self._waiting.append((delivery, room))

    def post(self, signal):
        if self.signals is None:
            self.signals = deque()
        elif len(self.signals) >= _SIGNALS_MAX:
            return False
        self.signals.append(signal)
        return True

    # Messages out.

    def take(self):
        return self.next_taken()

    cdef Delivery next_taken(self):
        cdef Delivery delivery = self.next()
        if delivery is None:
            return None
        self._ring[self._head] = None
        self._head = (self._head + 1) & self._mask
        self._count -= 1
        self._release(delivery)
        if self._waiting is not None and self._count < self._capacity:
            self._move_up()
        return delivery

    cdef int _move_up(self) except -1:
        if self._has_waiting():
            waiting, room = self._waiting.popleft()
            self._append(waiting)
            room.set_result(None)
            self._has_waiting()
        return 0

    cdef int lies_down(self) except -1:
        """As `rest`, of an actor whose next message is expected soon: a small ring is kept."""
        if self._mask >= RING_MIN or self.signals is not None:
            self.rest()
        return 0

    def rest(self):
        if not self._count:
            self._ring = None
            self._head = self._mask = 0
        if self.signals is not None and not self.signals:
            self.signals = None

    # The stash.

    def stash(self, Delivery delivery not None):
        if self._stash is None:
            self._stash = deque()
        elif len(self._stash) >= self._capacity:
            return False
        # It was admitted once: the bound may be passed by the message that each actor handles.
        delivery.nbytes = DELIVERY_BYTES + _struct_bytes(delivery.message, 0)
        self._memory.used += delivery.nbytes
        self.nbytes += delivery.nbytes
        self._stash.append(delivery)
        return True

    def forget_stash(self):
        while self._stash:
            self._release(self._stash.pop())
        self._stash = None

    def unstash(self):
        cdef Py_ssize_t count = self.stashed
        while self._stash:
            self._prepend(self._stash.pop())
        self._stash = None
        return count

    # The others.

    def withdraw(self, reply_to):
        cdef Py_ssize_t place
        cdef Delivery delivery
        for place in range(self._count):
            delivery = self._ring[(self._head + place) & self._mask]
            if delivery.reply_to is not None and delivery.reply_to == reply_to:
                delivery.deadline_ns = 1
                return True
        if self._stash is not None:
            for item in self._stash:
                delivery = item
                if delivery.reply_to is not None and delivery.reply_to == reply_to:
                    delivery.deadline_ns = 1
                    return True
        return False

    def drain(self, why):
        self.signals = None
        if self._stash is not None:
            self.unstash()
        while self._count:
            delivery = self._ring[self._head]
            self._ring[self._head] = None
            self._head = (self._head + 1) & self._mask
            self._count -= 1
            self._release(delivery)
            if (<Delivery>delivery).reply_to is not None:
                (<Delivery>delivery).reply_to.fail(DeadActor(why))
        self._ring = None
        waiting, self._waiting = self._waiting, None
        for delivery, room in waiting or ():
            self._release(delivery)
            if not room.done():
                room.set_exception(DeadActor(why))
