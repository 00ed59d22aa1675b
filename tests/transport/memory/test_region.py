"""Regions in shared memory: put and get across processes, and handles that must not work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from zbmd.transport.errors import ArenaFull, LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native import _native
from zbmd.transport.shm.death_notice import LifeThread

Fork = Callable[[Callable[[], None]], int]
Pair = tuple[Segment, Segment]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = tuple(
        Segment.create(slot=slot, incarnation=10 + slot, arena_bytes=1 << 16, inbox_bytes=1 << 16)
        for slot in range(2)
    )
    yield made[0], made[1]
    for segment in made:
        segment.close()


def opened(ours: Segment, theirs: Segment, handle: RegionHandle) -> RemoteRegion:
    return PeerSegment.attach(theirs.fds, slot=theirs.slot).open_region(handle, ours)


def inbox(owner: Segment, nbytes: int) -> tuple[NDArray[np.uint8], RegionHandle]:
    array = owner.inbox.empty(nbytes, np.uint8)
    array[:] = 0
    return array, owner.regions.register(array)


def test_put_and_get_across_processes(pair: Pair, fork: Fork) -> None:
    ours, theirs = pair
    target = ours.inbox.empty((4, 100), np.float32)
    numbers = ours.arena.from_array(np.arange(10, dtype=np.int64))
    handles = msgspec.msgpack.encode([ours.regions.register(target), ours.regions.register(numbers)])

    def child() -> None:
        for_put, for_get = msgspec.msgpack.decode(handles, type=list[RegionHandle])
        region = opened(theirs, ours, for_put)
        for row in range(4):
            source = np.arange(100, dtype=np.float32) + row
            assert region.put(source, row * source.nbytes, channel=0, value=row + 1).done
        assert theirs.wait(0, 0, 1) == _native.WAIT_OK
        into = np.zeros(8, np.int64)
        opened(theirs, ours, for_get).get(into, 16).wait()
        assert into.tolist() == list(range(2, 10))

    pid = fork(child)
    for row in range(4):
        assert ours.wait(1, 0, row + 1) == _native.WAIT_OK
        assert target[row].tolist() == [float(i + row) for i in range(100)]
    PeerSegment.attach(theirs.fds, slot=1).notify(0, 0, 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_part_of_a_region_is_viewed_without_a_copy(pair: Pair) -> None:
    ours, theirs = pair
    array = theirs.arena.from_array(np.arange(100, dtype=np.uint8))
    region = opened(ours, theirs, theirs.regions.register(array[10:90]))
    view = region.view(5, 3)
    assert view is not None and view.readonly and bytes(view) == b"\x0f\x10\x11"
    array[15] = 99
    assert view[0] == 99
    whole = region.view()
    assert whole is not None and whole.nbytes == 80


def test_what_is_not_in_shared_memory_cannot_be_registered(pair: Pair) -> None:
    regions = pair[0].regions
    with pytest.raises(LocalProtocolError, match=r"arena\.empty"):
        regions.register(np.zeros(4))
    with pytest.raises(LocalProtocolError, match=r"arena\.empty"):
        regions.register(pair[0].arena.empty((4, 4))[:, 1])


def test_the_owner_resolves_only_what_it_has_registered(pair: Pair) -> None:
    ours, theirs = pair
    regions = ours.regions
    target = ours.inbox.empty((2, 4), np.float32)
    handle = regions.register(target)
    regions.resolve(handle, 16, 16, write=True)[:] = np.ones(4, np.float32).tobytes()
    assert target[1].tolist() == [1.0] * 4
    assert regions.resolve(handle, 0, 32, write=False).readonly
    read_only = regions.register(ours.arena.empty(8))
    with pytest.raises(RemoteProtocolError, match="read-only"):
        regions.resolve(read_only, 0, 1, write=True)
    for offset, nbytes in ((-1, 1), (0, 33), (33, 0), (0, -1)):
        with pytest.raises(RemoteProtocolError, match="outside a region"):
            regions.resolve(handle, offset, nbytes, write=True)
    forged = msgspec.structs.replace(handle, nbytes=handle.nbytes + 1)
    regions.release(handle)
    for other in (forged, handle):
        with pytest.raises(RemoteProtocolError, match="no region"):
            regions.resolve(other, 0, 1, write=True)
    with pytest.raises(RemoteProtocolError, match="came to slot 1"):
        theirs.regions.resolve(handle, 0, 1, write=True)


def test_empty_and_strided_puts(pair: Pair) -> None:
    ours, theirs = pair
    region = opened(ours, theirs, inbox(theirs, 8)[1])
    region.put(np.empty(0), channel=0, value=1)
    region.put(b"", 8, channel=0, value=1)
    assert theirs.wait(0, 0, 1) == _native.WAIT_OK
    with pytest.raises(LocalProtocolError, match="C-contiguous"):
        region.put(np.zeros((2, 4), np.uint8).T[:2], channel=0, value=2)
    with pytest.raises(LocalProtocolError, match="writable"):
        region.get(b"12345678")


def test_a_put_of_bytes_that_overlap_its_target(pair: Pair) -> None:
    ours, theirs = pair
    target, handle = inbox(theirs, 1 << 16)
    region = opened(ours, theirs, handle)
    numbers = np.random.default_rng(1).integers(0, 256, len(target), np.uint8)
    for shift in (-40_001, -3, 3, 40_001):
        target[:] = numbers
        view = region.view(max(0, -shift), len(target) - abs(shift))
        assert view is not None
        region.put(view, max(0, shift), channel=0, value=1)
        moved = slice(max(0, shift), len(target) + min(0, shift))
        assert np.array_equal(target[moved], numbers[max(0, -shift) : len(target) - max(0, shift)])


def test_a_handle_of_another_incarnation_is_stale(pair: Pair) -> None:
    ours, theirs = pair
    handle = inbox(theirs, 8)[1]
    with pytest.raises(RemoteProtocolError, match="stale"):
        opened(ours, theirs, msgspec.structs.replace(handle, incarnation=handle.incarnation - 1))
    with pytest.raises(RemoteProtocolError, match="names slot 7"):
        opened(ours, theirs, msgspec.structs.replace(handle, slot=7))


def test_an_arena_cannot_be_put_into(pair: Pair) -> None:
    ours, theirs = pair
    handle = theirs.regions.register(theirs.arena.empty(8))
    with pytest.raises(RemoteProtocolError, match="read-only"):
        opened(ours, theirs, handle).put(np.zeros(1), channel=0, value=1)
    with pytest.raises(RemoteProtocolError, match="outside its inbox"):
        opened(ours, theirs, msgspec.structs.replace(handle, writable=True))


def test_calls_of_no_use_are_refused_and_change_nothing(pair: Pair) -> None:
    ours, theirs = pair
    target, handle = inbox(theirs, 8)
    region = opened(ours, theirs, handle)
    for offset in (-1, 1, 9, 1 << 64, -(1 << 64)):
        with pytest.raises(RemoteProtocolError, match="outside a region"):
            region.put(np.ones(8, np.uint8), offset, channel=0, value=1)
        with pytest.raises(RemoteProtocolError, match="outside a region"):
            region.view(offset, 8)
    for channel, value in ((_native.CHANNELS, 1), (-1, 1), (0, -1), (0, 1 << 64)):
        with pytest.raises(LocalProtocolError):
            region.put(np.ones(8, np.uint8), channel=channel, value=value)
        with pytest.raises(LocalProtocolError):
            region.notify(channel, value)
    region.close()
    for call in (lambda: region.put(b"1", channel=0, value=1), lambda: region.notify(0, 1), region.view):
        with pytest.raises(LocalProtocolError, match="closed"):
            call()
    assert not target.any() and _native.load_cell(theirs.base, ours.slot, 0) == 0


def test_memory_of_one_who_died_waits_until_its_end_is_proven(pair: Pair) -> None:
    ours = pair[0]
    held = ours.inbox.empty(1 << 15, np.uint8)
    _native.set_lost(ours.base, 1)
    del held
    assert ours.inbox.waiting_blocks == 1 and ours.inbox.used_bytes == 1 << 15
    with pytest.raises(ArenaFull, match="proven gone"):
        ours.inbox.empty(1 << 16, np.uint8)
    _native.set_lost(ours.base, 2)
    ours.end_proven(1)
    assert ours.inbox.waiting_blocks == 1
    ours.clear_lost(2)
    assert ours.inbox.waiting_blocks == 0
    whole = ours.inbox.empty(1 << 16, np.uint8)
    _native.set_lost(ours.base, 2)
    del whole
    assert ours.inbox.waiting_blocks == 1, "of a replacement nothing is proven yet"
    freed = ours.arena.empty(1 << 16, np.uint8)
    del freed
    assert ours.arena.used_bytes == 0, "peers only read the arena"


def test_a_released_region_lives_until_each_writer_is_gone(pair: Pair) -> None:
    ours = pair[0]
    regions = ours.regions
    handle = regions.register(ours.inbox.empty(64, np.uint8), writers=(1, 2))
    regions.release(handle)
    regions.release(handle)
    with pytest.raises(RemoteProtocolError, match="no region"):
        regions.resolve(handle, 0, 1, write=True)
    assert (regions.closing, ours.inbox.used_bytes) == (1, 64)
    regions.writer_gone(2)
    regions.writer_gone(2)
    assert (regions.closing, ours.inbox.used_bytes) == (1, 64)
    ours.end_proven(1)
    assert (regions.closing, ours.inbox.used_bytes) == (0, 0)
    gone_first = regions.register(ours.inbox.empty(64, np.uint8), writers=(1,))
    ours.end_proven(1)
    assert regions.resolve(gone_first, 0, 64, write=True).nbytes == 64
    regions.release(gone_first)
    assert (regions.closing, ours.inbox.used_bytes) == (0, 0)


@pytest.mark.parametrize("how", ["killed", "leaves", "replaced"])
def test_a_put_to_one_who_has_ended_raises(pair: Pair, fork: Fork, how: str) -> None:
    ours, theirs = pair

    def child() -> None:
        life = LifeThread(theirs)
        if how == "leaves":
            life.goodbye()
        os._exit(0)

    region = opened(ours, theirs, inbox(theirs, 8)[1])
    region.put(b"12345678", channel=0, value=1)
    os.waitpid(fork(child), 0)
    if how == "replaced":
        ours.clear_lost(theirs.slot)
    with pytest.raises(PeerLost):
        region.put(b"12345678", channel=0, value=2)
    with pytest.raises(PeerLost):
        region.notify(0, 2)
    with pytest.raises(PeerLost):
        region.get(bytearray(8))
    view = region.view()
    assert view is not None and bytes(view) == b"12345678"


extremes = st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-70_000, 300_000))


@given(
    slot=st.integers(0, 2),
    offset=extremes,
    nbytes=extremes,
    writable=st.booleans(),
    at=extremes,
    count=st.one_of(st.none(), extremes),
)
def test_no_forged_handle_reaches_outside_the_region(
    slot: int, offset: int, nbytes: int, writable: bool, at: int, count: int | None
) -> None:
    theirs = Segment.create(slot=1, incarnation=1, arena_bytes=1 << 16, inbox_bytes=1 << 16)
    peer = PeerSegment.attach(theirs.fds, slot=1)
    handle = RegionHandle(slot=slot, incarnation=1, offset=offset, nbytes=nbytes, writable=writable)
    try:
        view = peer.open_region(handle, theirs).view(at, count)
    except RemoteProtocolError:
        pass
    else:
        begin = _native.address_of(view) - peer.base
        low, high = (_native.OFF_END, peer.arena_offset) if writable else (peer.arena_offset, peer.nbytes)
        assert low <= begin and begin + view.nbytes <= high and view.readonly
    finally:
        theirs.close()


async def test_what_a_loop_puts_off_keeps_its_order_and_its_buffers(pair: Pair) -> None:
    ours = pair[0]
    theirs = Segment.create(slot=2, incarnation=1, arena_bytes=0, inbox_bytes=24 << 20)
    try:
        target, handle = inbox(theirs, 24 << 20)
        region = opened(ours, theirs, handle)
        transfers = [
            region.put(bytearray([round_]) * (20 << 20), channel=0, value=round_) for round_ in (1, 2, 3)
        ]
        transfers.append(region.put(b"small", 3, channel=0, value=4))
        region.notify(0, 5)
        for given_up in (asyncio.ensure_future(_awaited(transfer)) for transfer in transfers[:2]):
            await asyncio.sleep(0)
            given_up.cancel()
        region.close()
        assert await asyncio.to_thread(theirs.wait, ours.slot, 0, 5) == _native.WAIT_OK
        assert bytes(target[:9]) == b"\3\3\3small\3" and int(target[9 : 20 << 20].min()) == 3
        await asyncio.gather(*(_awaited(transfer) for transfer in transfers))
    finally:
        theirs.close()


async def test_a_large_get_on_a_loop_fills_the_buffer_before_it_is_done(pair: Pair) -> None:
    ours = pair[0]
    theirs = Segment.create(slot=2, incarnation=1, arena_bytes=8 << 20, inbox_bytes=0)
    try:
        array = theirs.arena.from_array(np.arange(1 << 20))
        into = np.zeros(1 << 20, np.int64)
        await opened(ours, theirs, theirs.regions.register(array)).get(into)
        assert np.array_equal(into, array)
    finally:
        theirs.close()


async def _awaited(transfer: Transfer) -> None:
    await transfer
