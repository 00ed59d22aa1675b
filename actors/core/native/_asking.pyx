"""The code of every ask: its deadline, its route to another process, and the way back. See _asking.pyi."""

cimport cython
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject, PyObject_TypeCheck, PyTypeObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t, uint64_t

import time
from heapq import heappush

from msgspec import Raw

from zbmd.actors.core import wire as _wire
from zbmd.actors.core.native._mailbox cimport Delivery, LocalReply
from zbmd.actors.core.native._coroutine cimport RETURNED, YIELDED, go_on, say
from zbmd.actors.core.native._serving cimport CellCore, Coroutine, Post
from zbmd.actors import contracts as _contracts
from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.errors import ActorError, DeadActor, InvalidMessage, MailboxFull, MissingDeadline, TooManyPending
from zbmd.transport.link._link cimport FrameSink
from zbmd.transport.errors import LinkClosed, LinkFull, PeerLost, RemoteProtocolError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.memory.scattered import Scattered

TIMEOUT_NS_MAX = 30 * 24 * 3600 * 1_000_000_000
ASKS_PENDING_MAX = 65_536
QUANTUM_NS_LOG2_MIN = 20  # about 1 ms
QUANTA_PER_TIMEOUT_LOG2 = 6

cdef int64_t _TIMEOUT_MAX = TIMEOUT_NS_MAX
cdef int64_t _ASKS_MAX = ASKS_PENDING_MAX
cdef int _QUANTUM = QUANTUM_NS_LOG2_MIN
cdef int _QUANTA = QUANTA_PER_TIMEOUT_LOG2
cdef Py_ssize_t _PAYLOAD_MAX = MAX_PAYLOAD_BYTES
cdef object _encode = _wire._encode
cdef object _with_body = _wire.with_body
cdef dict _bytes_fields = _wire._fields
cdef Py_ssize_t _LONG = _wire.LONG_BYTES
cdef dict _declared = _contracts.__dict__  # of which `_generation` is another with each contract
cdef object _decode = _wire._decode_envelope
cdef object _Ask = _wire.Ask
cdef object _Reply = _wire.Reply
cdef object _Tell = _wire.Tell


cdef extern from "Python.h":
    int PyErr_WarnEx(object category, const char *text, Py_ssize_t level) except -1

cdef extern from *:
    int zbmd_bits "__builtin_clzll"(unsigned long long number) nogil


cdef inline int64_t _now_ns() except -1:
    return time.monotonic_ns()  # which a simulation replaces


cdef class Wheel:
    cdef public dict _buckets
    cdef public list _expiries_ns
    cdef public object _timer
    cdef public int64_t _timer_ns, pending

    def __cinit__(self, *_, **__):
        self._buckets = {}
        self._expiries_ns = []
        self._timer = None
        self._timer_ns = self.pending = 0

    def add(self, future, int64_t deadline_ns, int64_t timeout_ns):
        return self.put(future, deadline_ns, timeout_ns)

    cdef set put(self, future, int64_t deadline_ns, int64_t timeout_ns):
        cdef int bits = 64 - zbmd_bits(timeout_ns) if timeout_ns > 0 else 0
        cdef int quantum_log2 = max(_QUANTUM, bits - _QUANTA)
        cdef int64_t expiry_ns = ((deadline_ns >> quantum_log2) + 1) << quantum_log2
        cdef object key = expiry_ns
        cdef PyObject *found = PyDict_GetItem(self._buckets, key)
        cdef set bucket
        if found is NULL:
            bucket = self._buckets[key] = set()
            heappush(self._expiries_ns, key)
            if self._timer is None or expiry_ns < self._timer_ns:
                self._arm(key, _now_ns())
        else:
            bucket = <set>found
        bucket.add(future)
        self.pending += 1
        return bucket

    def remove(self, future, set bucket not None):
        bucket.discard(future)
        self.pending -= 1


cdef inline object _encoded(envelope, message):
    """As `wire.with_body`; a message without a long field is recognized without a call."""
    cdef PyObject *names = PyDict_GetItem(_bytes_fields, type(message))
    if names is NULL:
        return _with_body(envelope, message)
    for name in <tuple>names:
        value = getattr(message, name)
        if type(value) is bytes and PyBytes_GET_SIZE(value) >= _LONG:
            return _with_body(envelope, message)
    return _encode(envelope)


