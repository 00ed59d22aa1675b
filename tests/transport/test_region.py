"""Regions: put and get across processes, and handles that must not work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport import _native
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.region import RegionHandle, Regions
from zbmd.transport.segment import PeerSegment, Segment

Fork = Callable[[Callable[[], None]], int]


@pytest.fixture
def pair() -> Iterator[tuple[Segment, Segment]]:
    made = tuple(
        Segment.create(slot=slot, incarnation=10 + slot, arena_bytes=1 << 16, inbox_bytes=1 << 16)
        for slot in range(2)
    )
    yield made[0], made[1]
    for segment in made:
        segment.close()


def regions_of(own: Segment, peer: Segment) -> Regions:
    return Regions(own, {peer.slot: PeerSegment.attach(peer.fd, slot=peer.slot)})


def wait(own: Segment, slot: int, value: int) -> int:
    return own.wait(slot, 0, value)


def test_put_and_get_across_processes(pair: tuple[Segment, Segment], fork: Fork) -> None:
    ours, theirs = pair
    inbox = ours.inbox.empty((4, 100), np.float32)
    handle = msgspec.msgpack.encode(regions_of(ours, theirs).register(inbox))

    def child() -> None:
        regions = regions_of(theirs, ours)
        target = msgspec.msgpack.decode(handle, type=RegionHandle)
        for row in range(4):
            source = np.arange(100, dtype=np.float32) + row
            regions.put(source, target, offset=row * source.nbytes, channel=0, value=row + 1)
        assert wait(theirs, 0, 1) == _native.WAIT_OK
        shared = regions.get(RegionHandle(slot=0, incarnation=10, offset=offset, nbytes=80, writable=False))
        assert np.frombuffer(shared, np.int64).tolist() == list(range(10))

    numbers = ours.arena.from_array(np.arange(10, dtype=np.int64))
    offset = regions_of(ours, theirs).register(numbers).offset
    pid = fork(child)
    for row in range(4):
        assert wait(ours, 1, row + 1) == _native.WAIT_OK
        assert inbox[row].tolist() == [float(i + row) for i in range(100)]
    PeerSegment.attach(theirs.fd, slot=1).notify(0, 0, 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_part_of_a_region_is_read_without_a_copy(pair: tuple[Segment, Segment]) -> None:
    ours, theirs = pair
    array = theirs.arena.from_array(np.arange(100, dtype=np.uint8))
    handle = regions_of(theirs, ours).register(array[10:90])
    view = regions_of(ours, theirs).get(handle, 5, 3)
    assert view.readonly and bytes(view) == b"\x0f\x10\x11"
    array[15] = 99
    assert view[0] == 99
    assert regions_of(ours, theirs).get(handle).nbytes == 80


def test_what_is_not_in_shared_memory_cannot_be_registered(pair: tuple[Segment, Segment]) -> None:
    regions = regions_of(*pair)
    with pytest.raises(LocalProtocolError, match=r"arena\.empty"):
        regions.register(np.zeros(4))
    with pytest.raises(LocalProtocolError, match=r"arena\.empty"):
        regions.register(pair[0].arena.empty((4, 4))[:, 1])


def test_empty_and_strided_puts(pair: tuple[Segment, Segment]) -> None:
    ours, theirs = pair
    target = theirs.inbox.empty(8, np.uint8)
    handle = regions_of(theirs, ours).register(target)
    regions_of(ours, theirs).put(np.empty(0), handle, channel=0, value=1)
    assert wait(theirs, 0, 1) == _native.WAIT_OK
    with pytest.raises(LocalProtocolError, match="C-contiguous"):
        regions_of(ours, theirs).put(np.zeros((2, 4), np.uint8).T[:2], handle, channel=0, value=2)


def test_a_handle_of_another_incarnation_is_stale(pair: tuple[Segment, Segment]) -> None:
    ours, theirs = pair
    handle = regions_of(theirs, ours).register(theirs.arena.empty(8))
    stale = msgspec.structs.replace(handle, incarnation=handle.incarnation - 1)
    with pytest.raises(RemoteProtocolError, match="stale"):
        regions_of(ours, theirs).get(stale)
    with pytest.raises(RemoteProtocolError, match="no peer"):
        regions_of(ours, theirs).get(msgspec.structs.replace(handle, slot=7))


def test_an_arena_cannot_be_put_into(pair: tuple[Segment, Segment]) -> None:
    ours, theirs = pair
    handle = regions_of(theirs, ours).register(theirs.arena.empty(8))
    with pytest.raises(RemoteProtocolError, match="read-only"):
        regions_of(ours, theirs).put(np.zeros(1), handle, channel=0, value=1)
    forged = msgspec.structs.replace(handle, writable=True)
    with pytest.raises(RemoteProtocolError, match="outside the inbox"):
        regions_of(ours, theirs).put(np.zeros(1), forged, channel=0, value=1)


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
    peer = PeerSegment.attach(theirs.fd, slot=1)
    handle = RegionHandle(slot=slot, incarnation=1, offset=offset, nbytes=nbytes, writable=writable)
    try:
        view = Regions(theirs, {1: peer}).get(handle, at, count)
    except RemoteProtocolError:
        pass
    else:
        begin = _native.address_of(view) - peer.base
        low, high = (_native.OFF_END, peer.arena_offset) if writable else (peer.arena_offset, peer.nbytes)
        assert low <= begin and begin + view.nbytes <= high and view.readonly
    finally:
        theirs.close()
