"""The code of every message: a tell within the process, and the turns of an actor. See _serving.pyi."""

from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject, PyObject_TypeCheck, PyTypeObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t

import time

from zbmd.actors.core.native._mailbox cimport Delivery, Mailbox
from zbmd.actors.core.native._coroutine cimport RETURNED, YIELDED, as_error, go_on, say, set_send, value_in, value_of
from zbmd.actors.core.context import current_cell, current_delivery
from zbmd.actors.contracts import Contract

cdef extern from "Python.h":
    object PyContextVar_Set(object variable, object value)
    bint PyCoro_CheckExact(object thing)
    bint PyDict_CheckExact(object thing)
    int PyErr_WarnEx(object category, const char *text, Py_ssize_t level) except -1

cdef enum:
    HANDLED = 2  # beside what PyIter_Send says

TURN_NS = 100_000
MESSAGES_PER_LOOK = 2
LOOKS_PER_TURN = 32
TELLS_PER_TURN = 64
RESTING_MAX = 1024
REST_S = 0.1
ENDED_MAX = 128
cdef int64_t _TURN_NS = TURN_NS
cdef Py_ssize_t _LOOK = MESSAGES_PER_LOOK
cdef Py_ssize_t _LOOKS = LOOKS_PER_TURN
cdef Py_ssize_t _TELLS = TELLS_PER_TURN
cdef Py_ssize_t _RESTING = RESTING_MAX
cdef Py_ssize_t _ENDED = ENDED_MAX

# The states of a tell.
cdef enum:
    NEW = 0
    WAITS = 1
    OVER = 2


cdef inline int64_t _now_ns() except -1:
    return time.monotonic_ns()  # which a simulation replaces


cdef class Coroutine:
    cdef int advance(self, value, error, PyObject **result) except -1:
        raise NotImplementedError

    def send(self, value):
        cdef PyObject *result = NULL
        return value_of(self.advance(value, None, &result), result)

    def throw(self, kind, value=None, trace=None):
        cdef PyObject *result = NULL
        return value_of(self.advance(None, as_error(kind, value), &result), result)

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        cdef PyObject *result = NULL
        return value_of(self.advance(None, None, &result), result)


cdef int _send(self, value, PyObject **result) except -1:
    return (<Coroutine>self).advance(value, None, result)


set_send(Coroutine, _send)  # every class of it inherits this


cdef class CellCore:
    def __cinit__(self, *_, **__):
        self.accepts = True
        self.handled = self.turns = 0

    def wake(self):
        self.wakes()

    cdef int wakes(self) except -1:
        if self.task is None and self.accepts and not self._is_roused():
            self.task = self._new_task()
        return 0

    cdef bint _is_roused(self) except -1:
        """Let the task go on that rests, if one does: the loop's end may have cancelled it."""
        rest, task = self._rest, self._resting
        if rest is None:
            return False
        self._rest = self._resting = None
        if rest.done():
            return False
        self.task = task
        task._log_destroy_pending = True
        rest.set_result(None)
        return True

    cdef int _gets_up(self) except -1:
        """It is idle: its task ends, and what comes next makes another."""
        task, self._rest, self._resting = self._resting, None, None
        self.mailbox.rest()
        task.cancel()
        return 0


