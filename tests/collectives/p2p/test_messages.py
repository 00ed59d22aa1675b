"""Messages in slots, among ranks that are all this process: matching, order, bounds, and every end."""

from __future__ import annotations

import struct
import threading
from collections.abc import Generator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.message_world import CHANNEL, EPOCH, LONG_NS, World, over, receive, send

from zbmd.collectives.native import _messages as native
from zbmd.collectives.native._messages import MEMBER_BYTES, SLOTS_MAX, MessageSlots, Request
from zbmd.transport.native import _native

RANKS = 3
SIZES = (1, 20, 5_000, 30_000, 700_003)
"""Elements of int32: in the slot, in the slot, copied, read where they lie, and read by two threads."""


@pytest.fixture
def world() -> Generator[World]:
    made = World.of(RANKS)
    yield made
    made.close()


calls = st.lists(
    st.tuples(
        st.booleans(),  # whether it is a send
        st.integers(0, RANKS - 1),
        st.integers(-1, RANKS - 1),
        st.integers(0, 2),
        st.sampled_from(SIZES[:2]),
    ),
    max_size=60,
)


@given(calls)
def test_messages_match_as_mpi_has_it(history: list[tuple[bool, int, int, int, int]]) -> None:
    """Beside a model: what came first goes to the first receive that was posted and fits."""
    world = World.of(RANKS)
    waiting: dict[int, list[tuple[int, int, np.ndarray, Request]]] = {rank: [] for rank in range(RANKS)}
    here: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(RANKS)}
    for number, (sends, rank, other, tag, size) in enumerate(history):
        if sends and other >= 0:
            assert over(send(world.ends[rank], np.full(size, number, np.int32), other, tag + 10 * size))
            world.ends[other].progress()
            here[other].append((rank, tag + 10 * size, number))
        elif not sends:
            out = np.full(size, -1, np.int32)
            request = receive(world.ends[rank], out, other, tag + 10 * size)
            waiting[rank].append((other, tag + 10 * size, out, request))
        for place in range(RANKS):
            for wanted in list(waiting[place]):
                source, fits, out, request = wanted
                found = [m for m in here[place] if source in (-1, m[0]) and fits == m[1]]
                first = (
                    min(found, key=lambda m: m[0]) if source < 0 and found else found[0] if found else None
                )
                assert request.is_over == (first is not None)
                if first is not None:
                    here[place].remove(first)
                    waiting[place].remove(wanted)
                    assert request.source == first[0] and (out == first[2]).all()
    world.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("posted_first", [False, True])
def test_a_message_of_any_size_arrives_whole(world: World, size: int, posted_first: bool) -> None:
    x, out = np.arange(size, dtype=np.int32), np.zeros(size, np.int32)
    came = receive(world.ends[1], out, 0) if posted_first else None
    sent = send(world.ends[0], x, 1)
    is_lent = x.nbytes > native.COPIED_BYTES_MAX
    assert sent.is_over != is_lent, "a small one may change at once"
    assert is_lent != (world.ends[0].copies == [1] or x.nbytes <= 80)
    if not is_lent:
        x_then = x.copy()
        x[:] = -1
    else:
        x_then = x
    if came is None:
        came = receive(world.ends[1], out, 0)
    world.ends[1].progress()
    world.ends[0].progress()
    assert over(came) and over(sent) and (out == x_then).all()
    assert world.ends[0].copies == [] and world.ends[0].is_idle and world.ends[1].is_idle


def test_a_rank_sends_to_itself(world: World) -> None:
    out = np.zeros(30_000, np.int32)
    sent = send(world.ends[0], np.ones(30_000, np.int32), 0)
    came = receive(world.ends[0], out, -1)
    world.ends[0].progress()
    assert over(sent) and over(came) and came.source == 0 and out.all()


def test_what_the_slots_cannot_hold_waits_with_its_sender_in_order(world: World) -> None:
    count = 3 * SLOTS_MAX
    sent = [send(world.ends[0], np.array([k], np.int32), 1) for k in range(count)]
    assert [request.is_over for request in sent] == [True] * SLOTS_MAX + [False] * (count - SLOTS_MAX)
    outs = [np.zeros(1, np.int32) for _ in range(count)]
    came = [receive(world.ends[1], out, 0) for out in outs]
    while not all(request.is_over for request in came):
        world.ends[0].progress()
        world.ends[1].progress()
    assert [int(out[0]) for out in outs] == list(range(count)) and all(over(request) for request in sent)


def test_a_message_that_does_not_fit_stays_for_the_next_receive(world: World) -> None:
    send(world.ends[0], np.arange(4, dtype=np.int32), 1)
    wrong = receive(world.ends[1], np.zeros(4, np.float32), 0)
    assert over(wrong, native.MISMATCH) and wrong.theirs == b"int32[4]"
    assert over(receive(world.ends[1], np.zeros(3, np.int32), 0), native.MISMATCH)
    out = np.zeros(4, np.int32)
    assert over(receive(world.ends[1], out, 0)) and out[3] == 3


