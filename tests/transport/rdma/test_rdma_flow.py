"""Frames in messages, and credit: two flows joined by queues, with readers that pause."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.rdma.credit import (
    BUFFERS,
    CREDITS,
    MESSAGE_BYTES,
    SPARE_BUFFERS,
    CreditFlow,
    Immediate,
    MessageKind,
    unpack_immediate,
)

BOUND = 1 << 17


class Side:
    """A flow, what waits to be sent by it, and the messages on their way to it."""

    def __init__(self) -> None:
        self.flow = CreditFlow(frame_bytes_max=BOUND)
        self.unsent: deque[tuple[bytes, bool]] = deque()
        self.on_way: deque[tuple[int, bytes]] = deque()
        self.read: list[bytes] = []

    def queue(self, frame: bytes) -> None:
        cuts = [frame[at : at + MESSAGE_BYTES] for at in range(0, len(frame), MESSAGE_BYTES)] or [b""]
        self.unsent += [(cut, number < len(cuts) - 1) for number, cut in enumerate(cuts)]

    def send(self, peer: Side) -> bool:
        if not self.unsent or not self.flow.may_send:
            return False
        data, more = self.unsent.popleft()
        peer.on_way.append((self.flow.send(more=more).pack(), data))
        assert len(peer.on_way) + peer.flow.unread <= BUFFERS
        return True

    def receive(self) -> bool:
        if not self.on_way:
            return False
        bits, data = self.on_way.popleft()
        self.flow.came(unpack_immediate(bits), data)
        self.flow.check_invariants()
        return True

    def take(self, peer: Side) -> bool:
        before = self.flow.unread
        frame = self.flow.next_frame()
        if frame is not None:
            self.read.append(frame)
        if (due := self.flow.credits_due()) is not None:
            peer.on_way.append((due.pack(), b""))
            alone = sum(unpack_immediate(bits).kind is MessageKind.CREDITS for bits, _ in peer.on_way)
            assert alone < SPARE_BUFFERS, "one buffer is the goodbye's"
        self.flow.check_invariants()
        return self.flow.unread < before


sizes = st.lists(
    st.one_of(
        st.integers(0, 50),
        st.integers(MESSAGE_BYTES - 2, MESSAGE_BYTES + 2),
        st.integers(0, BOUND),
        st.just(BOUND),
    ),
    max_size=12,
)


@given(a_sends=sizes, b_sends=sizes, steps=st.lists(st.integers(0, 5), max_size=300))
def test_frames_arrive_whole_and_in_order_and_nobody_waits_for_ever(
    a_sends: list[int], b_sends: list[int], steps: list[int]
) -> None:
    a, b = Side(), Side()
    frames = [[bytes([n % 256]) * size for n, size in enumerate(each)] for each in (a_sends, b_sends)]
    for side, mine in zip((a, b), frames, strict=True):
        for frame in mine:
            side.queue(frame)
    moves = [
        lambda: a.send(b),
        lambda: b.send(a),
        a.receive,
        b.receive,
        lambda: a.take(b),
        lambda: b.take(a),
    ]
    for step in steps:
        moves[step]()
    while sum(move() for move in moves):  # every one, each round
        pass
    assert (b.read, a.read) == (frames[0], frames[1])
    assert not a.unsent and not b.unsent


@given(bits=st.integers(0, (1 << 32) - 1))
def test_a_word_is_one_that_can_be_packed_or_is_refused(bits: int) -> None:
    try:
        word = unpack_immediate(bits)
    except RemoteProtocolError:
        return
    assert word.pack() == bits


def test_a_peer_that_sends_without_credit_is_refused() -> None:
    flow = CreditFlow(frame_bytes_max=BOUND)
    for _ in range(CREDITS):
        flow.came(Immediate(kind=MessageKind.FRAME), b"x")
    with pytest.raises(RemoteProtocolError, match="no credit"):
        flow.came(Immediate(kind=MessageKind.FRAME), b"x")
    assert flow.next_frame() == b"x"
    with pytest.raises(RemoteProtocolError, match="no credit"):
        flow.came(Immediate(kind=MessageKind.FRAME), b"x")


@pytest.mark.parametrize(
    ("word", "data", "words"),
    [
        (Immediate(kind=MessageKind.FRAME, credits=1), b"", "never given"),
        (Immediate(kind=MessageKind.CREDITS), b"x", "kind CREDITS"),
        (Immediate(kind=MessageKind.GOODBYE), b"x", "kind GOODBYE"),
    ],
)
def test_what_no_peer_of_ours_sends_is_refused(word: Immediate, data: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        CreditFlow(frame_bytes_max=BOUND).came(word, data)


def test_nothing_comes_behind_the_goodbye() -> None:
    flow = CreditFlow(frame_bytes_max=BOUND)
    flow.came(Immediate(kind=MessageKind.GOODBYE), b"")
    assert flow.goodbye
    with pytest.raises(RemoteProtocolError, match="behind the goodbye"):
        flow.came(Immediate(kind=MessageKind.FRAME), b"x")


def test_the_bound_of_a_frame_is_exact() -> None:
    flow = CreditFlow(frame_bytes_max=10)
    for size in (10, 11):
        flow.came(Immediate(kind=MessageKind.FRAME), bytes(size))
    assert flow.next_frame() == bytes(10)
    with pytest.raises(RemoteProtocolError, match="more than 10 bytes"):
        flow.next_frame()
