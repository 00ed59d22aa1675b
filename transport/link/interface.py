"""The interface of a link: a bounded, ordered, at-most-once channel of frames to one incarnation of a peer.

The layers above see only this; shm (and later TCP, RDMA and the simulator) provide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from zbmd.transport.errors import LocalProtocolError, ZbmdError
from zbmd.transport.frames import HEADER_BYTES, MAX_FRAME_BYTES, FrameHeader
from zbmd.transport.identity import PeerInfo
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.scattered import Scattered
from zbmd.transport.memory.segment import PeerSegment

RING_BYTES_MIN = 1 << 12
RING_BYTES_MAX = 1 << 24
SPIN_NS_MAX = 1_000_000

OnFrame = Callable[[FrameHeader, memoryview], None]
"""Takes a frame's header and payload; the payload is valid for as long as it is held.

A large one may lie in the sender's memory (`frame_loans`): to hold it long keeps room from the frames behind
it, and the sender could still change it, so decode it once.
"""

OnClosed = Callable[[ZbmdError | None], None]
"""Takes None after an orderly close by either side, else why the link ended (`PeerLost`, …)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """The bounds of one link."""

    frame_bytes_max: int = MAX_FRAME_BYTES
    """Header and payload of one frame."""
    ring_bytes: int = 1 << 16
    """The shared ring of each direction, a power of two; a frame may be larger than it."""
    queue_bytes_max: int = 8 << 20
    """What may wait here for room in the ring, but for the last frame: with that much waiting, `send` raises
    `LinkFull`. So after `writable` the next send never does."""
    queue_frames_max: int = 1 << 14
    """Most frames that may wait."""
    frames_per_wake: int = 256
    """Frames that are delivered before the loop gets its turn."""
    spin_ns: int = 200_000
    """For how long at most a reader that has run dry right after a frame looks again, once a turn of the
    loop, before it parks, where the last frames came within that time; 0: not at all. Only where memory is
    shared. It is more than two wake-ups of sleeping processors take."""

    def __post_init__(self) -> None:
        ring = self.ring_bytes
        if ring & (ring - 1) or not RING_BYTES_MIN <= ring <= RING_BYTES_MAX:
            raise LocalProtocolError(
                f"ring_bytes={ring} is not a power of two in {RING_BYTES_MIN}..{RING_BYTES_MAX}"
            )
        if not HEADER_BYTES <= self.frame_bytes_max <= MAX_FRAME_BYTES:
            raise LocalProtocolError(
                f"frame_bytes_max={self.frame_bytes_max} is not in {HEADER_BYTES}..{MAX_FRAME_BYTES}"
            )
        if min(self.queue_bytes_max, self.queue_frames_max, self.frames_per_wake) < 1:
            raise LocalProtocolError("queue_bytes_max, queue_frames_max and frames_per_wake must be positive")
        if not 0 <= self.spin_ns <= SPIN_NS_MAX:
            raise LocalProtocolError(f"spin_ns={self.spin_ns} is not in 0..{SPIN_NS_MAX}")


class Link(Protocol):
    """A channel of frames to one peer. Used from its event loop's thread only.

    Frames arrive whole and in the order in which they were sent. They wait, bounded by the link's own
    buffers, until `on_frame` is set. `on_closed` is called exactly once, after the last frame.
    A `RemoteProtocolError` raised by `on_frame` ends the link with that error.
    """

    @property
    def on_frame(self) -> OnFrame | None:
        """Called with each frame."""
        ...

    @on_frame.setter
    def on_frame(self, callback: OnFrame | None) -> None: ...

    @property
    def on_closed(self) -> OnClosed | None:
        """Called once when the link has ended, by whichever side."""
        ...

    @on_closed.setter
    def on_closed(self, callback: OnClosed | None) -> None: ...

    @property
    def peer(self) -> PeerInfo:
        """Return the identity that the peer proved at hello."""
        ...

    @property
    def peer_segment(self) -> PeerSegment | None:
        """The peer's shared segment, if it handed one over; it outlives the link."""
        ...

    @property
    def closed(self) -> bool:
        """Whether `send` would raise `LinkClosed`."""
        ...

    def open_region(self, handle: RegionHandle) -> RemoteRegion:
        """Open the peer's registered memory behind `handle`, checked once here. Any thread may use it.

        Raises `RemoteProtocolError` on a handle that is forged, stale or out of bounds, and
        `LocalProtocolError` if this process or the peer brought no memory to the link.
        """
        ...

    def send(self, payload: bytes | Scattered, *, epoch: int = 0, trace_id: int = 0, flags: int = 0) -> None:
        """Send one frame, or queue it.

        Raises `LinkFull` past the queue's bound, `LinkClosed` once the link has ended and
        `LocalProtocolError` on a payload over `frame_bytes_max`.
        """
        ...

    async def writable(self) -> None:
        """Wait until the send queue is at most half full. Raises `LinkClosed` if the link ends first."""
        ...

    async def flush(self) -> None:
        """Wait until the send queue is empty: a `close` after it loses nothing. Raises as `writable`."""
        ...

    def close(self) -> None:
        """Say goodbye and end the link; frames still in the send queue are dropped. Idempotent."""
        ...
