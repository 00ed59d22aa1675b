"""Frames over an RDMA queue pair: cut into messages, with credit for the peer's buffers. Sans-I/O.

A message lands in a buffer that its receiver has posted; one for which there is none would stall the queue
pair. So a sender holds a credit for each buffer that it may fill, and gets it back once its message has been
taken by whoever reads the frames. Credits come back with messages that go the other way, or, once half of
them are owed, by a message of their own. Such a message needs no credit: there are never more than
`SPARE_BUFFERS` of them on their way, since each gives back half of all credits. (The user-level static
scheme of Liu and Panda, "Implementing efficient and scalable flow control schemes in MPI over InfiniBand",
CAC 2004.)

The 32 bits that travel beside a message ("immediate data"):

    bit     0..15  credits given back
    bit     16     the frame goes on in the next message
    bit     17..18 kind: 0 a frame's bytes, 1 credits alone, 2 goodbye
    others  0
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from zbmd.transport.errors import RemoteProtocolError

MESSAGE_BYTES: Final = 1 << 11
"""Of a frame, at most, in one message: the size of a receive buffer."""
CREDITS: Final = 128
"""Messages with a frame's bytes that may wait for their reader, of each direction of a link."""
SPARE_BUFFERS: Final = 3
"""Beyond them: two messages of credits alone, and the goodbye."""
BUFFERS: Final = CREDITS + SPARE_BUFFERS
"""Receive buffers of a link."""
_OWED_MAX: Final = CREDITS // 2

_MORE: Final = 1 << 16
_KIND_SHIFT: Final = 17
_RESERVED: Final = ~((1 << 19) - 1)


class MessageKind(IntEnum):
    """The kind of a message."""

    FRAME = 0
    CREDITS = 1
    GOODBYE = 2


class Immediate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The immediate data of a message."""

    kind: MessageKind
    more: bool = False
    credits: int = 0

    def pack(self) -> int:
        """As 32 bits."""
        return self.credits | (_MORE if self.more else 0) | self.kind << _KIND_SHIFT


def unpack_immediate(bits: int) -> Immediate:
    """Raises `RemoteProtocolError` on what no sender of ours makes."""
    kind, credits = bits >> _KIND_SHIFT & 3, bits & 0xFFFF
    if (
        bits & _RESERVED
        or kind > max(MessageKind)
        or credits > CREDITS
        or (bits & _MORE and kind != MessageKind.FRAME)
    ):
        raise RemoteProtocolError(f"a message came with invalid immediate data {bits:#x}")
    return Immediate(kind=MessageKind(kind), more=bool(bits & _MORE), credits=credits)


class CreditFlow:
    """Both directions of one link: what may be sent, and what came and waits to be read.

    It has no state to name: every call is legal until the link ends.
    """

    def __init__(self, *, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._credits = CREDITS
        self._owed = 0
        """Credits that the peer is to get back."""
        self._waiting: list[tuple[bytes, bool]] = []
        """Messages that came and were not read; the last first."""
        self._came: list[tuple[bytes, bool]] = []
        self._partial = bytearray()
        self.goodbye = False
        """Whether the peer has said it."""

    # -- sending -----------------------------------------------------------------------------------------

    @property
    def may_send(self) -> bool:
        """Whether the peer has a buffer for a message of a frame."""
        return self._credits > 0

    def send(self, *, more: bool) -> Immediate:
        """The word of a message of a frame, which is sent now. more: it is not the frame's last."""
        assert self._credits > 0
        self._credits -= 1
        return Immediate(kind=MessageKind.FRAME, more=more, credits=self._give_back())

    def credits_due(self) -> Immediate | None:
        """The word of a message of credits alone, if it is to be sent now."""
        if self._owed < _OWED_MAX:
            return None
        return Immediate(kind=MessageKind.CREDITS, credits=self._give_back())

    def say_goodbye(self) -> Immediate:
        """The word of our last message."""
        return Immediate(kind=MessageKind.GOODBYE)

    def _give_back(self) -> int:
        owed, self._owed = self._owed, 0
        return owed

    # -- receiving ---------------------------------------------------------------------------------------

    def came(self, word: Immediate, data: bytes) -> None:
        """A message has come. Raises `RemoteProtocolError` if the peer had no credit for it, or no more."""
        if self.goodbye:
            raise RemoteProtocolError("a message came behind the goodbye")
        self._credits += word.credits
        if self._credits > CREDITS:
            raise RemoteProtocolError(f"{word.credits} credits came back that were never given")
        if word.kind is MessageKind.GOODBYE:
            self.goodbye = True
        if word.kind is not MessageKind.FRAME:
            if data:
                raise RemoteProtocolError(f"{len(data)} bytes came with a message of kind {word.kind.name}")
            return
        if self.unread + self._owed >= CREDITS:
            raise RemoteProtocolError(f"more than {CREDITS} messages came: the peer had no credit for it")
        self._came.append((data, word.more))

    @property
    def unread(self) -> int:
        """Messages that wait to be read."""
        return len(self._waiting) + len(self._came)

    def next_frame(self) -> bytes | None:
        """The next whole frame. Raises `RemoteProtocolError` on one beyond the bound."""
        while self.unread:
            if not self._waiting:
                self._came.reverse()
                self._waiting, self._came = self._came, self._waiting
            data, more = self._waiting.pop()
            self._owed += 1
            if len(self._partial) + len(data) > self._frame_bytes_max:
                raise RemoteProtocolError(
                    f"a frame of more than {self._frame_bytes_max} bytes came, which is the bound"
                )
            if not more and not self._partial:
                return data
            self._partial += data
            if not more:
                frame = bytes(self._partial)
                self._partial.clear()
                return frame
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError if what is counted cannot be."""
        assert 0 <= self._credits <= CREDITS
        assert self._owed >= 0 and self._owed + self.unread <= CREDITS
        assert len(self._partial) <= self._frame_bytes_max