cdef class Serving(Coroutine):
    cdef CellCore _cell
    cdef object _coroutine
    cdef Delivery _delivery
    cdef tuple _handler
    cdef Py_ssize_t _look, _looks
    cdef int64_t _until_ns
    cdef object _rest

    def __init__(self, CellCore cell not None):
        self._cell = cell
        self._begin_turn()

    def close(self):
        if self._coroutine is not None:
            self._coroutine.close()

    @property
    def cr_await(self):
        return self._coroutine

    def is_over(self):
        return self._is_over()

    cdef int _begin_turn(self) except -1:
        self._look, self._looks, self._until_ns = _LOOK, _LOOKS, _now_ns() + _TURN_NS
        self._cell.turns += 1
        return 0

    cdef bint _is_over(self) except -1:
        if self._look:
            self._look -= 1
            return False
        self._look = _LOOK - 1
        self._looks -= 1
        if self._looks and not self._cell.system.deadlines.pending and _now_ns() <= self._until_ns:
            return False
        self._begin_turn()
        return True

    cdef int advance(self, value, error, PyObject **result) except -1:
        cdef int how
        if self._rest is not None:
            how = self._rises(value, error, result)
            if how == YIELDED:
                return how
            error = None
        if self._coroutine is not None:
            how = self._handle(value, error, result)
            if how != HANDLED:
                return how
        elif error is not None:
            raise error
        while self._finds():
            if self._is_over():
                return say(YIELDED, None, result)
            how = self._begin(result)
            if how != HANDLED:
                return how
        if not self._is_idle():
            return say(RETURNED, False, result)
        return YIELDED if self._lies_down(result) else say(RETURNED, None, result)

    cdef bint _lies_down(self, PyObject **result) except -1:
        """Wait for the next message here; False if the actor is about to end, or too many rest."""
        cdef CellCore cell = self._cell
        cdef Post system = cell.system
        if cell._stop is not None or cell.task is None or system.resting >= _RESTING:
            return False
        cell._rest, cell._resting = system.loop.create_future(), cell.task
        # Nobody has to end what does nothing.
        cell._resting._log_destroy_pending = False
        cell.task = None
        cell.mailbox.lies_down()
        system.resting += 1
        if not cell._is_noted:
            system.notes_rest(cell)
        self._rest = iter(cell._rest)
        go_on(self._rest, None, None, result)
        return True

    cdef int _rises(self, value, error, PyObject **result) except -1:
        cdef int how
        try:
            how = go_on(self._rest, value, error, result)
        except BaseException:
            self._rest = None
            self._cell.system.resting -= 1
            raise
        if how == RETURNED:
            Py_DECREF(<object>result[0])
            self._rest = None
            self._cell.system.resting -= 1
            self._begin_turn()
        return how

    cdef bint _is_idle(self) except -1:
        cdef Mailbox mailbox = self._cell.mailbox
        return mailbox._count == 0 and not (mailbox.signals is not None and mailbox.signals)

    cdef bint _finds(self) except -1:
        """Whether what comes next is to handle a message, and nothing about it is out of the ordinary."""
        cdef CellCore cell = self._cell
        cdef Mailbox mailbox = cell.mailbox
        cdef Delivery delivery = mailbox.next()
        cdef PyObject *found
        if delivery is None or cell._stop is not None or cell.traced is not None:
            return False
        if mailbox.signals is not None and mailbox.signals:
            return False
        if delivery.deadline_ns and delivery.deadline_ns <= _now_ns():
            return False
        if not PyDict_CheckExact(cell.handlers):
            return False
        found = PyDict_GetItem(cell.handlers, type(delivery.message))
        if found is NULL:
            return False
        self._handler = <tuple>found
        return True

    cdef int _begin(self, PyObject **result) except -1:
        cdef CellCore cell = self._cell
        cdef Delivery delivery = cell.mailbox.next_taken()
        PyContextVar_Set(current_delivery, delivery)
        cell.current = self._delivery = delivery
        handling = self._handler[0](cell.actor, delivery.message)
        self._coroutine = handling if PyCoro_CheckExact(handling) else cell.awaiting(handling)
        return self._handle(None, None, result)

    cdef int _handle(self, value, error, PyObject **result) except -1:
        """Let the handler go on, and answer if it has returned."""
        cdef CellCore cell = self._cell
        cdef Delivery delivery = self._delivery
        cdef int how
        try:
            how = go_on(self._coroutine, value, error, result)
        except BaseException:
            self._coroutine = self._delivery = self._handler = None
            raise
        if how == YIELDED:
            return YIELDED
        reply = <object>result[0]
        Py_DECREF(reply)
        handler, self._handler = self._handler, None
        self._coroutine = self._delivery = None
        if type(reply) not in <frozenset>handler[1]:
            cell.answers_later(delivery, handler, reply)
            return HANDLED
        room = None if delivery.reply_to is None else delivery.reply_to.reply(reply)
        cell.current = None
        cell.handled += 1
        if cell._withdrawn is not None:
            cell.is_withdrawn()
        return HANDLED if room is None else say(RETURNED, room, result)