@cython.freelist(64)
cdef class RemoteReply:
    cdef readonly PeerCore peer
    cdef readonly object call

    def __init__(self, PeerCore peer not None, call):
        self.peer = peer
        self.call = call

    def reply(self, message):
        return self.peer.answer(self._payload(message))

    def post(self, message):
        self.peer.post_payload(self._payload(message))

    def fail(self, error):
        self.peer.fail_call(self.call, error)

    cdef object _payload(self, message):
        try:
            payload = _encoded(_Reply(self.call, message), message)
        except Exception:
            return _wire.encode_reply(self.call, message)  # which tells why it cannot be
        return payload if len(payload) <= _PAYLOAD_MAX else _wire.encode_reply(self.call, message)

    def __eq__(self, other):
        if type(other) is not RemoteReply:
            return False
        return self.call == (<RemoteReply>other).call and self.peer is (<RemoteReply>other).peer

    def __hash__(self):
        return hash((id(self.peer), self.call))


cdef class PeerCore(FrameSink):
    cdef public object name, incarnation, link, lost, _outbox, _codec
    cdef public Post _system
    cdef public dict _calls
    cdef public int64_t _next_call
    cdef object _decode_body, _generation

    def __cinit__(self, *_, **__):
        self._calls = {}
        self._next_call = 0

    # Sending.

    def try_send(self, payload, trace_id=0):
        return self.sends(payload, trace_id)

    cdef bint sends(self, payload, trace_id) except -1:
        if self._outbox:
            return False
        try:
            self.link.send(payload, trace_id=trace_id)
        except LinkFull:
            return False
        except LinkClosed as error:
            raise self.lost or PeerLost(self.name, str(error)) from None
        return True

    def answer(self, payload):
        if self.lost is not None:
            return None
        try:
            return None if self.sends(payload, 0) else self._answer_later(payload)
        except PeerLost:
            return None

    def open_call(self, future, *, wants_ref=False):
        return self.opens(future, wants_ref)

    cdef object opens(self, future, wants_ref):
        self._next_call += 1
        call = self._next_call
        self._calls[call] = (future, wants_ref)
        return call

    def close_call(self, call):
        self._calls.pop(call, None)

    # Receiving. Errors raised here end the link.

    def _on_frame(self, header, payload):
        self.takes_frame(header.trace_id, payload)

    cdef int takes_frame(self, uint64_t trace_id, payload) except -1:
        if self.lost is not None:
            return 0
        envelope = None
        if type(payload) is Scattered:
            envelope = self._codec.decode_around(payload)
            if envelope is None:
                payload = payload.joined()
        if envelope is None:
            try:
                if len(payload) > _PAYLOAD_MAX:
                    raise ValueError
                envelope = _decode(payload)
            except Exception:
                envelope = self._codec.decode(payload)  # which tells what is wrong with it
        kind = type(envelope)
        if kind is _Reply:
            self._on_reply(envelope)
        elif kind is _Ask:
            self._on_ask(envelope, trace_id)
        elif kind is _Tell:
            self._on_tell(envelope, trace_id)
        else:
            self._on_rarer(envelope, trace_id)
        return 0

    def _on_tell(self, m, trace_id):
        cdef Delivery delivery = None
        try:
            delivery = self._delivery(m, trace_id)
            self.deliver(m.to, m.incarnation, delivery)
        except ActorError as error:
            tag = "unknown" if delivery is None else contract_tag(delivery.message)
            self.bounce(m.to, m.incarnation, m.sender, tag, error)

    def _on_ask(self, m, trace_id):
        cdef Delivery delivery
        cdef RemoteReply reply_to
        cdef int64_t timeout_ns
        call = m.call
        try:
            delivery = self._delivery(m, trace_id)
            given_ns = m.timeout_ns  # as the peer says: any number
            timeout_ns = _TIMEOUT_MAX if given_ns > _TIMEOUT_MAX else given_ns
            delivery.deadline_ns = _now_ns() + timeout_ns
            reply_to = RemoteReply.__new__(RemoteReply)
            reply_to.peer, reply_to.call = self, call
            delivery.reply_to = reply_to
            self.deliver(m.to, m.incarnation, delivery)
        except ActorError as error:
            self.fail_call(call, error)

    cdef Delivery _delivery(self, m, trace_id):
        cdef Delivery delivery = Delivery.__new__(Delivery)
        body = m.body
        delivery.message = self._decoded(body) if type(body) is Raw else body
        delivery.trace_id, delivery.sender, delivery.peer = trace_id, m.sender, self
        return delivery

    cdef object _decoded(self, body):
        """As `Codec.decode_contract`, which tells why it cannot be."""
        cdef PyObject *generation = PyDict_GetItem(_declared, "_generation")
        if generation != <PyObject *>self._generation:
            self._generation = _contracts._generation  # before the decoder, which another thread may outdate
            self._decode_body = self._codec.current()
        try:
            return self._decode_body(body)
        except Exception:
            return self._codec.decode_contract(body)

    def _deliver(self, to, incarnation, Delivery delivery not None):
        self.deliver(to, incarnation, delivery)

    cdef int deliver(self, to, incarnation, Delivery delivery) except -1:
        cdef PyObject *found = PyDict_GetItem(self._system._cells, to)
        cdef CellCore cell = None if found is NULL else <CellCore>found
        if cell is None or not cell.accepts or (incarnation and incarnation != cell.incarnation):
            raise DeadActor(f"{self._system.name}/{to} (incarnation {incarnation}) does not live")
        if not cell.mailbox.take_in(delivery) and not cell.mailbox.offer(delivery):
            raise MailboxFull(f"{cell.ref.address} has {len(cell.mailbox)} messages waiting")
        if cell.task is None:
            cell.wakes()
        return 0

    def _on_reply(self, m):
        call = self._calls.pop(m.call, None)
        if call is None:
            return  # its asker gave up
        future, wants_ref = <tuple>call
        if future.done():
            return
        body = m.body
        try:
            if wants_ref:
                future.set_result(self._codec.decode_ref(body))
            elif type(body) is not Raw:
                future.set_result(body)
            elif len(body) == 1:
                future.set_result(self._codec.decode_reply(body))  # which may be None
            else:
                future.set_result(self._decoded(body))
        except ActorError as error:
            future.set_exception(error)
        except RemoteProtocolError as error:
            future.set_exception(error)
            raise


