"""Messages in pieces: every byte is read once a reading, what is under way is bounded, and lies are found."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.p2p.pieces import PIECE_BYTES_MAX, PIECES_AHEAD, Incoming, Outgoing, PieceRoom
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.segment import Segment

SMALL = 1000
"""Bytes of a piece for which there is no room."""


class Message:
    """A sender and a receiver, and what is under way between them, in order."""

    def __init__(self, nbytes: int, first: int) -> None:
        self.nbytes, self.first = nbytes, first
        self.outgoing = Outgoing(nbytes, first)
        self.slots: set[int] = set()
        self.asked: list[tuple[int, int]] = []
        self.pieces: list[tuple[int, int, int, int]] = []
        self.readings = 0
        self.read_again()

    def read_again(self) -> None:
        """A receive gives up, and the next one reads from the start."""
        self.readings += 1
        self.incoming = Incoming(self.nbytes, self.first, self.readings)
        self.came: list[tuple[int, int]] = []
        self.ask()

    def ask(self) -> None:
        self.asked.append((self.incoming.reading, self.incoming.read))

    def answer(self, full: bool) -> None:
        for number in self.outgoing.asked(*self.asked.pop(0)):
            self.slots.discard(number)
        while nbytes := self.outgoing.next_bytes():
            nbytes = min(nbytes, SMALL) if full else nbytes
            number, offset = self.outgoing.next, self.outgoing.offset
            self.outgoing.made(nbytes)
            if not full:
                self.slots.add(number)
            self.pieces.append((self.outgoing.reading, number, offset, nbytes))
        assert len(self.slots) <= PIECES_AHEAD

    def deliver(self) -> None:
        reading, number, offset, nbytes = self.pieces.pop(0)
        if self.incoming.came(reading, number, nbytes):
            self.came.append((offset, nbytes))
        assert len(self.came) <= PIECES_AHEAD

    def take(self) -> None:
        offset, nbytes = self.came.pop(0)
        assert offset == self.incoming.offset, "a gap, or bytes twice"
        self.incoming.took(nbytes)
        if not self.incoming.whole:
            self.ask()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12 * PIECE_BYTES_MAX),
    st.sampled_from([1, SMALL, PIECE_BYTES_MAX]),
    st.lists(st.sampled_from(["answer", "full", "deliver", "take", "again"]), max_size=80),
)
def test_every_byte_is_read_in_order_whatever_is_given_up(rest: int, first: int, steps: list[str]) -> None:
    message = Message(first + rest, first)
    for step in [*steps, *["answer", "deliver", "take"] * (rest // SMALL + 40)]:
        if message.incoming.whole:
            break
        if step in ("answer", "full") and message.asked:
            message.answer(step == "full")
        elif step == "deliver" and message.pieces:
            message.deliver()
        elif step == "take" and message.came:
            message.take()
        elif step == "again" and message.readings < 5:
            message.read_again()
    assert message.incoming.whole, "it stands still"


def test_what_cannot_be_is_refused() -> None:
    outgoing = Outgoing(10 * PIECE_BYTES_MAX, PIECE_BYTES_MAX)
    with pytest.raises(RemoteProtocolError, match="1 pieces of a message were read: 0 were sent"):
        outgoing.asked(1, 1)
    outgoing.asked(2, 0)
    with pytest.raises(RemoteProtocolError, match="reading 1"):
        outgoing.asked(1, 0)
    incoming = Incoming(100, 40, reading=1)
    assert not incoming.came(0, 7, 99)  # of an earlier reading
    for number, nbytes in ((1, 10), (0, 61), (0, 0)):
        with pytest.raises(RemoteProtocolError, match=f"piece {number} of {nbytes} bytes"):
            incoming.came(1, number, nbytes)


def test_pieces_take_a_part_of_the_arena_and_give_it_back() -> None:
    segment = Segment.create(slot=0, incarnation=1, arena_bytes=1 << 20, inbox_bytes=0)
    with contextlib.closing(segment):
        room = PieceRoom(segment.arena)
        held = [room.take(64 << 10) for _ in range(4)]
        assert all(memory is not None for memory in held)
        assert room.take(64 << 10) is None
        room.free(64 << 10)
        assert room.take(64 << 10) is not None
        everything = segment.arena.empty(segment.arena.capacity_bytes // 2, "u1")
        room.free(128 << 10)
        rest = segment.arena.empty(segment.arena.capacity_bytes - segment.arena.used_bytes, "u1")
        assert room.take(128 << 10) is None, (everything.nbytes, rest.nbytes)