cdef class Post:
    def __cinit__(self, *_, **__):
        self._cells = {}
        self._peers = {}
        self._tells_left = _TELLS
        self.rest_s = REST_S
        self._resters = []

    def new_trace(self):
        self._last_trace += 1
        return self._last_trace

    cdef int notes_rest(self, CellCore cell) except -1:
        """Its task is looked at every `rest_s`, until it has ended or serves when it is looked at."""
        if not self._resters:
            self.loop.call_later(self.rest_s, self._end_rests)
        self._resters.append(cell)
        cell._is_noted, cell._turns_noted = True, -1
        return 0

    def _end_rests(self):
        cdef CellCore cell
        cdef list noted = self._resters
        cdef Py_ssize_t ended = 0
        self._resters = []
        for cell in noted:
            if cell._resting is not None and (cell.turns != cell._turns_noted or ended == _ENDED):
                cell._turns_noted = cell.turns
                self._resters.append(cell)
                continue
            cell._is_noted = False  # who serves now is noted when it rests again
            if cell._resting is not None:
                cell._gets_up()
                ended += 1
        if self._resters:
            self.loop.call_later(self.rest_s, self._end_rests)

    def _tell(self, ref, message):
        if self.tracer is not None:
            return self.tracer.tell(ref, message)
        return Tell(self, ref, message)

    def has_told(self, CellCore cell not None):
        return self._has_told(cell.mailbox)

    cdef bint _has_told(self, Mailbox mailbox) except -1:
        self._tells_left -= 1
        if self._tells_left > 0 and not (mailbox._count >= _LOOK and self.deadlines.pending):
            return False
        self._tells_left = _TELLS
        return True

    cdef CellCore found(self, ref):
        """The actor of this process that a reference names; None if it does not live, or lives elsewhere."""
        cdef CellCore cell
        cdef PyObject *found
        process = ref.process
        if process is not self.name and process != self.name:
            return None
        found = PyDict_GetItem(self._cells, ref.actor)
        if found is NULL:
            return None
        cell = <CellCore>found
        if not cell.accepts:
            return None
        incarnation = ref.incarnation
        if incarnation and incarnation != cell.incarnation:
            return None
        incarnation = ref.process_incarnation
        if incarnation and incarnation != self.incarnation:
            return None
        return cell

    cdef Delivery envelope(self, message):
        """Make the envelope of a message that is sent now: its trace, sender and deadline."""
        cdef Delivery running = value_in(current_delivery), delivery
        sender = value_in(current_cell)
        delivery = Delivery.__new__(Delivery)
        delivery.message = message
        delivery.deadline_ns = 0 if running is None else running.deadline_ns
        delivery.trace_id = self.new_trace() if running is None else running.trace_id
        delivery.sender = "" if sender is None else (<CellCore>sender).name
        return delivery

    cdef Mailbox _told(self, ref, message):
        """The mailbox that the message was put into; None if anything is out of the ordinary."""
        cdef CellCore cell
        cdef Delivery delivery
        if not PyObject_TypeCheck(message, <PyTypeObject *>Contract):
            return None
        cell = self.found(ref)
        if cell is None:
            return None
        delivery = self.envelope(message)
        delivery.deadline_ns = 0
        if not cell.mailbox.take_in(delivery):
            return None
        if cell.task is None:
            cell.wakes()
        return cell.mailbox


cdef class Tell(Coroutine):
    cdef Post _post
    cdef object _ref, _message, _coroutine
    cdef int _state

    def __cinit__(self, Post post not None, ref, message):
        self._post = post
        self._ref = ref
        self._message = message
        self._state = NEW

    def __dealloc__(self):
        if self._state == NEW:
            PyErr_WarnEx(RuntimeWarning, b"coroutine 'Ref.tell' was never awaited", 1)

    def close(self):
        self._state = OVER
        if self._coroutine is not None:
            self._coroutine.close()

    @property
    def cr_frame(self):
        return None

    @property
    def cr_await(self):
        return self._coroutine

    @property
    def cr_running(self):
        return False

    cdef int advance(self, value, error, PyObject **result) except -1:
        cdef Mailbox mailbox
        if self._coroutine is not None:
            return go_on(self._coroutine, value, error, result)
        state, self._state = self._state, OVER
        if state == OVER:
            raise RuntimeError("cannot reuse already awaited coroutine")
        if error is not None:
            raise error
        if state == NEW:
            mailbox = self._post._told(self._ref, self._message)
            if mailbox is None:
                self._coroutine = self._post.tell_at_length(self._ref, self._message)
                return go_on(self._coroutine, value, error, result)
            if self._post._has_told(mailbox):
                self._state = WAITS
                return say(YIELDED, None, result)
        return say(RETURNED, None, result)