def test_a_large_message_that_is_withdrawn_is_not_received(world: World) -> None:
    sent = send(world.ends[0], np.ones(30_000, np.int32), 1)
    world.ends[0].withdraw(sent)
    assert over(sent, native.DEADLINE)
    assert over(receive(world.ends[1], np.zeros(30_000, np.int32), 0), native.GIVEN_UP)
    late = receive(world.ends[1], np.zeros(1, np.int32), 0)
    assert world.ends[1].overdue(_native.now_ns()) == []
    assert world.ends[1].overdue(late.deadline_ns) == [late]
    world.ends[1].withdraw(late)
    assert over(late, native.DEADLINE) and world.ends[1].is_idle


def test_what_came_before_a_close_is_received_and_nothing_else(world: World) -> None:
    one, two = world.ends[1], world.ends[2]
    lent = send(two, np.ones(30_000, np.int32), 0)
    send(world.ends[0], np.ones(1, np.int32), 1)
    others = [receive(one, np.zeros(1, np.int32), source, tag=7) for source in (0, 2, -1)]
    world.end_channel(0)
    assert over(receive(one, np.zeros(1, np.int32), 0))
    one.progress()
    two.progress()
    assert [request.failure for request in others] == [native.LEFT, 0, native.LEFT]
    assert over(lent, native.LEFT) and over(send(two, np.ones(1, np.int32), 0), native.LEFT)
    assert over(receive(one, np.zeros(1, np.int32), 0), native.LEFT)
    # A receive from any learns of it once; none waited at rank 2, so its next one does.
    assert not receive(one, np.zeros(1, np.int32), -1).is_over
    assert over(receive(two, np.zeros(1, np.int32), -1), native.LEFT)
    assert not receive(two, np.zeros(1, np.int32), -1).is_over


def test_a_loss_ends_all_that_waits(world: World) -> None:
    send(world.ends[2], np.ones(1, np.int32), 1)
    waits = [
        receive(world.ends[1], np.zeros(1, np.int32), 0),
        send(world.ends[1], np.ones(30_000, np.int32), 0),
    ]
    world.segments[1].set_lost(2)
    world.ends[1].progress()
    assert all(over(request, native.LOST) for request in waits) and world.ends[1].lost == [2]
    assert over(receive(world.ends[1], np.zeros(1, np.int32), 2)), "it came before"
    assert over(receive(world.ends[1], np.zeros(1, np.int32), 0), native.LOST)


def test_after_an_abort_nothing_waits_and_memory_is_let_go(world: World) -> None:
    waits = receive(world.ends[1], np.zeros(1, np.int32), 0)
    _native.abort_channel(world.segments[1].base, CHANNEL, EPOCH)
    world.ends[1].progress()
    assert over(waits, native.ABORTED)
    assert world.ends[1].let_go()
    assert over(receive(world.ends[1], np.zeros(1, np.int32), 0), native.ABORTED)
    assert over(send(world.ends[1], np.ones(1, np.int32), 0), native.ABORTED)
    world.ends[1].progress()


def test_threads_wait_for_each_others_requests(world: World) -> None:
    outs = [np.zeros(30_000, np.int32) for _ in range(4)]
    came = [receive(world.ends[1], out, 0, tag) for tag, out in enumerate(outs)]
    threads = [threading.Thread(target=world.ends[1].wait, args=(request, LONG_NS)) for request in came]
    for thread in threads:
        thread.start()
    sent = [send(world.ends[0], np.full(30_000, tag, np.int32), 1, tag) for tag in reversed(range(4))]
    assert all(world.ends[0].wait(request, LONG_NS) for request in sent)
    for thread in threads:
        thread.join()
    assert all(over(request) for request in [*came, *sent])
    assert all((out == tag).all() for tag, out in enumerate(outs))
    assert not world.ends[1].wait(receive(world.ends[1], outs[0], 0), 1), "the limit has passed"


@pytest.mark.parametrize("size", SIZES[3:])
def test_a_slot_that_points_nowhere_is_an_error(world: World, size: int) -> None:
    x = np.ones(size, np.int32)
    send(world.ends[0], x, 1)
    at = _native.OFF_END + MEMBER_BYTES // SLOTS_MAX
    world.segments[1].mapping.view(at + 24, 8, writable=True)[:] = struct.pack("=Q", 4096)
    assert over(receive(world.ends[1], np.zeros_like(x), 0), native.UNREADABLE)


def test_misuse_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="in one piece"):
        world.ends[0].send(np.zeros((4, 4))[:, 1], 1, 0, b"", LONG_NS)
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="written to"):
        receive(world.ends[0], fixed, 1)
    for to in (-1, RANKS):
        with pytest.raises(IndexError):
            send(world.ends[0], np.zeros(2), to)
    with pytest.raises(ValueError, match="out of bounds"):
        MessageSlots([(1, 0, 1, 0, 0)], rank=1, channel=0, epoch=1, patience_ns=0, mappings=())
