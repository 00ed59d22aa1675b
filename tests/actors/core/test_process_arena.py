"""`zbmd.empty` and `zbmd.from_array` follow the worker that the process has joined as."""

from __future__ import annotations

import numpy as np
import pytest

import zbmd
from zbmd.transport.errors import ArenaFull


async def test_arrays_lie_in_the_arena_of_the_joined_node() -> None:
    with pytest.raises(zbmd.UserError, match=r"zbmd\.join"):
        zbmd.empty(4)
    async with zbmd.join(arena=1 << 16) as worker:
        array = zbmd.empty((3, 5), np.float64)
        assert (array.shape, array.dtype) == ((3, 5), np.float64)
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous
        copy = zbmd.from_array(np.arange(7))
        assert copy.tolist() == list(range(7))
        for made in (array, copy):
            assert worker.segment.arena.offset_of(made) is not None
        with pytest.raises(ArenaFull, match="--arena"):
            zbmd.empty(1 << 16)
    with pytest.raises(zbmd.UserError, match=r"zbmd\.join"):
        zbmd.from_array(copy)
    assert copy.tolist() == list(range(7)), "arrays outlive the worker"


async def test_with_two_nodes_the_one_that_is_meant_must_be_named() -> None:
    async with zbmd.join(arena=1 << 16), zbmd.join(arena=1 << 16):
        with pytest.raises(zbmd.UserError, match=r"worker\.segment\.arena\.empty"):
            zbmd.empty(4)