cdef class Asked:
    cdef readonly object future, call
    cdef readonly int64_t deadline_ns, timeout_ns
    cdef readonly CellCore cell
    cdef readonly PeerCore peer
    cdef readonly Delivery delivery
    cdef readonly object payload
    cdef readonly bint waits
    cdef Wheel _wheel
    cdef set _bucket

    def over(self):
        if self._bucket is not None:
            self._wheel.remove(self.future, self._bucket)
            self._bucket = None
            if self.peer is not None:
                self.peer._calls.pop(self.call, None)

    cdef int _begin(self, Post system, ref, message) except -1:
        if ref.process == system.name:
            return self._begin_here(system, ref)
        return self._begin_there(system, ref, message)

    cdef int _begin_here(self, Post system, ref) except -1:
        cdef LocalReply reply_to = LocalReply.__new__(LocalReply, self.future)
        self.cell = system.found(ref)
        if self.cell is None:
            self.cell = system._living(ref)  # which tells why it cannot be asked
        if self.cell.task is not None:
            system._check_ring(self.cell)
        self.delivery.reply_to = reply_to
        if not self.cell.mailbox.take_in(self.delivery) and not self.cell.mailbox.offer(self.delivery):
            self.waits = True
        elif self.cell.task is None:
            self.cell.wakes()
        return 0

    cdef int _begin_there(self, Post system, ref, message) except -1:
        cdef PyObject *found = PyDict_GetItem(system._peers, ref.process)
        cdef PeerCore peer = None if found is NULL else <PeerCore>found
        incarnation = ref.process_incarnation
        if peer is None or (incarnation and incarnation != peer.incarnation):
            peer = system._peer(ref.process, incarnation)
        self.peer = peer
        self.call = peer.opens(self.future, False)
        payload = self._payload(ref, message)
        if not peer.sends(payload, self.delivery.trace_id):
            self.payload, self.waits = payload, True
        return 0

    cdef object _payload(self, ref, message):
        call, sender, timeout_ns = self.call, self.delivery.sender, self.timeout_ns
        try:
            payload = _encoded(_Ask(call, ref.actor, ref.incarnation, timeout_ns, sender, message), message)
        except Exception:
            payload = None
        if payload is None or len(payload) > _PAYLOAD_MAX:  # then it tells why it cannot be sent
            return _wire.encode_ask(call, ref.actor, ref.incarnation, timeout_ns, sender, message)
        return payload


def envelope(Post system not None, message):
    cdef Delivery delivery = _envelope(system, message)
    return delivery.trace_id, delivery.sender


cdef Delivery _envelope(Post system, message):
    if not PyObject_TypeCheck(message, <PyTypeObject *>Contract):
        raise InvalidMessage(f"{message!r:.200} is not a Contract")
    return system.envelope(message)


def deadline(timeout, int64_t inherited_ns, whom):
    """(deadline, time left)."""
    cdef int64_t left_ns = 0
    cdef int64_t deadline_ns = _deadline(timeout, inherited_ns, whom, &left_ns)
    return deadline_ns, left_ns


cdef int64_t _deadline(timeout, int64_t inherited_ns, whom, int64_t *left_ns) except -1:
    cdef int64_t now_ns = _now_ns(), timeout_ns
    if timeout is None:
        if not inherited_ns:
            raise MissingDeadline(f"asking {whom}: give a timeout, there is no deadline to inherit here")
    else:
        timeout_ns = min(max(0, int(timeout * 1e9)), TIMEOUT_NS_MAX)
        if not inherited_ns or inherited_ns >= now_ns + timeout_ns:
            left_ns[0] = timeout_ns
            return now_ns + timeout_ns
    left_ns[0] = max(0, inherited_ns - now_ns)
    return inherited_ns


