"""The turns of a recorded actor, and the strands that take them: what runs at every message. See _turns.pyi."""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t

from asyncio import CancelledError

from msgspec import Raw
from xxhash import xxh3_128_digest

from zbmd.actors.replay import events as _ev
from zbmd.actors.core.native._coroutine cimport RETURNED, YIELDED, go_on, say
from zbmd.actors.core.native._serving cimport Coroutine
from zbmd.actors.replay.events import encode_body, encode_text, ref_text
from zbmd.actors.contracts import Contract, contract_tag
from zbmd.transport.capture.native._recording cimport Taking
from zbmd.transport.capture.errors import CaptureMismatch

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object text)
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

cdef enum:
    EVENT = 2
    ACTIONS = 3
    FIELD_BYTES = 16
    TURN_BYTES = 256  # what it unfolds into are two records
    CLASSES_MAX = 4096

# The states of a call.
cdef enum:
    NEW = 0
    PASSED_ON = 1
    TOLD = 2
    DONE = 3

cdef int64_t STALE_NS = 65_536  # a tick of the physical part of a hybrid clock
cdef int64_t WALL_CHECK = 1_000_000
WALL_CHECK_NS = WALL_CHECK
SERVING = 0

cdef object _Received = _ev.Received
cdef object _Resumed = _ev.Resumed
cdef object _Sent = _ev.Sent
cdef object _Answered = _ev.Answered
cdef object _TellSent = _ev.TellSent
cdef object _name_of = _ev.captured_name
cdef object _Asked = _ev.Asked
cdef object _Replied = _ev.Replied
cdef object _codec = _ev.RecordCodec()
cdef object _NIL = Raw(b"\xc0")
cdef int64_t _FLAT_BYTES_MAX = _ev.TEXT_BYTES_MAX


cdef dict _field_names = {}


cdef int64_t _flat_bytes(message) except -2:
    """The size of a small message that is made of plain values alone, -1 of any other."""
    cdef int64_t nbytes = 0
    cdef int overflow = 0
    cls = type(message)
    names = _field_names.get(cls)
    if names is None:
        if not isinstance(message, Contract):
            return -1
        if len(_field_names) >= CLASSES_MAX:
            _field_names.clear()
        names = _field_names[cls] = cls.__struct_fields__
    for name in <tuple>names:
        value = getattr(message, name)
        kind = type(value)
        nbytes += FIELD_BYTES
        if kind is int:
            PyLong_AsLongLongAndOverflow(value, &overflow)
            if overflow:
                return -1
        elif kind is bytes:
            nbytes += len(<bytes>value)
        elif kind is str:
            if not PyUnicode_IS_ASCII(value):
                return -1
            nbytes += len(<str>value)
        elif not (value is None or kind is float or kind is bool):
            return -1
    return nbytes if nbytes <= _FLAT_BYTES_MAX else -1


@cython.no_gc  # it holds nothing that could lead back to it, and the collector is not to walk all turns
@cython.freelist(16)
cdef class Turn:
    cdef int64_t stream, at_ns
    cdef uint64_t hlc
    cdef bint open, written, digests
    # The event: its fields, or in short; a message that is kept as it is.
    cdef object kind
    cdef int64_t number
    cdef object body
    cdef dict fields
    # The first action, if it has a short form, and the others.
    cdef object action, to, message, timeout, wanted
    cdef int64_t call
    cdef list more

    cdef dict _event_fields(self):
        if self.kind is _Answered and self.fields is None:
            body = self.body
            return {"call": self.number, "contract": contract_tag(body), "body": encode_body(body)}
        if self.fields is None:
            return {"strand" if self.kind is _Resumed else "call": self.number}
        if self.body is None:
            return self.fields
        return {**self.fields, "contract": contract_tag(self.body), "body": encode_body(self.body)}

    cdef tuple _first_action(self):
        message = self.message if type(self.message) is str else encode_text(self.message)
        if self.action is _Replied:
            return _Replied, {"message": message}
        fields = {"call": self.call, "to": self.to, "message": message}
        if self.action is _Asked:
            fields["timeout_s"] = self.timeout
            fields["reply"] = None if self.wanted is None else _name_of(self.wanted)
        return self.action, fields

    def unfold(self):
        try:
            event = Raw(_codec.encode((self.kind, self._event_fields())))
            records = [(EVENT, self.stream, self.at_ns, self.hlc, _name_of(self.kind), event)]
            if self.open:
                self.written = True
            if not self.written:
                records.append(self._answer())
        except (ValueError, TypeError, OverflowError, RecursionError, NotImplementedError) as error:
            raise CaptureMismatch(f"a turn of {_name_of(self.kind)}: {error}") from None
        return records

    cdef tuple _answer(self):
        cdef list actions = [] if self.action is None else [self._first_action()]
        if self.more is not None:
            actions += self.more
        encoded = _codec.encode_all(actions)
        digest, whole = (xxh3_128_digest(encoded), _NIL) if self.digests else (b"", Raw(encoded))
        return (ACTIONS, self.stream, self.at_ns, self.hlc, len(actions), digest, whole)


