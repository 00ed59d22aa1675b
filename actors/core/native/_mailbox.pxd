from libc.stdint cimport int64_t


cdef class LocalReply:
    cdef object _future


cdef class Delivery:
    cdef readonly object message, sender, peer
    cdef public object reply_to
    cdef readonly object trace_id
    cdef public int64_t deadline_ns
    cdef int64_t nbytes


cdef class MailboxMemory:
    cdef readonly int64_t used, bound
    cdef object _refusal

    cdef int admit(self, Delivery delivery) except -1
    cdef void release(self, Delivery delivery) noexcept


cdef class Mailbox:
    cdef MailboxMemory _memory
    cdef list _ring
    cdef Py_ssize_t _head, _count, _mask, _capacity
    cdef object _waiting, _stash
    cdef readonly object signals
    cdef readonly int64_t dropped
    cdef readonly int64_t nbytes

    cdef bint take_in(self, Delivery delivery) except -1
    cdef inline Delivery next(self):
        """What `take` returns, left where it is."""
        return <Delivery>self._ring[self._head] if self._count else None

    cdef Delivery next_taken(self)
    cdef int lies_down(self) except -1
    cdef int _grow(self) except -1
    cdef int _append(self, Delivery delivery) except -1
    cdef int _prepend(self, Delivery delivery) except -1
    cdef int _admit(self, Delivery delivery) except -1
    cdef int _release(self, Delivery delivery) except -1
    cdef bint _offer_full(self, Delivery delivery) except -1
    cdef int _drop(self, Delivery delivery) except -1
    cdef int _remove(self, Py_ssize_t place) except -1
    cdef bint _has_waiting(self) except -1
    cdef int _move_up(self) except -1
