"""Notify cells and the native wait: who may end it, and which end wins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native import _native

Fork = Callable[[Callable[[], None]], int]

SLOT, CHANNEL = 5, 3
EPOCH_1 = 1 << 32


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(slot=0, incarnation=1, arena_bytes=0, inbox_bytes=4096)
    yield made
    made.close()


def wait(segment: Segment, value: int, **limits: int) -> int:
    return _native.wait(segment.base, SLOT, CHANNEL, value, **limits)


def test_a_value_that_has_arrived_wins_over_every_other_end(segment: Segment) -> None:
    _native.notify(segment.base, SLOT, CHANNEL, EPOCH_1 | 7)
    _native.set_lost(segment.base, SLOT)
    _native.abort_channel(segment.base, CHANNEL, 1)
    for value in (EPOCH_1 | 1, EPOCH_1 | 6, EPOCH_1 | 7):
        assert wait(segment, value, group_mask=1 << SLOT, deadline_ns=1) == _native.WAIT_OK
    assert _native.load_cell(segment.base, SLOT, CHANNEL) == EPOCH_1 | 7


def test_a_value_of_a_later_epoch_is_another_groups_and_ends_the_wait(segment: Segment) -> None:
    _native.notify(segment.base, SLOT, CHANNEL, 2 << 32 | 1)
    assert wait(segment, EPOCH_1 | 1) == _native.WAIT_ABORTED
    assert wait(segment, EPOCH_1 | 1, spins=3) == _native.WAIT_ABORTED
    assert wait(segment, 2 << 32 | 1) == _native.WAIT_OK


def test_a_lost_peer_ends_only_the_waits_of_its_groups(segment: Segment) -> None:
    _native.set_lost(segment.base, SLOT)
    assert wait(segment, 1, group_mask=1 << SLOT) == _native.WAIT_LOST
    assert wait(segment, 1, group_mask=1 << 6, deadline_ns=1) == _native.WAIT_DEADLINE
    segment.clear_lost(SLOT)
    assert wait(segment, 1, group_mask=1 << SLOT, deadline_ns=1) == _native.WAIT_DEADLINE


def test_who_had_ended_the_channel_before_its_end_ends_no_wait_for_the_others(segment: Segment) -> None:
    other = SLOT + 1
    group = 1 << SLOT | 1 << other
    _native.notify(segment.base, SLOT, CHANNEL, EPOCH_1 | 0xFFFFFFFF)
    _native.set_lost(segment.base, SLOT)

    def wait_for_other(value: int, channel: int = CHANNEL) -> int:
        return _native.wait(segment.base, other, channel, value, group_mask=group, deadline_ns=1)

    assert wait_for_other(EPOCH_1 | 1) == _native.WAIT_DEADLINE
    assert wait_for_other(2 << 32 | 1) == _native.WAIT_LOST  # of the next epoch it has ended nothing
    assert wait_for_other(EPOCH_1 | 1, CHANNEL + 1) == _native.WAIT_LOST  # nor on another channel
    _native.set_lost(segment.base, other)
    assert wait_for_other(EPOCH_1 | 1) == _native.WAIT_LOST


def test_an_abort_ends_waits_of_its_channel_up_to_its_epoch_and_never_goes_back(segment: Segment) -> None:
    _native.abort_channel(segment.base, CHANNEL, 2)
    _native.abort_channel(segment.base, CHANNEL, 1)
    assert wait(segment, EPOCH_1 | 1) == _native.WAIT_ABORTED
    assert wait(segment, 2 << 32 | 0xFFFFFFFF) == _native.WAIT_ABORTED
    assert wait(segment, 3 << 32 | 1, deadline_ns=1) == _native.WAIT_DEADLINE
    assert _native.wait(segment.base, SLOT, CHANNEL + 1, 1, deadline_ns=1) == _native.WAIT_DEADLINE


def test_a_deadline_in_the_future_is_waited_for(segment: Segment) -> None:
    deadline_ns = _native.now_ns() + 2_000_000
    assert wait(segment, 1, deadline_ns=deadline_ns) == _native.WAIT_DEADLINE
    assert _native.now_ns() >= deadline_ns


@pytest.mark.parametrize("end", ["notify", "lost", "abort"])
def test_a_parked_wait_is_woken_from_another_thread(segment: Segment, end: str) -> None:
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(wait(segment, EPOCH_1, group_mask=1 << SLOT)))
    waiter.start()
    match end:
        case "notify":
            _native.notify(segment.base, SLOT, CHANNEL, EPOCH_1)
        case "lost":
            _native.set_lost(segment.base, SLOT)
        case _:
            _native.abort_channel(segment.base, CHANNEL, 1)
    waiter.join()
    expected = {"notify": _native.WAIT_OK, "lost": _native.WAIT_LOST, "abort": _native.WAIT_ABORTED}
    assert results == [expected[end]]


def test_two_processes_play_ping_pong_and_see_each_others_stores(segment: Segment, fork: Fork) -> None:
    rounds = 2_000
    ours = Segment.create(slot=1, incarnation=1, arena_bytes=4096, inbox_bytes=4096)

    def echo_from_slot_0() -> None:
        peer = PeerSegment.attach(ours.fds, slot=1)
        source, target = (
            segment.mapping.view(_native.OFF_END, 8),
            peer.mapping.view(_native.OFF_END, 8, writable=True),
        )
        for number in range(1, rounds + 1):
            assert segment.wait(1, 0, number) == _native.WAIT_OK
            target[:] = source
            peer.notify(0, 0, number)

    child = fork(echo_from_slot_0)
    peer = PeerSegment.attach(segment.fds, slot=0)
    echo, message = (
        ours.mapping.view(_native.OFF_END, 8),
        peer.mapping.view(_native.OFF_END, 8, writable=True),
    )
    for number in range(1, rounds + 1):
        message[:] = number.to_bytes(8, "little")
        peer.notify(1, 0, number)
        assert ours.wait(0, 0, number, spins=100) == _native.WAIT_OK
        assert int.from_bytes(echo, "little") == number
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ours.close()


@pytest.mark.parametrize(("slot", "channel"), [(1024, 0), (0, _native.CHANNELS), (1 << 31, 0)])
def test_cells_out_of_range_are_refused(segment: Segment, slot: int, channel: int) -> None:
    with pytest.raises(LocalProtocolError):
        _native.notify(segment.base, slot, channel, 1)
    with pytest.raises(LocalProtocolError):
        _native.wait(segment.base, slot, channel, 1)


def test_a_value_beyond_64_bits_is_refused(segment: Segment) -> None:
    with pytest.raises(OverflowError):
        _native.notify(segment.base, 0, 0, 1 << 64)
