"""Pages that are mapped ahead of what is written to them."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from zbmd.transport.memory.ahead import TOGETHER_BYTES, mapped_ahead


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_arrays_hold_what_is_written_while_their_pages_are_mapped() -> None:
    arrays = [np.empty(2 * TOGETHER_BYTES + 5, np.uint8)[at:] for at in range(3)]  # not where a page begins
    with mapped_ahead([np.empty(0, np.uint8), *arrays]):
        for at, array in enumerate(arrays):
            array.fill(at + 1)
    assert all((array == at + 1).all() for at, array in enumerate(arrays))


def test_pages_are_there_before_they_are_written_to() -> None:
    array = np.empty(8 * TOGETHER_BYTES, np.uint8)
    before = resident_bytes()
    with mapped_ahead([array]) as mapping:
        assert mapping is not None
        mapping.join()
        assert resident_bytes() - before >= array.nbytes // 2


def test_small_arrays_are_left_alone() -> None:
    with mapped_ahead([np.empty(TOGETHER_BYTES - 1, np.uint8)]) as mapping:
        assert mapping is None
