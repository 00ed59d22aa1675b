"""The mask of the lost: many words of a segment, of which a wait looks at those that its group is in."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.view import RANKS_MAX
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.segment import NODE_SLOT, PeerSegment, Segment
from zbmd.transport.native import _native
from zbmd.transport.native._native import Watch
from zbmd.transport.shm.death_notice import LifeThread

Fork = Callable[[Callable[[], None]], int]

CHANNEL = 7
EPOCH = 3 << 32
AWAITED = 300
ENDED = EPOCH | 0xFFFFFFFF
EDGES = (0, 1, *range(61, 68), *range(126, 131), *range(959, 962), *range(NODE_SLOT - 3, NODE_SLOT + 1))
SLOTS = st.frozensets(st.one_of(st.sampled_from(EDGES), st.integers(0, NODE_SLOT)), max_size=12)


def segment_of(slot: int, *, slots: int = NODE_SLOT) -> Segment:
    return Segment.create(slot=slot, incarnation=1, arena_bytes=0, inbox_bytes=0, slots=slots)


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    made = segment_of(200)
    yield made
    made.close()


def mask_of(slots: frozenset[int]) -> int:
    return sum(1 << slot for slot in slots)


def test_the_ranks_of_a_job_and_its_node_have_a_slot_each() -> None:
    assert RANKS_MAX == NODE_SLOT - 1 == _native.MAX_SLOTS - 2 == 1022


@given(lost=SLOTS, group=SLOTS, ended=SLOTS, back=SLOTS)
def test_a_wait_ends_with_the_loss_of_its_own_alone(
    lost: frozenset[int], group: frozenset[int], ended: frozenset[int], back: frozenset[int]
) -> None:
    with contextlib.closing(segment_of(200)) as segment:
        for slot in ended - {AWAITED}:
            _native.notify(segment.base, slot, CHANNEL, ENDED)
        for slot in lost:
            segment.set_lost(slot)
        assert segment.lost_mask() == mask_of(lost)
        for slot in back:
            segment.clear_lost(slot)
        assert segment.lost_mask() == mask_of(lost - back)
        is_lost = bool((lost & group) - back - (ended - {AWAITED}))
        expected = _native.WAIT_LOST if is_lost else _native.WAIT_DEADLINE
        mask = mask_of(group)
        found = _native.wait(segment.base, AWAITED, CHANNEL, EPOCH | 1, group_mask=mask, deadline_ns=1)
        again = segment.wait(AWAITED, CHANNEL, EPOCH | 1, group_mask=mask, deadline_ns=1, spins=0)
        assert found == again == expected


@pytest.mark.parametrize("slot", EDGES)
def test_a_loss_is_nobody_elses(segment: Segment, slot: int) -> None:
    segment.set_lost(slot)
    everyone = (1 << _native.MAX_SLOTS) - 1
    for group, end in ((everyone, _native.WAIT_LOST), (1 << slot, _native.WAIT_LOST)):
        assert segment.wait(AWAITED, CHANNEL, 1, group_mask=group, deadline_ns=1, spins=0) == end
    for other in (everyone ^ 1 << slot, 1 << (slot ^ 1), 1 << (slot ^ 64), 0):
        assert (
            segment.wait(AWAITED, CHANNEL, 1, group_mask=other, deadline_ns=1, spins=0)
            == _native.WAIT_DEADLINE
        )
    segment.clear_lost(slot)


@pytest.mark.parametrize("mask", [1 << _native.MAX_SLOTS, -1, -(1 << 70)])
def test_a_mask_of_slots_that_do_not_exist_is_refused(segment: Segment, mask: int) -> None:
    with pytest.raises(OverflowError):
        segment.wait(0, CHANNEL, 1, group_mask=mask, deadline_ns=1, spins=0)
    with pytest.raises(OverflowError):
        _native.wait(segment.base, 0, CHANNEL, 1, group_mask=mask, deadline_ns=1)


def test_cells_of_all_slots_are_apart(segment: Segment) -> None:
    for slot in EDGES:
        for channel in (0, _native.CHANNELS - 1):
            _native.notify(segment.base, slot, channel, slot << 8 | channel + 1)
    for slot in EDGES:
        for channel in (0, _native.CHANNELS - 1):
            assert _native.load_cell(segment.base, slot, channel) == slot << 8 | channel + 1
    assert segment.lost_mask() == 0
    assert all(
        segment.mapping.load64(offset) == 0 for offset in range(_native.OFF_DESCRIPTORS, _native.OFF_END, 8)
    )
    for slot in EDGES:
        for channel in (0, _native.CHANNELS - 1):
            _native.notify(segment.base, slot, channel, 0)


def test_losses_of_many_at_once_end_the_waits_of_all_of_their_groups(segment: Segment) -> None:
    results: dict[int, int] = {}

    def parked(slot: int) -> None:
        results[slot] = _native.wait(segment.base, AWAITED, CHANNEL, 1, group_mask=1 << slot)

    waiters = [threading.Thread(target=parked, args=(slot,)) for slot in EDGES]
    for waiter in waiters:
        waiter.start()
    for slot in reversed(EDGES):
        segment.set_lost(slot)
    for waiter in waiters:
        waiter.join()
    assert results == dict.fromkeys(EDGES, _native.WAIT_LOST)
    for slot in EDGES:
        segment.clear_lost(slot)


def test_a_kill_is_noticed_in_every_slot(fork: Fork) -> None:
    """By watchers whose words the kernel finds at both ends of the list, of a victim behind slot 64."""
    theirs = segment_of(130)
    ours = [segment_of(slot) for slot in EDGES]
    read, write = os.pipe()

    def victim() -> None:
        LifeThread(theirs)
        os.write(write, b"!")
        signal.pause()

    pid = fork(victim)
    assert os.read(read, 1) == b"!"
    peer = PeerSegment.attach(theirs.fds, slot=130)
    event_fd = os.eventfd(0)
    watches = [Watch(own.mapping, own.slot, peer.mapping, 130, event_fd) for own in ours]
    os.kill(pid, signal.SIGKILL)
    for own in ours:
        end = _native.wait(own.base, 130, CHANNEL, 1, group_mask=1 << 130)
        assert end == _native.WAIT_LOST and own.lost_mask() == 1 << 130
    os.waitpid(pid, 0)
    for watch in watches:
        watch.stop()
    for fd in (read, write, event_fd):
        os.close(fd)
    for made in (*ours, theirs):
        made.close()


def test_a_small_job_holds_the_words_of_its_ranks_and_the_nodes_alone() -> None:
    own, node, rank, stranger = (
        segment_of(69, slots=70),
        segment_of(NODE_SLOT),
        segment_of(68),
        segment_of(70),
    )
    peer = PeerSegment.attach(own.fds, slot=69)
    event_fd = os.eventfd(0)
    life = LifeThread(own)
    for other in (node, rank):
        Watch(other.mapping, other.slot, peer.mapping, 69, event_fd).stop()
    with pytest.raises(RemoteProtocolError, match="has not started its life thread"):
        Watch(stranger.mapping, stranger.slot, peer.mapping, 69, event_fd)
    with pytest.raises(LocalProtocolError, match="there are 0 to 1023"):
        segment_of(0, slots=NODE_SLOT + 1)
    life.goodbye()
    os.close(event_fd)
    for made in (own, node, rank, stranger):
        made.close()
