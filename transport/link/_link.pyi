from collections import deque
from collections.abc import Callable
from typing import Any

from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import Identity, PeerInfo
from zbmd.transport.link.interface import LinkLimits, OnFrame
from zbmd.transport.memory.frame_loans import BorrowedFrame
from zbmd.transport.memory.scattered import Scattered

class FrameSink:
    """Takes frames without an object for each header: a compiled one overrides `takes_frame`."""

    def __init__(self, *_: Any) -> None: ...
    def _on_frame(self, header: FrameHeader, payload: memoryview | bytes) -> None:
        """The callback of a link that knows no sinks."""

class LinkCore:
    """The hot path of a link. `LinkSide` has the rest, and says what each field is.

    wall_ns: the clock that stamps frames, ns since 1970.
    """

    _limits: LinkLimits
    _identity: Identity
    _peer: PeerInfo
    _on_frame: OnFrame | None
    _sink: FrameSink | None
    """The sink whose `_on_frame` that is, if it is a sink's."""
    _queue: deque[tuple[bytes, bytes]]
    _queue_bytes: int
    _closed: bool
    _drain_scheduled: bool
    _takes_pieces: bool
    """Whether `_push` takes a payload that is `Scattered`; False unless its transport says so."""
    _gives_pieces: bool
    """Whether `_on_frame` takes one; see `LinkSide.give_pieces`."""
    _peer_end: tuple[ZbmdError | None] | None
    _recorder: Recorder | None
    _stream: int
    _wall_ns: Callable[[], int]
    def _begin(self, clock: HybridClock, wall_ns: Callable[[], int]) -> None:
        """Begin with `_identity`, `_peer` and `_limits` as they are now."""
    def send(self, payload: bytes | Scattered, *, epoch: int = 0, trace_id: int = 0, flags: int = 0) -> None:
        """Send one frame, or queue it. See `zbmd.transport.link.interface.Link.send`."""
    def _drain(self) -> None:
        """Deliver a bounded number of frames, then park or give the loop its turn."""
    def _deliver(self, frame: bytes | bytearray) -> None:
        """Deliver a frame that is in a buffer of its own. Raises as `zbmd.transport.frames.unpack_frame`."""
    def _deliver_borrowed(self, frame: BorrowedFrame) -> None:
        """Deliver a frame that lies in the peer's arena; if recorded, a copy. Raises as `_deliver`."""
