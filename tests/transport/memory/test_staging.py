"""Staged messages between buffers outside of shared memory, in processes and threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.memory.staging import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNKS,
    RING_BYTES,
    StagedPipe,
    chunk_bytes,
)
from zbmd.transport.native import _native
from zbmd.transport.shm.death_notice import LifeThread

Fork = Callable[[Callable[[], None]], int]
Pipes = tuple[StagedPipe, StagedPipe]


@pytest.fixture
def segments() -> Iterator[tuple[Segment, Segment]]:
    made = [
        Segment.create(slot=slot, incarnation=1, arena_bytes=1 << 16, inbox_bytes=RING_BYTES)
        for slot in range(2)
    ]
    yield made[0], made[1]
    for segment in made:
        segment.close()


@pytest.fixture
def pipes(segments: tuple[Segment, Segment]) -> Iterator[Pipes]:
    made = [StagedPipe(segment, channel=3) for segment in segments]
    for own, other, ours, theirs in ((0, 1, *segments), (1, 0, *reversed(segments))):
        peer = PeerSegment.attach(theirs.fds, slot=theirs.slot)
        made[own].connect(peer.open_region(made[other].handle, ours))
    yield made[0], made[1]
    for pipe in made:
        pipe.close()


SIZES = (
    0,
    1,
    4095,
    CHUNK_BYTES_MIN,
    CHUNK_BYTES_MAX + 1,
    CHUNKS * CHUNK_BYTES_MAX + 17,
    5 << 20,
    (16 << 20) + 17,
)
"""The last goes past the caches."""


def message(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def test_messages_of_all_sizes_go_both_ways_between_processes(pipes: Pipes, fork: Fork) -> None:
    ours, theirs = pipes

    def echo() -> None:
        for nbytes in SIZES:
            into = np.empty(nbytes, np.uint8)
            theirs.receive(into)
            theirs.send(into[::-1].copy())

    pid = fork(echo)
    for nbytes in SIZES:
        sent, back = message(nbytes), bytearray(nbytes)
        ours.send(sent)
        ours.receive(back)
        assert bytes(back) == sent[::-1].tobytes()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_both_ways_at_once_from_threads(pipes: Pipes) -> None:
    wrong: list[int] = []

    def send(pipe: StagedPipe) -> None:
        for nbytes in SIZES:
            pipe.send(message(nbytes))

    def receive(pipe: StagedPipe) -> None:
        for nbytes in SIZES:
            into = np.empty(nbytes, np.uint8)
            pipe.receive(into)
            if not np.array_equal(into, message(nbytes)):
                wrong.append(nbytes)

    threads = [threading.Thread(target=run, args=(pipe,)) for run in (send, receive) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("nbytes", [8, 100_000])
def test_threads_that_share_a_pipe_do_not_mix_their_messages(pipes: Pipes, nbytes: int) -> None:
    """Small messages go by one call each, longer ones chunk by chunk; threads that wait let others first."""
    ours, theirs = pipes
    taken: list[bytes] = []

    def send(first: int) -> None:
        for value in range(first, first + 80):
            ours.send(bytes([value]) * nbytes)

    def receive() -> None:
        for _ in range(80):
            into = bytearray(nbytes)
            theirs.receive(into)
            taken.append(bytes(into))

    threads = [threading.Thread(target=send, args=(80 * i,)) for i in range(3)]
    threads += [threading.Thread(target=receive) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [bytes([value]) * nbytes for value in range(240)]


def test_a_sender_waits_when_the_ring_is_full(pipes: Pipes) -> None:
    ours, theirs = pipes
    for number in range(CHUNKS):
        ours.send(bytes([number]))
    with pytest.raises(DeadlineExceeded):
        ours.send(b"x", deadline_ns=1)
    into = bytearray(1)
    for number in range(CHUNKS):
        theirs.receive(into)
        assert into[0] == number
    with pytest.raises(DeadlineExceeded):
        theirs.receive(into, deadline_ns=1)


def test_a_message_of_another_size_is_refused(pipes: Pipes) -> None:
    ours, theirs = pipes
    ours.send(b"12345")
    with pytest.raises(RemoteProtocolError, match="5 bytes where 4"):
        theirs.receive(bytearray(4))


def test_the_end_of_a_peer_ends_both_waits(
    segments: tuple[Segment, Segment], pipes: Pipes, fork: Fork
) -> None:
    def child() -> None:
        LifeThread(segments[1])
        os._exit(0)

    os.waitpid(fork(child), 0)
    with pytest.raises(PeerLost):
        pipes[0].send(b"x")
    _native.set_lost(segments[0].base, 1)
    with pytest.raises(PeerLost):
        pipes[0].receive(bytearray(1))
    _native.clear_lost(segments[0].base, 1)
    _native.abort_channel(segments[0].base, 3, 0)
    with pytest.raises(LocalProtocolError, match="aborted"):
        pipes[0].receive(bytearray(1))


def test_misuse_is_told(segments: tuple[Segment, Segment], pipes: Pipes) -> None:
    with pytest.raises(LocalProtocolError, match="C-contiguous"):
        pipes[0].send(np.zeros((2, 4)).T)
    with pytest.raises(LocalProtocolError, match=f"channels {_native.CHANNELS - 1} and {_native.CHANNELS}"):
        StagedPipe(segments[0], channel=_native.CHANNELS - 1)
    assert [chunk_bytes(n) for n in (0, 1 << 20, 1 << 30)] == [CHUNK_BYTES_MIN, 128 << 10, CHUNK_BYTES_MAX]
