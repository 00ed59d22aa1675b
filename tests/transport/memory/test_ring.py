"""The byte ring, both ends in one process: a model of it is a queue of frames."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.memfd import create_memfd
from zbmd.transport.native._native import RING_HEADER_BYTES, Mapping, RingReader, RingWriter

CAPACITY = 4096
FRAME_MAX = 3 * CAPACITY
BLOCKED_S = 180
"""A child that takes so long is blocked for ever."""


class Ring:
    def __init__(self) -> None:
        nbytes = RING_HEADER_BYTES + CAPACITY
        fd = create_memfd("test-ring", nbytes)
        self.mapping = Mapping(fd, nbytes, nbytes)
        os.close(fd)
        self.reader_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.writer_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.writer = RingWriter(self.mapping, 0, CAPACITY, self.reader_wake)
        self.reader = RingReader(self.mapping, 0, CAPACITY, self.writer_wake, FRAME_MAX)

    def close(self) -> None:
        os.close(self.reader_wake)
        os.close(self.writer_wake)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.close()


def woken(fd: int) -> bool:
    if not select.select([fd], [], [], 0)[0]:
        return False
    os.eventfd_read(fd)
    return True


sizes = st.one_of(
    st.integers(0, 64), st.integers(CAPACITY - 80, CAPACITY + 80), st.integers(0, FRAME_MAX - 48)
)


@given(frames=st.lists(st.tuples(st.integers(0, 48), sizes), max_size=40), reads=st.lists(st.integers(1, 5)))
def test_frames_of_any_size_come_out_whole_and_in_order(
    frames: list[tuple[int, int]], reads: list[int]
) -> None:
    ring = Ring()
    try:
        expected: deque[bytes] = deque()
        received: list[bytes] = []
        turns = deque(reads)
        for number, (head_bytes, body_bytes) in enumerate(frames):
            head = bytes([number % 256]) * head_bytes
            body = bytes((number + i) % 251 for i in range(body_bytes))
            expected.append(head + body)
            done = 0
            while (done := ring.writer.write(head, body, done)) < 4 + head_bytes + body_bytes:
                frame = ring.reader.read()
                if frame is not None:
                    received.append(frame)
            for _ in range(turns.popleft() if turns else 0):
                frame = ring.reader.read()
                if frame is not None:
                    received.append(frame)
        while (frame := ring.reader.read()) is not None:
            received.append(frame)
        assert received == list(expected)
        assert not ring.reader.partial
    finally:
        ring.close()


def test_a_parked_reader_is_woken_once_by_the_next_write(ring: Ring) -> None:
    assert ring.writer.write(b"a", b"", 0) == 5
    assert not woken(ring.reader_wake), "nobody has parked yet"
    assert not ring.reader.park(), "there is something to read"
    assert ring.reader.read() == b"a"
    assert ring.reader.park()
    ring.writer.write(b"b", b"", 0)
    ring.writer.write(b"c", b"", 0)
    assert woken(ring.reader_wake)
    assert not woken(ring.reader_wake), "the second write met a reader that was awake"


def test_a_parked_writer_is_woken_once_half_of_the_ring_is_free(ring: Ring) -> None:
    quarter = bytes(CAPACITY // 4 - 4)
    for _ in range(4):
        assert ring.writer.write(quarter, b"", 0) == CAPACITY // 4
    assert ring.writer.write(b"x", b"", 0) == 0, "a full ring accepts no byte"
    assert ring.writer.park()
    assert ring.reader.read() == quarter
    assert not woken(ring.writer_wake), "a quarter is too little to wake the writer for"
    assert ring.reader.read() == quarter
    assert woken(ring.writer_wake)
    assert not ring.writer.park(), "half of it is free"


def test_a_reader_never_trusts_the_writers_position(ring: Ring) -> None:
    ring.mapping.store64(0, CAPACITY + 1)
    with pytest.raises(RemoteProtocolError, match="writer's position"):
        ring.reader.read()


def test_a_writer_never_trusts_the_readers_position(ring: Ring) -> None:
    ring.mapping.store64(64, 1)
    with pytest.raises(RemoteProtocolError, match="reader's position"):
        ring.writer.write(b"a", b"", 0)


def test_a_frame_over_the_bound_is_refused_before_memory_is_taken(ring: Ring) -> None:
    data = (FRAME_MAX + 1).to_bytes(4, "little")
    ring.mapping.view(RING_HEADER_BYTES, 4, writable=True)[:] = data
    ring.mapping.store64(0, 4)
    with pytest.raises(RemoteProtocolError, match=f"{FRAME_MAX + 1} bytes"):
        ring.reader.read()


@pytest.mark.parametrize(("offset", "capacity"), [(0, 1000), (8, 2048), (0, 8192), (0, 0), (64, 4096)])
def test_a_ring_that_does_not_fit_is_refused(ring: Ring, offset: int, capacity: int) -> None:
    with pytest.raises(LocalProtocolError):
        RingWriter(ring.mapping, offset, capacity, ring.reader_wake)


def test_a_counter_that_the_peer_has_filled_and_made_block_holds_nobody_up(ring: Ring) -> None:
    assert ring.reader.park()
    os.eventfd_write(ring.reader_wake, (1 << 64) - 2)
    os.set_blocking(ring.reader_wake, True)
    writing = threading.Thread(target=ring.writer.write, args=(b"", b"frame", 0), daemon=True)
    writing.start()
    writing.join(BLOCKED_S)
    assert not writing.is_alive()
    assert ring.reader.read() == b"frame"
