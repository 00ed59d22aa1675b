"""A payload in pieces, so that the long one among them is copied once: to where the peer reads it.

A link that lends memory (`frame_loans`) puts the pieces into the block one after the other; any other sends
them joined.
"""

from __future__ import annotations


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
            self._joined = b"".join(self.pieces)
        return self._joined


def whole(payload: bytes | Scattered) -> bytes:
    """A payload in one piece."""
    return payload.joined() if isinstance(payload, Scattered) else payload
