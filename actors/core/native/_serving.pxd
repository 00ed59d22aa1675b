from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from zbmd.actors.core.native._mailbox cimport Delivery, Mailbox


cdef class Coroutine:
    """Base of compiled coroutines. A subclass implements `advance`, with the results of PyIter_Send."""

    cdef int advance(self, value, error, PyObject **result) except -1


cdef class CellCore:
    cdef public Mailbox mailbox
    cdef public object actor, handlers, traced, task, current, name, incarnation, ref
    cdef public Post system
    cdef public bint accepts
    cdef public int64_t handled, turns
    cdef public object _stop, _withdrawn
    cdef readonly object _rest, _resting
    cdef bint _is_noted
    cdef int64_t _turns_noted

    cdef int wakes(self) except -1
    cdef bint _is_roused(self) except -1
    cdef int _gets_up(self) except -1


cdef class Post:
    cdef public dict _cells, _peers
    cdef public object name, incarnation, deadlines, loop, tracer
    cdef readonly Py_ssize_t resting
    cdef public double rest_s
    cdef list _resters
    cdef public uint64_t _last_trace
    cdef public Py_ssize_t _tells_left

    cdef int notes_rest(self, CellCore cell) except -1
    cdef bint _has_told(self, Mailbox mailbox) except -1
    cdef CellCore found(self, ref)
    cdef Delivery envelope(self, message)
    cdef Mailbox _told(self, ref, message)
