"""One end of a shm link, once it is set up: two rings in one memfd, two eventfds, one unix socket.

Frames go through the rings. An eventfd is written only when the other side has parked. The socket carries
one byte in its whole life, the goodbye; its EOF is the confirmation that the peer has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import structlog

from zbmd.transport._native import RING_HEADER_BYTES, Mapping, RingReader, RingWriter
from zbmd.transport.capture.recorder import Recorder
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
from zbmd.transport.hlc import HybridClock
from zbmd.transport.link import LinkLimits, OnClosed, OnFrame
from zbmd.transport.segment import PeerSegment

log: Final = structlog.stdlib.get_logger("zbmd.transport.shm")

GOODBYE = b"\x01"
_PREFIX_BYTES = 4


def link_memory_bytes(ring_bytes: int) -> int:
    """The size of the memfd that holds both rings of a link."""
    return 2 * (RING_HEADER_BYTES + ring_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParts:
    """What both sides of a link share, seen from one of them. The link owns all of it."""

    sock: socket.socket
    mapping: Mapping
    ring_bytes: int
    wake_fd: int
    """The eventfd that the peer writes to wake us."""
    peer_wake_fd: int
    dialed: bool
    """The dialer writes the first ring and reads the second."""


class ShmLink:
    """See `zbmd.transport.link.Link`."""

    def __init__(
        self,
        parts: LinkParts,
        *,
        identity: Identity,
        peer: PeerInfo,
        peer_segment: PeerSegment | None,
        clock: HybridClock,
        limits: LinkLimits,
        recorder: Recorder | None = None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._peer = peer
        self._peer_segment = peer_segment
        self._identity = identity
        self._clock = clock
        self._limits = limits
        self._recorder = recorder
        self._stream = 0 if recorder is None else recorder.link(peer.name, peer.incarnation)
        self._loop = loop
        self._sock = parts.sock
        self._mapping = parts.mapping
        self._wake_fd = parts.wake_fd
        self._peer_wake_fd = parts.peer_wake_fd
        first, second = 0, RING_HEADER_BYTES + parts.ring_bytes
        ours, theirs = (first, second) if parts.dialed else (second, first)
        self._writer = RingWriter(parts.mapping, ours, parts.ring_bytes, parts.peer_wake_fd)
        self._reader = RingReader(
            parts.mapping, theirs, parts.ring_bytes, parts.peer_wake_fd, limits.frame_bytes_max
        )
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._queue_bytes = 0
        self._head_done = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._on_frame: OnFrame | None = None
        self._on_closed: OnClosed | None = None
        self._drain_scheduled = False
        self._closed = False
        self._said_goodbye = False
        self._end_reported = False
        self._end_error: ZbmdError | None = None
        # Set once the socket has ended: what to report when the last frame has been delivered.
        self._peer_end: tuple[ZbmdError | None] | None = None
        loop.add_reader(self._wake_fd, self._on_wake)
        loop.add_reader(self._sock.fileno(), self._on_socket)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<ShmLink {self._identity.name} to {self._peer.name}#{self._peer.incarnation} {state}>"

    @property
    def peer(self) -> PeerInfo:
        """Who the peer proved to be at hello."""
        return self._peer

    @property
    def peer_segment(self) -> PeerSegment | None:
        """The peer's shared segment, if it handed one over."""
        return self._peer_segment

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
            self._loop.call_soon(self._report_end)
        elif self._peer_end is not None:
            self._schedule_drain()

    def send(self, payload: bytes, *, epoch: int = 0, trace_id: int = 0, flags: int = 0) -> None:
        """Send one frame, or queue it. See `zbmd.transport.link.Link.send`."""
        if self._closed or self._peer_end is not None:
            raise self._closed_error()
        frame_bytes = HEADER_BYTES + len(payload)
        if frame_bytes > self._limits.frame_bytes_max:
            raise LocalProtocolError(
                f"a frame of {frame_bytes} bytes to {self._peer.name} is over the bound of "
                f"{self._limits.frame_bytes_max}: send bulk data as a region"
            )
        queue = self._queue
        if self._queue_bytes >= self._limits.queue_bytes_max or len(queue) >= self._limits.queue_frames_max:
            raise LinkFull(
                f"{len(queue)} frames ({self._queue_bytes} bytes) already wait for {self._peer.name}; "
                "await writable() and send again"
            )
        hlc = self._clock.tick(time.time_ns())
        header = pack_header(
            FrameHeader(
                flags=flags,
                payload_bytes=len(payload),
                job=self._identity.job,
                incarnation=self._identity.incarnation,
                epoch=epoch,
                hlc=hlc,
                trace_id=trace_id,
            )
        )
        if self._recorder is not None:
            self._recorder.frame_out(self._stream, header, payload, hlc)
        queue.append((header, payload))
        self._queue_bytes += frame_bytes
        if len(queue) == 1:
            try:
                self._flush()
            except RemoteProtocolError as error:
                self._fail(error)
                raise self._closed_error() from error

    async def writable(self) -> None:
        """Wait until the send queue is at most half full. Raises `LinkClosed` if the link ends first."""
        while not self._has_room():
            await self._progress()
        if self._closed or self._peer_end is not None:
            raise self._closed_error()

    async def flush(self) -> None:
        """Wait until the send queue is empty. Raises `LinkClosed` if the link ends first."""
        while self._queue:
            await self._progress()
        if self._closed or self._peer_end is not None:
            raise self._closed_error()

    def close(self) -> None:
        """Say goodbye and end the link; frames still in the send queue are dropped. Idempotent."""
        if self._closed:
            return
        with contextlib.suppress(OSError):  # the peer may be gone, or never read its socket
            self._sock.send(GOODBYE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._end(None)

    def _closed_error(self) -> LinkClosed:
        error = self._end_error or (self._peer_end[0] if self._peer_end else None)
        return LinkClosed(f"the link to {self._peer.name} is closed" + (f": {error}" if error else ""))

    async def _progress(self) -> None:
        """Wait until the queue has become shorter, or the link has ended."""
        if self._closed or self._peer_end is not None:
            raise self._closed_error()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _has_room(self) -> bool:
        return (
            self._queue_bytes <= self._limits.queue_bytes_max // 2
            and len(self._queue) <= self._limits.queue_frames_max // 2
        )

    def _flush(self) -> None:
        """Move frames from the queue into the ring; park if the ring is full."""
        queue = self._queue
        while queue:
            header, payload = queue[0]
            frame_bytes = len(header) + len(payload)
            self._head_done = self._writer.write(header, payload, self._head_done)
            if self._head_done == _PREFIX_BYTES + frame_bytes:
                queue.popleft()
                self._queue_bytes -= frame_bytes
                self._head_done = 0
            elif self._writer.park():
                break
        if self._waiters and self._has_room():
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        try:
            self._flush()
        except RemoteProtocolError as error:
            self._fail(error)
            return
        self._drain()

    def _on_socket(self) -> None:
        try:
            data = self._sock.recv(len(GOODBYE) + 1)
        except (BlockingIOError, ConnectionResetError):
            return  # a reset is reported once, before what the peer said last, which may be its goodbye
        if data == GOODBYE and not self._said_goodbye:
            self._said_goodbye = True
            return
        if data:
            self._fail(RemoteProtocolError(f"{self._peer.name} wrote {data!r} into the socket of its link"))
            return
        self._loop.remove_reader(self._sock.fileno())
        if not self._said_goodbye:
            self._peer_end = (PeerLost(self._peer.name, "its end of the link closed without a goodbye"),)
        else:
            self._peer_end = (None,)
        self._wake_waiters()
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain_on_turn)

    def _drain_on_turn(self) -> None:
        self._drain_scheduled = False
        self._drain()

    def _drain(self) -> None:
        """Deliver a bounded number of frames, then park or give the loop its turn."""
        if self._closed or self._drain_scheduled:
            return
        if self._on_frame is None:
            if self._peer_end is not None and self._on_closed is not None:
                self._end(self._peer_end[0])
            return
        more = True
        try:
            for _ in range(self._limits.frames_per_wake):
                frame = self._reader.read()
                if frame is None:
                    more = self._peer_end is None and not self._reader.park()
                    break
                self._deliver(frame)
                if not self._reading():
                    return
        except RemoteProtocolError as error:
            self._fail(error)
        finally:
            # Also when the callback raised something of its own, which is the loop's to report.
            if more:
                self._schedule_drain()
        if self._peer_end is not None and not more:
            self._end(self._peer_end[0])

    def _reading(self) -> bool:
        return self._on_frame is not None and not self._closed

    def _deliver(self, frame: bytes) -> None:
        assert self._on_frame is not None
        peer = self._peer
        header, payload = unpack_frame(frame, job=peer.job, incarnation=peer.incarnation)
        hlc = self._clock.merge(header.hlc, time.time_ns())
        if self._recorder is not None:
            self._recorder.frame_in(self._stream, frame, hlc)
        self._on_frame(header, payload)

    def _fail(self, error: ZbmdError) -> None:
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
        self._loop.remove_reader(self._wake_fd)
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        os.close(self._wake_fd)
        os.close(self._peer_wake_fd)
        del self._writer, self._reader, self._mapping
        self._queue.clear()
        self._queue_bytes = 0
        self._wake_waiters()
        self._loop.call_soon(self._report_end)

    def _report_end(self) -> None:
        if self._on_closed is not None and not self._end_reported:
            self._end_reported = True
            self._on_closed(self._end_error)
