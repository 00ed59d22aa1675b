"""Sets of slots (segment.h) from Python's integers, in which bit s stands for slot s."""

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_Clear, PyErr_Occurred
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "transport/native/segment.h" nogil:
    ctypedef char *zbmd_base
    enum:
        ZBMD_OFF_LOST
        ZBMD_LOST_WORDS
        ZBMD_MAX_SLOTS
    ctypedef struct zbmd_slots:
        uint64_t words[ZBMD_LOST_WORDS]
        uint32_t begin, end
    uint64_t zbmd_load64(zbmd_base base, uint64_t offset)

cdef extern from "Python.h":
    uint64_t zbmd_as_u64 "PyLong_AsUnsignedLongLong"(object number) noexcept


cdef inline int slots_of(object mask, zbmd_slots *slots) except -1:
    """Words outside of what it says it has are left as they are. OverflowError: not the mask of slots that exist."""
    cdef uint64_t low = zbmd_as_u64(mask)
    cdef bytes words
    slots.begin = 0
    if low != <uint64_t>-1 or not PyErr_Occurred():
        slots.words[0] = low
        slots.end = low != 0
        return 0
    PyErr_Clear()
    words = mask.to_bytes(8 * ZBMD_LOST_WORDS, "little")
    memcpy(slots.words, PyBytes_AS_STRING(words), 8 * ZBMD_LOST_WORDS)
    slots.end = ZBMD_LOST_WORDS
    while slots.words[slots.end - 1] == 0:  # one of them is not, behind the first
        slots.end -= 1
    while slots.words[slots.begin] == 0:
        slots.begin += 1
    return 0


cdef inline object lost_mask_of(zbmd_base own):
    cdef object mask = 0
    cdef uint64_t word
    cdef int i
    for i in range(ZBMD_LOST_WORDS):
        word = zbmd_load64(own, ZBMD_OFF_LOST + 8 * <uint64_t>i)
        if word:
            mask = word if i == 0 else mask | <object>word << 64 * i
    return mask
