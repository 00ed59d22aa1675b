"""One end of a link, whatever its bytes travel through: what `zbmd.transport.link.interface.Link` promises,
once.

`LinkSide` stamps, checks, counts, queues and records frames, delivers them, lets senders wait and reports
the end. A transport adds how bytes leave and arrive. It overrides five methods:

    _push           hand over one frame, as far as there is room
    _next_frame     the next whole frame that has arrived
    _park           have `_drain` called when there is one
    _say_goodbye    tell the peer that this is an orderly end
    _tear_down      give back descriptors and memory

and calls three, each from the loop's thread (what runs at every frame is compiled, `_link.pyx`):

    _pump           there is room again for what waits in the queue
    _drain          a frame may have arrived
    _peer_ended     the peer's end has come, behind everything that it still sent
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Final

import structlog

from zbmd.transport.errors import LinkClosed, LocalProtocolError, RemoteProtocolError, ZbmdError
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link._link import FrameSink, LinkCore
from zbmd.transport.link.interface import Endpoint, OnClosed, OnFrame
from zbmd.transport.memory.frame_loans import BorrowedFrame
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import PeerSegment

log: Final = structlog.stdlib.get_logger("zbmd.transport.link")


class LinkSide(LinkCore, ABC):
    """See `zbmd.transport.link.interface.Link`. A transport's link derives from this.

    carrier: what carries its bytes, in a word.
    """

    carrier: ClassVar[str] = ""

    def __init__(
        self,
        endpoint: Endpoint,
        peer: PeerInfo,
        *,
        peer_segment: PeerSegment | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        recorder = endpoint.recorder
        self._identity = endpoint.identity
        self._peer = peer
        self._own_segment = endpoint.segment
        self._peer_segment = peer_segment
        self._limits = endpoint.limits
        self._begin(endpoint.clock, wall_ns)
        self._recorder = recorder
        self._stream = 0 if recorder is None else recorder.link(peer.name, peer.incarnation)
        self._loop = loop or asyncio.get_running_loop()
        self._queue: deque[tuple[bytes, bytes]] = deque()
        """Packed headers and payloads that wait for room. Of the first, a part may have left already."""
        self._queue_bytes = 0
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._drain_scheduled = False
        self._closed = False
        self._end_reported = False
        self._end_error: ZbmdError | None = None
        self._peer_end: tuple[ZbmdError | None] | None = None
        """Once the peer has ended: what to report when the last of its frames has been delivered."""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        peer = self._peer
        return f"<{type(self).__name__} {self._identity.name} to {peer.name}#{peer.incarnation} {state}>"

    # -- what a transport does ---------------------------------------------------------------------------

    @abstractmethod
    def _push(self, header: bytes, payload: bytes) -> bool:
        """Hand over one frame; False if it has not left whole, and then call `_pump` once there is room.

        payload: also `Scattered`, for who `_takes_pieces`.

        The next call is for the same frame again, and goes on from what has left of it. Raises
        `RemoteProtocolError` to end the link with it.
        """

    @abstractmethod
    def _next_frame(self) -> bytes | bytearray | BorrowedFrame | None:
        """The next whole frame in its own buffer, or in the peer's arena; or None.

        Raises `RemoteProtocolError` to end the link.
        """

    @abstractmethod
    def _park(self) -> bool:
        """Have `_drain` called when a frame arrives; False, and not so, if one may have come meanwhile."""

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the peer, behind the frames that have left, that this end is an orderly one."""

    @abstractmethod
    def _tear_down(self) -> None:
        """Give everything back. Called once; neither side of the transport is used again. Must not raise."""

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    # -- who and what ------------------------------------------------------------------------------------

    @property
    def peer(self) -> PeerInfo:
        """Return the identity that the peer proved at hello."""
        return self._peer

    @property
    def peer_segment(self) -> PeerSegment | None:
        """The peer's shared segment, if it handed one over."""
        return self._peer_segment

    def give_pieces(self) -> None:
        """From now on `on_frame` may get a long payload that is recorded as `Scattered`, as it was copied."""
        self._gives_pieces = True

    def open_region(self, handle: RegionHandle) -> RemoteRegion:
        """See `zbmd.transport.link.interface.Link.open_region`; this one is for memory that is shared."""
        if self._own_segment is None or self._peer_segment is None:
            raise LocalProtocolError(f"no memory came with the link to {self._peer.name}: nothing to open")
        return self._peer_segment.open_region(handle, self._own_segment)

    @property
    def closed(self) -> bool:
        """Whether `send` would raise `LinkClosed`."""
        return self._closed

    @property
    def on_frame(self) -> OnFrame | None:
        """Called with each frame's header and payload."""
        return self._on_frame

    @on_frame.setter
    def on_frame(self, callback: OnFrame | None) -> None:
        self._on_frame = callback
        self._sink = None
        self._schedule_drain()

    def deliver_to(self, sink: FrameSink) -> None:
        """As `on_frame`, called without an object for each header."""
        self._on_frame = sink._on_frame
        self._sink = sink
        self._schedule_drain()

    @property
    def on_closed(self) -> OnClosed | None:
        """Called once when the link has ended."""
        return self._on_closed

    @on_closed.setter
    def on_closed(self, callback: OnClosed | None) -> None:
        self._on_closed = callback
        if self._closed:
            self._call_soon(self._report_end)
        elif self._peer_end is not None:
            self._schedule_drain()

    # -- sending -----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> tuple[int, int]:
        """Return the frames and bytes in the send queue."""
        return len(self._queue), self._queue_bytes

    async def writable(self) -> None:
        """Wait until the send queue is at most half full. Raises `LinkClosed` if the link ends first."""
        await self._until(self._has_room)

    async def flush(self) -> None:
        """Wait until the send queue is empty. Raises `LinkClosed` if the link ends first."""
        await self._until(lambda: not self._queue)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached() and not self._closed and self._peer_end is None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                del self._waiters[waiter]
        if self._closed or self._peer_end is not None:
            raise self._closed_error()

    def _has_room(self) -> bool:
        return (
            self._queue_bytes <= self._limits.queue_bytes_max // 2
            and len(self._queue) <= self._limits.queue_frames_max // 2
        )

    def _pump(self) -> None:
        """Hand over what waits, as far as there is room."""
        queue = self._queue
        try:
            while queue:
                header, payload = queue[0]
                if not self._push(header, payload):
                    break
                queue.popleft()
                self._queue_bytes -= len(header) + len(payload)
        except RemoteProtocolError as error:
            self._fail(error)
            return
        if self._waiters and self._has_room():
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- receiving ---------------------------------------------------------------------------------------

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._call_soon(self._drain_on_turn)

    def _drain_on_turn(self) -> None:
        self._drain_scheduled = False
        self._drain()

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye and end the link; frames still in the send queue are dropped. Idempotent."""
        if not self._closed:
            self._say_goodbye()
            self._end(None)

    def _peer_ended(self, error: ZbmdError | None) -> None:
        """Nothing comes after what has arrived. Only the first call counts; None after a goodbye."""
        if self._closed or self._peer_end is not None:
            return
        self._peer_end = (error,)
        self._wake_waiters()
        self._schedule_drain()

    def _fail(self, error: ZbmdError) -> None:
        """End the link, without a goodbye, because of what the peer did."""
        log.warning(
            "link ended", link=self._identity.name, peer=self._peer.name, pid=self._peer.pid, error=str(error)
        )
        self._end(error)

    def _end(self, error: ZbmdError | None) -> None:
        """Give back everything and report the end on the loop's next turn."""
        if self._closed:
            return
        self._closed = True
        self._end_error = error
        if self._recorder is not None:
            self._recorder.end_stream(self._stream, str(error or "closed"))
        self._tear_down()
        self._queue.clear()
        self._queue_bytes = 0
        self._wake_waiters()
        self._call_soon(self._report_end)

    def _report_end(self) -> None:
        if self._on_closed is not None and not self._end_reported:
            self._end_reported = True
            self._on_closed(self._end_error)

    def _closed_error(self) -> LinkClosed:
        error = self._end_error or (self._peer_end[0] if self._peer_end else None)
        return LinkClosed(f"the link to {self._peer.name} is closed" + (f": {error}" if error else ""))
