"""Device arrays through page-locked memory and the host's own regions: real pipes, modelled devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.cuda_harness import ModelArray
from support.devices.cuda_model import ModelHost, ModelProcess

from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.cuda.pieces import Action, Begin, Event, Load, Loaded, Pieces, Stored
from zbmd.transport.cuda.staging import PIECE_BYTES, SLOTS, DevicePipe
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.memory.staging import RING_BYTES, StagedPipe
from zbmd.transport.native import _native

Side = tuple[ModelProcess, DevicePipe]
SIZES = (0, 1, PIECE_BYTES, SLOTS * PIECE_BYTES + 1, 5 * PIECE_BYTES - 7)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Two hosts' processes: neither can open the other's memory."""
    segments = [
        Segment.create(slot=slot, incarnation=1, arena_bytes=0, inbox_bytes=RING_BYTES) for slot in range(2)
    ]
    pipes = [StagedPipe(segment, channel=3) for segment in segments]
    for own, other in ((0, 1), (1, 0)):
        peer = PeerSegment.attach(segments[other].fds, slot=other)
        pipes[own].connect(peer.open_region(pipes[other].handle, segments[own]))
    processes = [ModelHost(devices=1, seed=seed).process() for seed in range(2)]
    made = [(process, DevicePipe(process, pipe)) for process, pipe in zip(processes, pipes, strict=True)]
    yield made[0], made[1]
    for _, device_pipe in made:
        device_pipe.close()
        device_pipe.close()
    for pipe, segment in zip(pipes, segments, strict=True):
        pipe.close()
        segment.close()


def beside(work: Callable[[], None]) -> Callable[[], None]:
    """Run it on a thread; what is returned joins it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join()
        assert not errors

    return join


def test_messages_of_many_sizes_both_ways_at_once(sides: tuple[Side, Side]) -> None:
    rng = np.random.default_rng(5)
    data = [rng.integers(0, 256, nbytes, np.uint8) for nbytes in SIZES]

    def send(side: Side) -> None:
        process, pipe = side
        for each in data:
            array = ModelArray(process, each.nbytes)
            if each.nbytes:
                process.compute(array.address, each.nbytes, lambda there, each=each: np.copyto(there, each))
            pipe.send(array)

    def receive(side: Side) -> None:
        process, pipe = side
        for each in data:
            array = ModelArray(process, each.nbytes)
            pipe.receive(array)
            assert np.array_equal(array.host(), each)

    joins = [beside(lambda side=side, work=work: work(side)) for side in sides for work in (send, receive)]
    for join in joins:
        join()


def test_what_ends_a_message_is_told_and_nothing_is_under_way_then(sides: tuple[Side, Side]) -> None:
    (near, near_pipe), (far, far_pipe) = sides
    into = ModelArray(far, 2 * PIECE_BYTES)
    with pytest.raises(DeadlineExceeded):
        near_pipe.receive(ModelArray(near, 8), deadline_ns=_native.now_ns() + 1)
    join = beside(lambda: near_pipe.send(ModelArray(near, 8)))
    with pytest.raises(RemoteProtocolError, match="8 bytes"):
        far_pipe.receive(into)
    join()
    far.free(into.address)
    far.dead = True
    with pytest.raises(CudaFault):
        far_pipe.send(into)


@given(count=st.integers(1, 9), slots=st.integers(1, 4), order=st.lists(st.booleans(), max_size=40))
def test_pieces_go_in_order_through_slots_that_are_free(count: int, slots: int, order: list[bool]) -> None:
    machine = Pieces(count=count, slots=slots)
    loading: list[int] = []
    storing: list[int] = []
    held: dict[int, int] = {}
    stored: list[int] = []

    def handle(event: Event) -> None:
        for action in machine.handle(event, now_ns=0):
            keep(action)

    def keep(action: Action) -> None:
        if isinstance(action, Load):
            assert action.slot not in held, "a slot is written over that is not empty"
            held[action.slot] = action.number
            loading.append(action.number)
        else:
            assert held[action.slot] == action.number
            storing.append(action.number)

    handle(Begin())
    choices = iter(order)
    while not machine.over:
        if loading and (not storing or next(choices, False)):
            handle(Loaded(number=loading.pop(0)))
        else:
            number = storing.pop(0)
            del held[number % slots]
            stored.append(number)
            handle(Stored(number=number))
    assert stored == list(range(count)) and not held
    with pytest.raises(LocalProtocolError):
        machine.handle(Stored(number=count), now_ns=0)
