"""Memory that is lent for a while, and let go of while transfers are under way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from support.bulk.bulk_host import BulkHost, deadline, join

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.arena import Arena
from zbmd.transport.rdma.remote_memory import MIRROR_BYTES, Mirror, RemoteMemory
from zbmd.transport.secure.protection import Protection

NBYTES = 6 << 20


@pytest.fixture
def hosts() -> Iterator[tuple[BulkHost, BulkHost]]:
    with BulkHost(0, nbytes=2 * NBYTES) as a, BulkHost(1, nbytes=2 * NBYTES) as b:
        yield a, b


def offset_in(arena: Arena, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    offset = arena.offset_of(array)
    assert offset is not None
    return offset


def test_what_is_lent_can_be_reached_until_the_last_loan_is_taken_back(
    hosts: tuple[BulkHost, BulkHost],
) -> None:
    a, b = hosts
    to_b, _ = join(a, b)
    data = b.segment.arena.from_array(np.arange(100, dtype=np.uint8))
    offset = offset_in(b.segment.arena, data)
    handle = b.regions.lend(data, offset, writable=False)
    assert b.regions.lend(data, offset, writable=False) == handle
    into = np.zeros(100, np.uint8)
    region = to_b.open_region(handle)
    for _ in range(2):
        region.get(into).wait(deadline())
        assert np.array_equal(into, data)
        b.regions.take_back(handle)
    with pytest.raises(RemoteProtocolError, match="no region"):
        region.get(into).wait(deadline())
    registered = b.regions.register(data)
    assert registered == handle, "a loan is apart from a registration, which outlives it"
    b.regions.take_back(b.regions.lend(data, offset, writable=False))
    region.get(into).wait(deadline())
    with pytest.raises(RemoteProtocolError, match="read-only"):
        region.put(into, channel=0, value=1)


@pytest.mark.parametrize("protection", [Protection.MAC, Protection.NONE])
def test_transfers_that_are_let_go_of_touch_nothing_and_harm_nobody(
    hosts: tuple[BulkHost, BulkHost], protection: Protection
) -> None:
    a, b = hosts
    to_b, to_a = join(a, b, protection=protection)
    inbox = b.segment.inbox.empty(NBYTES, np.uint8)
    arena = b.segment.arena.from_array(np.full(NBYTES, 3, np.uint8))
    target = to_b.open_region(b.regions.register(inbox))
    source = to_b.open_region(b.regions.register(arena))
    for value in range(1, 20):
        data, into, other = (np.full(NBYTES, fill, np.uint8) for fill in (5, 0, 0))
        arena[:] = 3
        put = target.put(data, channel=0, value=value)
        get, kept = source.get(into), source.get(other)
        to_b.let_go([put, get])
        data[:], seen = 9, into.copy()
        kept.wait(deadline())
        get.wait(deadline())
        put.wait(deadline())
        assert np.array_equal(into, seen), "it was received into memory that was let go of"
        assert (inbox == 5).all() and (other == 3).all()
        lent = b.regions.lend(arena[1:], offset_in(b.segment.arena, arena) + 1, writable=False)
        served = to_b.open_region(lent).get(other[1:])
        b.regions.take_back(lent)
        to_a.let_go([])
        arena[:] = value
        try:
            served.wait(deadline())
        except RemoteProtocolError as error:
            assert "no region" in str(error), "it was asked for too late"
        else:
            assert (other == 3).all(), "what was promised goes out as it was"


def test_a_peer_that_says_nonsense_of_its_memory_is_refused(hosts: tuple[BulkHost, BulkHost]) -> None:
    a, b = hosts
    to_b, _ = join(a, b)
    mirror = Mirror(a.segment, 1)
    good = Mirror(b.segment, 0).handle
    arena_offset = b.segment.nbytes - b.segment.arena.capacity_bytes
    memory = RemoteMemory(to_b, mirror, good, arena_offset=arena_offset, nbytes=b.segment.nbytes)
    assert (memory.slot, memory.incarnation, memory.ended) == (1, 2, False)
    for theirs, begin, nbytes in (
        (good, 0, b.segment.nbytes),
        (good, arena_offset, arena_offset - 1),
        (good, arena_offset, 1 << 60),
        (replace(good, nbytes=MIRROR_BYTES - 1), arena_offset, b.segment.nbytes),
        (replace(good, writable=False), arena_offset, b.segment.nbytes),
        (replace(good, incarnation=7), arena_offset, b.segment.nbytes),
        (replace(good, slot=2), arena_offset, b.segment.nbytes),
        (replace(good, offset=-64), arena_offset, b.segment.nbytes),
    ):
        with pytest.raises(RemoteProtocolError):
            RemoteMemory(to_b, mirror, theirs, arena_offset=begin, nbytes=nbytes)
