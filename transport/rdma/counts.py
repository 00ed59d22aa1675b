"""How transfers over RDMA came to their memory: whether it was registered before, or copied."""

from __future__ import annotations

from typing import NamedTuple


class TransferCounts(NamedTuple):
    """Since a connection, or the plane of a process, was opened. Those without bytes are not counted."""

    in_segment: int = 0
    """Of memory in our arena or inbox, which was registered when the plane was opened, and is not copied."""
    reused: int = 0
    """Of an array elsewhere that was registered for an earlier transfer."""
    registered: int = 0
    """Of memory that was registered for this transfer."""
    inlined: int = 0
    """Small puts, whose bytes are in the work request."""
    copied: int = 0
    """Of these, the ones that had to wait for room, and were copied for it."""

    @property
    def transfers(self) -> int:
        """Puts and gets with bytes."""
        return self.in_segment + self.reused + self.registered + self.inlined

    def plus(self, other: TransferCounts) -> TransferCounts:
        """Of both together."""
        return TransferCounts(*(one + two for one, two in zip(self, other, strict=True)))
