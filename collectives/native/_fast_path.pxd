"""The turnstile and the fast path of calls that have been made before. See _fast_path.pyi."""


cdef class Turnstile:
    cdef bint busy
    cdef list gates

    cdef void _pass_on(self)