cdef class Turns:
    cdef public object current
    cdef public bint closed
    cdef public int64_t now_ns
    cdef public int64_t _calls
    cdef public int64_t _wall_minus_monotonic_ns
    cdef public int64_t _wall_checked_ns
    cdef public int64_t _stream
    cdef Turn _turn
    cdef bint _digests
    cdef Taking _recorder
    cdef object _hybrid, _ref, _ref_text

    def _follow(self, recorder, bint digests):
        self._recorder = recorder
        self._hybrid = recorder.clocks.hybrid
        self._digests = digests
        self._wall_checked_ns = self.now_ns

    # For the cell.

    def received(self, delivery, awaitable):
        message, peer = delivery.message, delivery.peer
        cdef Turn turn
        cdef int64_t nbytes = _flat_bytes(message)
        contract, body = "", b""
        if nbytes < 0:
            contract, body = contract_tag(message), self.body(message)
        strand = Strand(self, SERVING, awaitable, None, False)
        turn = self._begin(_Received, nbytes if nbytes >= 0 else len(body))
        turn.body = message if nbytes >= 0 else None
        turn.fields = {
            "contract": contract,
            "body": body,
            "sender": delivery.sender if peer is None else f"{peer.name}/{delivery.sender}",
            "owed": delivery.reply_to is not None,
            "deadline_ns": delivery.deadline_ns,
            "trace_id": delivery.trace_id,
        }
        self.current = strand
        return strand

    def replied(self, delivery, reply):
        if delivery.reply_to is not None:
            message = reply if _flat_bytes(reply) >= 0 else self.text(reply)
            self._act(_Replied, 0, None, message, None, None)
        self._settle()

    def act(self, kind, **fields):
        if self.closed or self._turn is None:
            return
        if self._turn.more is None:
            self._turn.more = []
        self._turn.more.append((kind, fields))

    cdef int _act(self, kind, int64_t call, to, message, timeout, wanted) except -1:
        cdef Turn turn = self._turn
        if self.closed or turn is None:
            return 0
        if turn.action is None and turn.more is None:
            turn.action, turn.call, turn.to, turn.message = kind, call, to, message
            turn.timeout, turn.wanted = timeout, wanted
        else:
            other = Turn.__new__(Turn)
            (<Turn>other).action, (<Turn>other).call = kind, call
            (<Turn>other).to, (<Turn>other).message = to, message
            (<Turn>other).timeout, (<Turn>other).wanted = timeout, wanted
            if turn.more is None:
                turn.more = []
            turn.more.append((<Turn>other)._first_action())
        return 0

    # Turns.

    cdef int _resumes(self, Strand strand) except -1:
        if self.current is strand or self.closed:
            return 0
        if not strand.busy:
            self._begin(_Resumed, 0).number = strand.number
        self.current = strand
        return 0

    def settle(self):
        self._settle()

    cdef int _settle(self) except -1:
        cdef Turn turn = self._turn
        self.current = None
        if turn is not None:
            self._turn = None
            turn.open = False
            if turn.written:  # the writer was faster
                self._recorder._take(turn._answer())
        return 0

    def _record(self, record):
        self._begin(record[0], 0).fields = record[1]

    cdef Turn _begin(self, kind, int64_t nbytes):
        cdef Turn turn
        self._settle()
        self.now_ns = self._recorder.read_clock()
        if self.now_ns - self._wall_checked_ns > WALL_CHECK:
            self._follow_wall_clock()
        turn = Turn.__new__(Turn)
        turn.stream, turn.at_ns, turn.hlc = self._stream, self.now_ns, self._hybrid.last
        if self.now_ns + self._wall_minus_monotonic_ns - <int64_t>turn.hlc > STALE_NS:
            turn.hlc = self._recorder._stamp()
        turn.kind, turn.digests, turn.open = kind, self._digests, True
        self._turn = turn
        if self._recorder.has_room(nbytes + TURN_BYTES):
            self._recorder.keep(turn)
        return turn

    cdef object _text_of(self, ref):
        if self._ref is not ref:
            self._ref, self._ref_text = ref, ref_text(ref)
        return self._ref_text


