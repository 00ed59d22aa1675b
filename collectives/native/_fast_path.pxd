"""The turnstile and the fast path of calls that have been made before. See _fast_path.pyi."""


cdef class Turnstile:
    cdef bint busy
    cdef list gates
    cdef object flight  # a fast path one of whose calls has begun and keeps the turn

    cdef void _pass_on(self)
