from libc.stdint cimport int64_t


cdef class SpareCore:
    cdef public int64_t _check_at_ns, _busy_for_ns
    cdef public bint _spare
    cdef public object _processors

    cdef bint is_spare(self, int64_t now_ns) except -1


cdef class SpinCore:
    cdef public object choice
    cdef public dict parks
    cdef public int64_t _wait_ns
    cdef SpareCore _spare
    cdef tuple _choices
    cdef int64_t _spin_ns, _processors, _dry_ns, _end_ns
    cdef bint _waits

    cpdef object _choose(self, int64_t now_ns)
    cpdef bint begins(self, int64_t now_ns) except -1
    cpdef bint goes_on(self, int64_t now_ns) except -1
    cpdef int came(self, int64_t now_ns) except -1