def ask(Post system not None, ref, message, timeout):
    return _asks(system, ref, message, timeout)


cdef Asked _asks(Post system, ref, message, timeout):
    cdef Asked asked = Asked.__new__(Asked)
    cdef Delivery delivery = _envelope(system, message)
    cdef int64_t left_ns = 0
    asked.delivery = delivery
    asked.deadline_ns = delivery.deadline_ns = _deadline(timeout, delivery.deadline_ns, ref, &left_ns)
    asked.timeout_ns = left_ns
    asked._wheel = system.deadlines
    if asked._wheel.pending >= _ASKS_MAX:
        raise TooManyPending(f"{ASKS_PENDING_MAX} asks are pending in {system.name}")
    asked.future = system.loop.create_future()
    asked._bucket = asked._wheel.put(asked.future, asked.deadline_ns, left_ns)
    try:
        asked._begin(system, ref, message)
    except BaseException:
        asked.future.cancel()
        asked.over()
        raise
    return asked


# The states of an ask.
cdef enum:
    NEW = 0
    WAITS = 1  # for the answer
    AT_LENGTH = 2  # for room on the way, or for the way
    OVER = 3


cdef class Asking(Coroutine):  # no free list: what comes from one again is not finalized again
    cdef Post _system
    cdef readonly object ref
    cdef object _message, _wanted, _timeout, _waiting
    cdef Asked _asked
    cdef int _state

    def __cinit__(self, Post system not None, ref, message, wanted, timeout):
        self._system, self.ref, self._message = system, ref, message
        self._wanted, self._timeout = wanted, timeout
        self._state = NEW

    def __del__(self):
        if self._state == NEW:
            PyErr_WarnEx(RuntimeWarning, b"coroutine 'Ref.ask' was never awaited", 1)
        elif self._state != OVER:
            self.close()

    def close(self):
        cdef int state = self._state
        self._state = OVER
        if state == WAITS:
            self._system._forget_ask(self._asked)
        elif state == AT_LENGTH:
            self._waiting.close()
        self._asked = self._waiting = None

    @property
    def cr_frame(self):
        return None

    @property
    def cr_await(self):
        return self._waiting

    @property
    def cr_running(self):
        return False

    @property
    def delivery(self):
        return None if self._asked is None else self._asked.delivery

    cdef int advance(self, value, error, PyObject **result) except -1:
        cdef int how
        if self._state == NEW:
            self._state = OVER
            if error is not None:
                raise error
            value = None
            self._begin()
        elif self._state == OVER:
            raise RuntimeError("cannot reuse already awaited coroutine")
        try:
            how = go_on(self._waiting, value, error, result)
        except BaseException as failure:
            self._fail(failure)
            raise
        return YIELDED if how == YIELDED else self._answer(result)

    cdef int _begin(self) except -1:
        cdef Asked asked
        try:
            asked = _asks(self._system, self.ref, self._message, self._timeout)
        except PeerLost:
            asked = None
        if asked is None:
            self._waiting = self._system._ask_from_afar(self.ref, self._message, self._timeout)
            self._state = AT_LENGTH
        elif asked.waits:
            self._waiting = self._system._ask_when_taken(asked, self.ref, self._message)
            self._state = AT_LENGTH
        else:
            self._asked, self._waiting = asked, iter(asked.future)
            self._state = WAITS
        return 0

    cdef int _fail(self, failure) except -1:
        """Give the ask up; raises the asker's error, if that is another one."""
        asked, self._asked = self._asked, None
        self._state, self._waiting = OVER, None
        if asked is not None:
            told = self._system._ask_failed(asked, self.ref, self._message, failure)
            if told is not None:
                raise told from None
        return 0

    cdef int _answer(self, PyObject **result) except -1:
        reply = <object>result[0]
        Py_DECREF(reply)
        if self._asked is not None:
            self._asked.over()
        self._state, self._asked, self._waiting = OVER, None, None
        if self._wanted is not None and type(reply) is not self._wanted:
            asks = f"{self.ref!r} answered {contract_tag(self._message)}"
            raise InvalidMessage(f"{asks} with {type(reply).__name__}, not {self._wanted.__name__}")
        return say(RETURNED, reply, result)


cdef class Asker(Post):
    def _ask(self, ref, message, wanted, timeout):
        if self.tracer is not None:
            return self.tracer.ask(ref, message, wanted, timeout)
        return Asking(self, ref, message, wanted, timeout)
