"""`SimLink`: a `zbmd.transport.link.Link` between two simulated processes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zbmd.transport.errors import (
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.frames import HEADER_BYTES, FrameHeader, pack_header, unpack_frame
from zbmd.transport.hello import Identity, PeerInfo
from zbmd.transport.link import LinkLimits, OnClosed, OnFrame
from zbmd.transport.segment import PeerSegment

if TYPE_CHECKING:
    from zbmd.transport.sim.network import Network
    from zbmd.transport.sim.world import SimProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What one side of a link brings: its contracts' fingerprints ("id/version" -> digest), job, bounds."""

    contracts: dict[str, str]
    job: int
    limits: LinkLimits


class SimLink:
    """See `zbmd.transport.link.Link`. Made by `SimProcess.listen` and `dial`.

    Frames keep their order and none is lost: what the network loses is sent again, what it cuts waits. The
    peer's death shows as `PeerLost` after the last frame of its that still arrives. It hands over no segment.
    """

    def __init__(
        self, network: Network, owner: SimProcess, identity: Identity, peer: SimProcess, options: LinkOptions
    ) -> None:
        self.owner = owner
        self.peer_process = peer
        self._network = network
        self._identity = identity
        self._options = options
        self._limits = options.limits
        self._far: SimLink | None = None
        self._queue: deque[bytes] = deque()
        self._queue_bytes = 0
        self._unread_bytes = 0
        """Sent and not yet taken by the peer: what would lie in the ring."""
        self._sent = 0
        self._arrived = 0
        self._arrivals_max: int | None = None
        """Once the peer is dead: how many of its frames arrive at all."""
        self._inbox: deque[bytes] = deque()
        self._drain_scheduled = False
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._closed = False
        self._end_reported = False
        self._end_error: ZbmdError | None = None
        self._peer_end: tuple[ZbmdError | None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<SimLink {self._identity.name} to {self.peer.name}#{self.peer.incarnation} {state}>"

    def join(self, far: SimLink) -> None:
        """The other end."""
        self._far = far

    @property
    def _other(self) -> SimLink:
        assert self._far is not None
        return self._far

    @property
    def peer(self) -> PeerInfo:
        """Who the peer is."""
        return self._other._identity

    @property
    def peer_segment(self) -> PeerSegment | None:
        """None: simulated processes share no memory."""
        return None

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
        self._schedule_drain()

    @property
    def on_closed(self) -> OnClosed | None:
        """Called once when the link has ended."""
        return self._on_closed

    @on_closed.setter
    def on_closed(self, callback: OnClosed | None) -> None:
        self._on_closed = callback
        if self._closed:
            self._call(self._report_end)
        elif self._peer_end is not None:
            self._schedule_drain()

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, payload: bytes, *, epoch: int = 0, trace_id: int = 0, flags: int = 0) -> None:
        """Send one frame, or queue it. See `zbmd.transport.link.Link.send`."""
        if self._closed or self._peer_end is not None:
            raise self._closed_error()
        frame_bytes = HEADER_BYTES + len(payload)
        limits, queue = self._limits, self._queue
        if frame_bytes > limits.frame_bytes_max:
            raise LocalProtocolError(
                f"a frame of {frame_bytes} bytes to {self.peer.name} is over the bound of "
                f"{limits.frame_bytes_max}: send bulk data as a region"
            )
        if self._queue_bytes >= limits.queue_bytes_max or len(queue) >= limits.queue_frames_max:
            raise LinkFull(
                f"{len(queue)} frames ({self._queue_bytes} bytes) already wait for {self.peer.name}; "
                "await writable() and send again"
            )
        header = FrameHeader(
            flags=flags,
            payload_bytes=len(payload),
            job=self._identity.job,
            incarnation=self._identity.incarnation,
            epoch=epoch,
            hlc=self.owner.hybrid_clock.tick(self.owner.wall_ns()),
            trace_id=trace_id,
        )
        queue.append(pack_header(header) + payload)
        self._queue_bytes += frame_bytes
        self._pump()

    async def writable(self) -> None:
        """Wait until the send queue is at most half full. Raises `LinkClosed` if the link ends first."""
        await self._until(self._has_room)

    async def flush(self) -> None:
        """Wait until the send queue is empty. Raises `LinkClosed` if the link ends first."""
        await self._until(lambda: not self._queue)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self._closed or self._peer_end is not None:
                break
            waiter: asyncio.Future[None] = self._network.loop.create_future()
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
        """Send what fits into the window; a frame larger than it goes when the window is empty."""
        queue = self._queue
        while queue:
            frame = queue[0]
            if self._unread_bytes and self._unread_bytes + len(frame) > self._limits.ring_bytes:
                break
            queue.popleft()
            self._queue_bytes -= len(frame)
            self._unread_bytes += len(frame)
            self._sent += 1
            self._network.carry(self, len(frame), partial(self._other._arrive, frame), frame)
        if self._waiters and self._has_room():
            self._wake()

    def _credit(self, nbytes: int) -> None:
        """The peer took so many bytes."""
        self._unread_bytes -= nbytes
        if not self._closed and not self.owner.dead:
            self._call(self._pump)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- receiving ---------------------------------------------------------------------------------------

    def _arrive(self, frame: bytes) -> None:
        """A frame reached this process: the network says so, outside of every process."""
        self._arrived += 1
        if self.owner.dead or (self._arrivals_max is not None and self._arrived > self._arrivals_max):
            return
        self._inbox.append(frame)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._call(self._drain_on_turn)

    def _drain_on_turn(self) -> None:
        self._drain_scheduled = False
        if self._closed:
            return
        for _ in range(self._limits.frames_per_wake):
            if self._on_frame is None or not self._inbox or self._closed:
                break
            frame = self._inbox.popleft()
            self._network.credit(self, partial(self._other._credit, len(frame)))
            try:
                self._deliver(self._on_frame, frame)
            except RemoteProtocolError as error:
                self._fail(error)
            finally:
                if self._inbox:
                    self._schedule_drain()
        reading = self._on_frame is not None
        if self._peer_end is not None and (not self._inbox if reading else self._on_closed is not None):
            self._end(self._peer_end[0])

    def _deliver(self, on_frame: OnFrame, frame: bytes) -> None:
        peer, owner = self.peer, self.owner
        header, payload = unpack_frame(frame, job=peer.job, incarnation=peer.incarnation)
        owner.hybrid_clock.merge(header.hlc, owner.wall_ns())
        self._network.delivered(self, frame)
        on_frame(header, payload)

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye and end the link; frames still in the send queue are dropped. Idempotent."""
        if not self._closed:
            self._network.carry(self, 1, partial(self._other.peer_ended, None), b"")
            self._end(None)

    def peer_dies(self, arrivals_max: int) -> None:
        """The peer is dead, which this side does not know yet; so many of its frames arrive in all."""
        self._arrivals_max = arrivals_max

    def peer_ended(self, error: ZbmdError | None) -> None:
        """The end of the peer's side has reached this one."""
        if self._closed or self._peer_end is not None or self.owner.dead:
            return
        self._peer_end = (error,)
        self._wake()
        self._schedule_drain()

    @property
    def frames_sent(self) -> int:
        """Frames that left this end."""
        return self._sent

    @property
    def frames_arrived(self) -> int:
        """Frames that reached this end."""
        return self._arrived

    def _fail(self, error: ZbmdError) -> None:
        self._network.carry(self, 1, partial(self._other.peer_ended, self._broken()), b"")
        self._end(error)

    def _broken(self) -> PeerLost:
        return PeerLost(self._identity.name, "its end of the link closed without a goodbye")

    def _end(self, error: ZbmdError | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_error = error
        self._queue.clear()
        self._queue_bytes = 0
        self._inbox.clear()
        self._network.forget(self)
        self._wake()
        self._call(self._report_end)

    def _report_end(self) -> None:
        if self._on_closed is not None and not self._end_reported:
            self._end_reported = True
            self._on_closed(self._end_error)

    def _closed_error(self) -> LinkClosed:
        error = self._end_error or (self._peer_end[0] if self._peer_end else None)
        return LinkClosed(f"the link to {self.peer.name} is closed" + (f": {error}" if error else ""))

    def _call(self, callback: Callable[[], None]) -> None:
        self._network.loop.call_soon(callback, context=self.owner.context.copy())
