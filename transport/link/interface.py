"""The interface to links: `Link`, its limits, and the `Endpoint` that all links of a process share.

A link is a bounded, ordered, at-most-once channel of frames to one incarnation of a peer. `shm`, `tcp`,
`rdma` and the simulator provide it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.deadlines import Deadlines, derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError, ZbmdError
from zbmd.transport.frames import HEADER_BYTES, MAX_FRAME_BYTES, FrameHeader
from zbmd.transport.identity import Identity, PeerInfo
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.scattered import Scattered
from zbmd.transport.memory.segment import PeerSegment, Segment

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


# The memory that all links of a process may hold together, for what waits to be sent or taken.
#
# Each link has bounds of its own; with a thousand of them these add up to more than a machine has. So links
# also count what they hold here. When the bound is reached, senders get `LinkFull` and sockets are no longer
# read, but for the frame under way of each, until enough has left. What is to be sent and what has come are
# counted apart: else two processes, each full of what the other should read, would wait for each other.
# Used from one thread, that of the loop.

NODE_BYTES_MAX: Final = 256 << 20
"""In each direction."""
_RESUME_NUMERATOR, _RESUME_DENOMINATOR = 3, 4


class NodeMemory:
    """bytes_max: whether it is reached is asked before each frame, so one frame at most exceeds it."""

    __slots__ = ("_waiting", "bytes_max", "used_bytes")

    def __init__(self, bytes_max: int = NODE_BYTES_MAX) -> None:
        if bytes_max < 1:
            raise LocalProtocolError(f"bytes_max={bytes_max} must be positive")
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._waiting: dict[Hashable, Callable[[], None]] = {}

    @property
    def full(self) -> bool:
        """Whether nothing more may be taken in."""
        return self.used_bytes >= self.bytes_max

    def change(self, delta_bytes: int) -> None:
        """A link holds so much more, or less. Calls who waits once three quarters are used at most."""
        self.used_bytes += delta_bytes
        assert self.used_bytes >= 0, self.used_bytes
        if self._waiting and delta_bytes < 0 and self._has_room():
            waiting, self._waiting = self._waiting, {}
            for resume in waiting.values():
                resume()

    def wait(self, who: Hashable, resume: Callable[[], None]) -> None:
        """Have `resume` called once there is room; one a link. Room must be lacking now."""
        self._waiting[who] = resume

    def forget(self, who: Hashable) -> None:
        """It waits no more. Idempotent."""
        self._waiting.pop(who, None)

    def _has_room(self) -> bool:
        return self.used_bytes * _RESUME_DENOMINATOR <= self.bytes_max * _RESUME_NUMERATOR


class MemoryShare:
    """The share of a `NodeMemory` that one link holds."""

    __slots__ = ("_held_bytes", "memory")

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self._held_bytes = 0

    def hold(self, nbytes: int) -> None:
        """It holds so much now, in all."""
        delta, self._held_bytes = nbytes - self._held_bytes, nbytes
        if delta:
            self.memory.change(delta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Hold what all links of a process share. One endpoint may listen and dial on several transports."""

    identity: Identity
    cookie: bytes = field(repr=False)
    segment: Segment | None = None
    """Handed to every peer of this host at hello; its life thread must have started by then."""
    clock: HybridClock = field(default_factory=HybridClock)
    limits: LinkLimits = field(default_factory=LinkLimits)
    deadlines: Deadlines = field(default_factory=derive)
    send_memory: NodeMemory = field(default_factory=NodeMemory)
    """Bounds what all its TCP links together hold to be sent."""
    receive_memory: NodeMemory = field(default_factory=NodeMemory)
    """The same of what has come and was not taken yet."""
    recorder: Recorder | None = None
    """Takes down every hello, and every frame of every link; its hybrid clock is `clock`."""
