"""What a process holds of a peer's memory, wherever that is: mapped on one host, over TCP between two."""

from __future__ import annotations

from typing import Protocol

from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import Segment


class PeerMemory(Protocol):
    """The memory of one incarnation of one peer: a `PeerSegment` or a `RemoteMemory`."""

    @property
    def slot(self) -> int:
        """Where the peer's cells and its bit in the lost mask are in our segment."""
        ...

    @property
    def incarnation(self) -> int:
        """Of the peer."""
        ...

    @property
    def arena_offset(self) -> int:
        """Where its inbox ends and its arena begins, bytes from the base of its segment."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in its whole segment."""
        ...

    def open_region(self, handle: RegionHandle, own: Segment) -> RemoteRegion:
        """The peer's region behind `handle`; its notifications are told as from `own`.

        Raises `RemoteProtocolError` on a handle that is forged, stale or out of bounds.
        """
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...
