"""Messages of up to 1 MiB, which their sender copies into its segment while the receiver copies them out."""

from __future__ import annotations

import struct
import threading
from collections.abc import Generator

import numpy as np
import pytest
from support.links.message_world import ARENA_BYTES, LONG_NS, World, label, over, receive, send

from zbmd.collectives.native import _messages as native
from zbmd.collectives.native._messages import MEMBER_BYTES, SLOTS_MAX, STAGED_BYTES_MAX
from zbmd.transport.native import _native

SIZES = (8_192, 30_000, 100_003, STAGED_BYTES_MAX // 4)
"""Elements of int32."""
BLOCKS = native.STAGE_BYTES // STAGED_BYTES_MAX
STAGED_AT, COPIED_AT = 40, 48
"""Of words in a slot."""


@pytest.fixture
def world() -> Generator[World]:
    made = World.of(2, staged=True)
    yield made
    made.close()


def write_word(world: World, at: int, value: int) -> None:
    """Into the first slot that rank 0 fills at rank 1."""
    slot = _native.OFF_END + MEMBER_BYTES // SLOTS_MAX
    world.segments[1].mapping.view(slot + at, 8, writable=True)[:] = struct.pack("=Q", value)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("posted_first", [False, True])
def test_its_sender_goes_on_at_once(world: World, size: int, posted_first: bool) -> None:
    x, out = np.arange(size, dtype=np.int32), np.zeros(size, np.int32)
    came = receive(world.ends[1], out, 0) if posted_first else None
    assert over(send(world.ends[0], x, 1))
    x[:] = -1
    assert world.ends[0].copies == [1]
    came = came or receive(world.ends[1], out, 0)
    world.ends[1].progress()
    assert over(came) and (out == np.arange(size)).all()
    assert world.ends[0].copies == []


def test_blocks_are_used_again_and_without_one_the_message_stays_where_it_is(world: World) -> None:
    size = STAGED_BYTES_MAX // 4
    for round_ in range(3):
        sent = [send(world.ends[0], np.full(size, round_ + k, np.int32), 1) for k in range(BLOCKS + 1)]
        assert [request.is_over for request in sent] == [True] * BLOCKS + [False]
        for k in range(BLOCKS + 1):
            out = np.zeros(size, np.int32)
            assert over(receive(world.ends[1], out, 0)) and (out == round_ + k).all()
        world.ends[0].progress()
        assert over(sent[-1]) and world.ends[0].copies == [] and world.ends[0].is_idle


def test_a_full_arena_is_done_without(world: World) -> None:
    taken = world.segments[0].arena.empty(ARENA_BYTES - native.STAGE_BYTES, np.uint8)
    x, out = np.arange(30_000, dtype=np.int32), np.zeros(30_000, np.int32)
    sent = send(world.ends[0], x, 1)
    assert not sent.is_over and over(receive(world.ends[1], out, 0)) and (out == x).all()
    del taken


def test_a_receiver_follows_its_sender(world: World) -> None:
    """Both copy at once: the message is whole whenever the receiver comes."""
    rounds, size = 200, SIZES[-1]
    outs = [np.zeros(size, np.int32) for _ in range(rounds)]

    def receive_all() -> None:
        for out in outs:
            request = receive(world.ends[1], out, 0)
            assert world.ends[1].wait(request, LONG_NS) and request.failure == 0

    thread = threading.Thread(target=receive_all)
    thread.start()
    for k in range(rounds):
        assert world.ends[0].wait(send(world.ends[0], np.full(size, k, np.int32), 1), LONG_NS)
    thread.join()
    assert all((out == k).all() for k, out in enumerate(outs))


def test_a_sender_that_stops_in_the_midst_is_waited_for_until_the_deadline(world: World) -> None:
    x, out = np.arange(30_000, dtype=np.int32), np.zeros(30_000, np.int32)
    send(world.ends[0], x, 1)
    write_word(world, COPIED_AT, 4096)
    assert over(world.ends[1].receive(out, 0, 0, label(out), 1), native.DEADLINE)
    write_word(world, COPIED_AT, x.nbytes)
    assert over(receive(world.ends[1], out, 0)) and (out == x).all(), "it stays for the next receive"


def test_a_sender_that_ends_in_the_midst_is_lost(world: World) -> None:
    out = np.zeros(30_000, np.int32)
    send(world.ends[0], np.ones(30_000, np.int32), 1)
    write_word(world, COPIED_AT, 4096)
    world.segments[0].mapping.view(_native.OFF_GOODBYE, 4, writable=True)[:] = struct.pack("=I", 1)
    assert over(receive(world.ends[1], out, 0), native.LOST)


@pytest.mark.parametrize("at", [1, _native.OFF_END - 64, 1 << 40, (1 << 64) - 64])
def test_a_slot_that_points_beyond_its_senders_segment_is_an_error(world: World, at: int) -> None:
    x = np.ones(30_000, np.int32)
    send(world.ends[0], x, 1)
    write_word(world, STAGED_AT, at)
    assert over(receive(world.ends[1], np.zeros_like(x), 0), native.UNREADABLE)
