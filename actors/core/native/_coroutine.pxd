"""Drives coroutines from compiled ones: in C where both sides can, else as any generator."""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF

cdef extern from *:
    """
    /* What a type is asked for before `__next__`: a value that is returned needs no StopIteration then. */
    static void zbmd_set_send(PyObject *type, int (*send)(PyObject *, PyObject *, PyObject **)) {
        ((PyTypeObject *)type)->tp_as_async->am_send = (sendfunc)send;
    }
    """
    void set_send "zbmd_set_send"(object type, int (*send)(object, object, PyObject **) except -1)

cdef extern from "Python.h":
    int PyIter_Send(object iterator, object value, PyObject **result) except -1
    int PyContextVar_Get(object variable, PyObject *default, PyObject **value) except -1

cdef enum:
    RETURNED = 0  # what PyIter_Send says, but for errors
    YIELDED = 1


cdef inline int say(int how, value, PyObject **result) noexcept:
    """`how`, and a value with it."""
    Py_INCREF(value)
    result[0] = <PyObject *>value
    return how


cdef inline int go_on(coroutine, value, error, PyObject **result) except -1:
    """As PyIter_Send, or throws `error`; `result` is a new reference."""
    if error is None:
        return PyIter_Send(coroutine, value, result)
    try:
        thrown = coroutine.throw(error)
    except StopIteration as stop:
        return say(RETURNED, stop.value, result)
    return say(YIELDED, thrown, result)


cdef inline object value_of(int how, PyObject *result):
    """Return what was yielded; raise what was returned, as any generator does."""
    value = <object>result
    Py_DECREF(value)
    if how == RETURNED:
        raise StopIteration(value)
    return value


cdef inline object as_error(kind, value):
    """Return the exception of `throw(kind, value)`."""
    error = value if isinstance(value, BaseException) else kind
    return error if isinstance(error, BaseException) else kind()


cdef inline object value_in(variable):
    """Return a context variable's value; None if it was never set."""
    cdef PyObject *found = NULL
    PyContextVar_Get(variable, NULL, &found)
    if found is NULL:
        return None
    value = <object>found
    Py_DECREF(value)
    return value
