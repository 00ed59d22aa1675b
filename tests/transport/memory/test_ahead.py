"""Pages that are mapped ahead of what is written to them."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.memory.ahead import TOGETHER_BYTES, mapped_ahead
from zbmd.transport.native._native import address_of


def pages_there(array: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether each page of an array is in memory. mincore(2)"""
    found = np.zeros(array.nbytes // mmap.PAGESIZE, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    start, nbytes = ctypes.c_void_p(address_of(array)), ctypes.c_size_t(array.nbytes)
    assert libc.mincore(start, nbytes, ctypes.c_void_p(address_of(found))) == 0, ctypes.get_errno()
    return (found & 1).astype(np.bool_)


def test_arrays_hold_what_is_written_while_their_pages_are_mapped() -> None:
    arrays = [np.empty(2 * TOGETHER_BYTES + 5, np.uint8)[at:] for at in range(3)]  # not where a page begins
    with mapped_ahead([np.empty(0, np.uint8), *arrays]):
        for at, array in enumerate(arrays):
            array.fill(at + 1)
    assert all((array == at + 1).all() for at, array in enumerate(arrays))


def test_pages_are_there_before_they_are_written_to() -> None:
    array = np.frombuffer(mmap.mmap(-1, 8 * TOGETHER_BYTES), np.uint8)
    assert not pages_there(array).any()
    with mapped_ahead([array]) as mapping:
        assert mapping is not None
        mapping.join()
        assert pages_there(array).all()


def test_small_arrays_are_left_alone() -> None:
    with mapped_ahead([np.empty(TOGETHER_BYTES - 1, np.uint8)]) as mapping:
        assert mapping is None
