"""A payload in pieces, so that the long one among them is copied once: to where the peer reads it, or from
there.

A link that lends memory (`frame_loans`) puts the pieces into the block one after the other; any other sends
them joined. A receiver that is lent memory and has to keep its contents copies it out in pieces, so that the
long one is both what is kept and a field of the message.
"""

from __future__ import annotations

from typing import Final

from zbmd.transport.memory._region import streamed

LONG_HEAD: Final = b"\xc6"
"""The first byte of long bytes in MessagePack (bin 32), before their length in 4 bytes, big-endian."""
LONG_HEAD_BYTES: Final = 5
HEAD_BYTES_MAX: Final = 1024
"""Long bytes that begin later are not looked for: then all of the payload is the body."""


class Scattered:
    """The bytes `head`, `body` and `tail` as one payload. `len` is that of all of it."""

    __slots__ = ("_joined", "_nbytes", "pieces")

    def __init__(self, head: bytes, body: bytes, tail: bytes) -> None:
        self.pieces = (head, body, tail)
        self._nbytes = len(head) + len(body) + len(tail)
        self._joined: bytes | None = None

    def __len__(self) -> int:
        return self._nbytes

    def __repr__(self) -> str:
        return f"<Scattered {' + '.join(str(len(piece)) for piece in self.pieces)} bytes>"

    def joined(self) -> bytes:
        """All of it in one place; made once."""
        if self._joined is None:
            head, body, tail = self.pieces
            self._joined = b"".join(self.pieces) if head or tail else body
        return self._joined


def whole(payload: bytes | Scattered) -> bytes:
    """A payload in one piece."""
    return payload.joined() if isinstance(payload, Scattered) else payload


def copied(payload: memoryview) -> Scattered:
    """A copy, cut around what looks like its long bytes. Others may store there: no byte decides twice."""
    head = bytes(payload[:HEAD_BYTES_MAX])
    at = head.find(LONG_HEAD)
    while at >= 0:
        begins = at + LONG_HEAD_BYTES
        ends = begins + int.from_bytes(head[at + 1 : begins])
        if begins <= len(head) <= ends <= len(payload):
            return Scattered(head[:begins], streamed(payload[begins:ends]), bytes(payload[ends:]))
        at = head.find(LONG_HEAD, at + 1)
    return Scattered(b"", streamed(payload), b"")
