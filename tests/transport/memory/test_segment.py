"""Segments: what a peer sees of one, and what it makes of a forged one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from zbmd.transport.errors import LocalProtocolError, OutOfMemory, PeerLost, RemoteProtocolError
from zbmd.transport.memory.memfd import create_memfd
from zbmd.transport.memory.segment import PAGE_BYTES, PeerSegment, Segment
from zbmd.transport.native import _native
from zbmd.transport.native._native import Mapping

Fork = Callable[[Callable[[], None]], int]


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(slot=3, incarnation=9, arena_bytes=100_000, inbox_bytes=5_000)
    yield made
    made.close()


def test_a_peer_reads_the_arena_in_place_and_writes_only_the_inbox(segment: Segment) -> None:
    peer = PeerSegment.attach(segment.fds, slot=3)
    assert (peer.slot, peer.incarnation, peer.pid) == (3, 9, os.getpid())
    assert peer.nbytes == segment.nbytes and peer.base != segment.base
    array = segment.arena.from_array(np.arange(6, dtype=np.int16))
    offset = segment.arena.offset_of(array)
    assert offset is not None
    view = peer.arena_view(offset, array.nbytes)
    assert view.readonly and view == array.data.cast("B")
    with pytest.raises(LocalProtocolError, match="read-only"):
        peer.mapping.view(offset, 4, writable=True)
    target = segment.inbox.empty(8, np.uint8)
    inbox_offset = segment.inbox.offset_of(target)
    assert inbox_offset is not None
    peer.mapping.view(inbox_offset, 8, writable=True)[:] = b"zbmd 1.0"
    assert target.tobytes() == b"zbmd 1.0"


def test_the_kernel_keeps_a_peer_from_writing_the_arena(segment: Segment, fork: Fork) -> None:
    peer = PeerSegment.attach(segment.fds, slot=3)
    child = fork(lambda: _native.notify(peer.base + peer.arena_offset, 0, 0, 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 8), (2 << 20, 8), (1 << 63, 1 << 63), (-8, 8)])
def test_views_outside_are_refused(segment: Segment, offset: int, nbytes: int) -> None:
    peer = PeerSegment.attach(segment.fds, slot=3)
    with pytest.raises(RemoteProtocolError, match="outside the arena"):
        peer.arena_view(offset, nbytes)


def forge(change: Callable[[Mapping], None], nbytes: int = _native.OFF_END + PAGE_BYTES) -> int:
    fd = create_memfd("forged", nbytes)
    mapping = Mapping(fd, nbytes, nbytes)
    mapping.store64(_native.OFF_MAGIC, _native.MAGIC)
    mapping.store64(_native.OFF_TOTAL, nbytes)
    mapping.store64(_native.OFF_INBOX, _native.OFF_END)
    mapping.store64(_native.OFF_ARENA, _native.OFF_END)
    mapping.store64(_native.OFF_INCARNATION, 1)
    mapping.store32(_native.OFF_SLOT, 2)
    change(mapping)
    return fd


def test_the_forgery_helper_makes_a_good_segment_when_nothing_is_changed() -> None:
    fd = forge(lambda m: None)
    assert PeerSegment.attach([fd], slot=2).incarnation == 1
    os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.store64(_native.OFF_MAGIC, 1),
        lambda m: m.store64(_native.OFF_TOTAL, 1 << 40),
        lambda m: m.store64(_native.OFF_INBOX, 0),
        lambda m: m.store64(_native.OFF_ARENA, 0),
        lambda m: m.store64(_native.OFF_ARENA, 1 << 63),
        lambda m: m.store64(_native.OFF_ARENA, _native.OFF_END + 8),
        lambda m: m.store64(_native.OFF_INCARNATION, 0),
        lambda m: m.store32(_native.OFF_SLOT, 5),
    ],
)
def test_forged_headers_are_refused(change: Callable[[Mapping], None]) -> None:
    fd = forge(change)
    try:
        with pytest.raises(RemoteProtocolError):
            PeerSegment.attach([fd], slot=2)
    finally:
        os.close(fd)


def test_a_memfd_smaller_than_a_header_is_refused() -> None:
    fd = create_memfd("small", 4096)
    try:
        with pytest.raises(RemoteProtocolError, match="too few"):
            PeerSegment.attach([fd], slot=0)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("slot", "incarnation", "arena_bytes"), [(1024, 1, 1), (-1, 1, 1), (0, 0, 1), (0, 1 << 64, 1), (0, 1, -1)]
)
def test_bad_arguments_are_refused(slot: int, incarnation: int, arena_bytes: int) -> None:
    with pytest.raises(LocalProtocolError):
        Segment.create(slot=slot, incarnation=incarnation, arena_bytes=arena_bytes, inbox_bytes=0)


def test_an_arena_larger_than_memory_is_refused_before_it_is_taken() -> None:
    with pytest.raises(OutOfMemory, match="--arena"):
        Segment.create(slot=0, incarnation=1, arena_bytes=1 << 44, inbox_bytes=0)


def test_a_closed_segment_says_so() -> None:
    segment = Segment.create(slot=1, incarnation=1, arena_bytes=0, inbox_bytes=0)
    segment.close()
    segment.close()
    for attribute in ("fds", "base", "mapping"):
        with pytest.raises(LocalProtocolError, match="closed"):
            getattr(segment, attribute)


def test_the_memory_of_a_peer_that_has_ended_is_lost_to_those_who_ask_for_more(segment: Segment) -> None:
    array = segment.arena.from_array(np.arange(4.0))
    handle = segment.regions.register(array)
    peer = PeerSegment.attach(segment.fds, slot=3)
    region = peer.open_region(handle, segment)
    view = region.view()
    peer.end()
    with pytest.raises(PeerLost, match="has ended, its memory is unmapped"):
        peer.open_region(handle, segment)
    assert view is not None and (np.frombuffer(view) == array).all(), "what is looked at stays"


def test_lost_bits_are_the_owners() -> None:
    segment = Segment.create(slot=1, incarnation=1, arena_bytes=0, inbox_bytes=0)
    _native.set_lost(segment.base, 5)
    _native.set_lost(segment.base, 63)
    assert segment.lost_mask() == 1 << 5 | 1 << 63
    segment.clear_lost(5)
    assert segment.lost_mask() == 1 << 63
    segment.close()
