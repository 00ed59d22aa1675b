"""The arena's allocator against its invariants, and the life of the arrays in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from zbmd.transport.errors import ArenaFull, LocalProtocolError, OutOfMemory
from zbmd.transport.memory import arena as arena_module
from zbmd.transport.memory.arena import Allocator
from zbmd.transport.memory.memfd import PAGE_BYTES
from zbmd.transport.memory.segment import Segment

ARENA = 1 << 16


class AllocatorMachine(RuleBasedStateMachine):
    """Any sequence of allocations and frees keeps the tiling; what is live never overlaps."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(128, 4096)
        self.ranges: dict[int, int] = {}

    @rule(target=live, nbytes=st.integers(0, 1500))
    def allocate(self, nbytes: int) -> object:
        try:
            offset = self.allocator.allocate(nbytes)
        except ArenaFull as full:
            assert full.available_bytes < full.asked_bytes
            return multiple()
        assert offset % 64 == 0
        assert offset >= 128 and offset + nbytes <= 128 + 4096
        for start, size in self.ranges.items():
            assert offset + max(nbytes, 1) <= start or start + max(size, 1) <= offset
        self.ranges[offset] = nbytes
        return offset

    @rule(offset=consumes(live))
    def free(self, offset: int) -> None:
        self.allocator.free(offset)
        del self.ranges[offset]

    @invariant()
    def holds(self) -> None:
        self.allocator.check_invariants()

    def teardown(self) -> None:
        for offset in self.ranges:
            self.allocator.free(offset)
        assert self.allocator.used_bytes == 0
        assert self.allocator.allocate(4096) == 128, "all of it is one hole again"


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(slot=0, incarnation=1, arena_bytes=ARENA, inbox_bytes=4096)
    yield made
    made.close()


def test_an_array_is_aligned_shared_and_found_by_its_offset(segment: Segment) -> None:
    array = segment.arena.empty((3, 5), np.float64)
    array[:] = np.arange(15).reshape(3, 5)
    offset = segment.arena.offset_of(array)
    assert offset is not None and offset % 64 == 0
    shared = np.frombuffer(segment.mapping.view(offset, array.nbytes), np.float64)
    assert shared.tolist() == list(range(15))
    assert segment.arena.offset_of(array[1:]) == offset + 5 * 8
    assert segment.arena.offset_of(array.T) is None, "not C-contiguous"
    assert segment.arena.offset_of(np.zeros(4)) is None, "not in the arena"
    assert segment.inbox.offset_of(array) is None, "in the other arena"


def test_memory_returns_when_the_last_view_is_gone(segment: Segment) -> None:
    array = segment.arena.empty(1000, np.uint8)
    views = [array[10:20], array.reshape(10, 100), array.data]
    del array
    while views:
        assert segment.arena.used_bytes == 1024
        views.pop()
        gc.collect()
    assert segment.arena.used_bytes == 0
    segment.arena.check_invariants()


def test_a_full_arena_says_what_to_do_and_works_again_after(segment: Segment) -> None:
    whole = segment.arena.empty(ARENA, np.uint8)
    with pytest.raises(ArenaFull, match="--arena") as caught:
        segment.arena.empty(1, np.uint8)
    assert isinstance(caught.value, OutOfMemory)
    assert caught.value.available_bytes == 0
    del whole
    assert segment.arena.empty(ARENA, np.uint8).nbytes == ARENA


def test_the_number_of_arrays_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "BLOCKS_MAX", 2)
    allocator = Allocator(0, 4096)
    allocator.allocate(1)
    allocator.allocate(1)
    with pytest.raises(ArenaFull, match="at most 2"):
        allocator.allocate(1)


def test_from_array_copies_in_c_order(segment: Segment) -> None:
    source = np.arange(12, dtype=np.int32).reshape(3, 4).T
    copy = segment.arena.from_array(source)
    assert np.array_equal(copy, source)
    assert copy.flags.c_contiguous and segment.arena.offset_of(copy) is not None
    copy[:] = 0
    assert source.max() == 11


def test_empty_shapes_and_scalars(segment: Segment) -> None:
    assert segment.arena.empty(0).shape == (0,)
    assert segment.arena.empty((2, 0, 3)).nbytes == 0
    assert segment.arena.empty(()).shape == ()


def test_arrays_that_cannot_be_shared_are_refused(segment: Segment) -> None:
    with pytest.raises(LocalProtocolError, match="Python objects"):
        segment.arena.empty(3, object)
    with pytest.raises(LocalProtocolError, match="negative"):
        segment.arena.empty((-1, 2))
    with pytest.raises(LocalProtocolError, match="no block"):
        Allocator(0, 4096).free(64)


def test_arrays_outlive_their_segment() -> None:
    segment = Segment.create(slot=0, incarnation=1, arena_bytes=4096, inbox_bytes=0)
    array = segment.arena.empty(4, np.int64)
    array[:] = 7
    segment.close()
    gc.collect()
    assert array.tolist() == [7, 7, 7, 7]


def test_zeros_are_zero_in_fresh_and_in_used_memory() -> None:
    segment = Segment.create(slot=0, incarnation=1, arena_bytes=1 << 16, inbox_bytes=PAGE_BYTES)
    arena = segment.arena
    for size in (1000, 3000, 2000, 5000):  # the later ones reuse memory, in part or whole
        array = arena.zeros((size,), np.float32)
        assert not array.any()
        array[:] = 7.0
        del array
    both = arena.empty(100, np.uint8), arena.zeros(1 << 15, np.uint8)
    assert not both[1].any()
    del both
    segment.close()