cdef class Wrapped(Coroutine):
    cdef object _coroutine

    @property
    def cr_frame(self):
        return getattr(self._coroutine, "cr_frame", None)

    @property
    def cr_await(self):
        return getattr(self._coroutine, "cr_await", None)

    @property
    def cr_code(self):
        return getattr(self._coroutine, "cr_code", None)

    @property
    def cr_running(self):
        return bool(getattr(self._coroutine, "cr_running", False))


cdef class Strand(Wrapped):
    cdef readonly int64_t number
    cdef public object begins
    cdef readonly bint settles
    cdef public bint busy
    cdef object _life
    cdef Turns _turns
    cdef object _held, _kept_value, _kept_error

    def __init__(self, traced, number, awaitable, begins=None, settles=True):
        self.number = number
        self.begins = begins
        self.settles = settles
        self._life = traced
        self._turns = traced if isinstance(traced, Turns) else None
        self._coroutine = awaitable if hasattr(awaitable, "send") else _awaiting(awaitable)

    def close(self):
        self._coroutine.close()

    cdef int advance(self, value, error, PyObject **result) except -1:
        cdef int how = YIELDED
        if self._turns is not None:
            self._turns._resumes(self)
        else:
            if self._held is not None:
                if error is None:
                    value, error = self._kept_value, self._kept_error
                self._held = None
            held = self._life.resumes(self)
            if held is not None:
                # As `Future.__await__` hands itself to the task. A cancellation in between replaces what is kept.
                self._kept_value, self._kept_error, self._held = value, error, held
                held._asyncio_future_blocking = True
                return say(YIELDED, held, result)
        try:
            how = go_on(self._coroutine, value, error, result)
        except BaseException:
            if self.number != SERVING:
                self._settle()
            raise
        if how == YIELDED or self.settles:
            self._settle()
        return how

    cdef int _settle(self) except -1:
        if self._turns is not None:
            self._turns._settle()
        else:
            self._life.settle()
        return 0


cdef class Call(Wrapped):
    cdef Turns _life
    cdef object _ref, _message, _wanted, _timeout
    cdef bint _asks
    cdef int _state
    cdef int64_t _number
    cdef Strand _strand

    def __init__(self, Turns traced not None, coroutine, ref, message, bint asks, wanted=None, timeout=None):
        self._life = traced
        self._coroutine = coroutine
        self._ref = ref
        self._message = message
        self._asks = asks
        self._wanted = wanted
        self._timeout = timeout
        self._state = NEW

    def close(self):
        self._coroutine.close()
        if self._state == TOLD:
            self._strand.busy = False
        self._state = DONE

    cdef int advance(self, value, error, PyObject **result) except -1:
        cdef int how
        if self._state == NEW and error is None:
            self._begin()
        try:
            how = go_on(self._coroutine, value, error, result)
        except BaseException as failure:
            self._fail(failure)
            raise
        if how == RETURNED:
            try:
                self._succeed(<object>result[0])
            except BaseException:
                Py_DECREF(<object>result[0])
                raise
        return how

    cdef int _begin(self) except -1:
        cdef Turns traced = self._life
        strand = traced.current
        if strand is None or (<Strand?>strand).busy or traced.closed:
            strand = traced.turn("ask()" if self._asks else "tell()")
            if strand is None:
                self._state = PASSED_ON
                return 0
        message, timeout = self._message, self._timeout
        traced._calls += 1
        self._number = traced._calls
        if _flat_bytes(message) < 0:
            message = traced.text(message)
        if timeout is not None:
            timeout = float(timeout)  # it may be an integer
        to = traced._text_of(self._ref)
        traced._act(_Asked if self._asks else _TellSent, self._number, to, message, timeout, self._wanted)
        self._strand = strand
        self._strand.busy = True
        self._state = TOLD
        return 0

    cdef int _succeed(self, outcome) except -1:
        cdef Turns traced = self._life
        cdef Turn turn
        cdef int64_t nbytes = 0
        if self._state != TOLD:
            self._state = DONE
            return 0
        self._state = DONE
        self._strand.busy = False
        if traced.closed:
            return 0
        if not self._asks:
            traced._begin(_Sent, 0).number = self._number
        else:
            nbytes = _flat_bytes(outcome)
            if nbytes >= 0:
                turn = traced._begin(_Answered, nbytes)
                turn.number, turn.body = self._number, outcome
            else:
                traced._record(traced.answered(self._number, outcome))
        traced.current = self._strand
        return 0

    cdef int _fail(self, failure) except -1:
        if self._state == TOLD:
            self._strand.busy = False
            self._life.call_failed(self._strand, self._number, failure)
        self._state = DONE
        return 0


async def _awaiting(awaitable):
    return await awaitable
