"""One end of a shm link, once it is set up: two rings in one memfd, two eventfds, one unix socket.

Frames go through the rings; of large ones only the header does, see `frame_loans`. An eventfd is written only
when the other side has parked. The socket carries one byte in its whole life, the goodbye; its EOF is the
confirmation that the peer has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from zbmd.transport.errors import PeerLost, RemoteProtocolError
from zbmd.transport.frames import HEADER_BYTES, unpack_header
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.link.spin import SpinPolicy
from zbmd.transport.memory.frame_loans import BLOCK_BYTES_MIN, BLOCK_RECORD, BorrowedFrame, LinkLoans
from zbmd.transport.memory.scattered import Scattered
from zbmd.transport.memory.segment import PeerSegment
from zbmd.transport.native._native import RING_BLOCKS, RING_HEADER_BYTES, Mapping, RingReader, RingWriter
from zbmd.transport.shm._shm_link import ShmCore

GOODBYE = b"\x01"
LOOK_NS = 2_000
"""Time that a spinning reader looks before the loop gets its next turn, which takes about as long."""


def link_memory_bytes(ring_bytes: int) -> int:
    """The size of the memfd that holds both rings of a link."""
    return 2 * (RING_HEADER_BYTES + ring_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParts:
    """The resources that both sides of a link share, seen from one of them. The link owns them."""

    sock: socket.socket
    mapping: Mapping
    ring_bytes: int
    wake_fd: int
    """The eventfd that the peer writes to wake us."""
    peer_wake_fd: int
    dialed: bool
    """The dialer writes the first ring and reads the second."""


class ShmLink(ShmCore, LinkSide):
    """See `zbmd.transport.link.interface.Link`."""

    carrier = "shm"

    def __init__(
        self,
        parts: LinkParts,
        endpoint: Endpoint,
        peer: PeerInfo,
        peer_segment: PeerSegment | None,
    ) -> None:
        super().__init__(endpoint, peer, peer_segment=peer_segment)
        limits, own_segment = endpoint.limits, endpoint.segment
        self._sock = parts.sock
        self._mapping = parts.mapping
        self._wake_fd = parts.wake_fd
        self._wake_count = bytearray(8)
        self._peer_wake_fd = parts.peer_wake_fd
        first, second = 0, RING_HEADER_BYTES + parts.ring_bytes
        ours, theirs = (first, second) if parts.dialed else (second, first)
        writer = RingWriter(parts.mapping, ours, parts.ring_bytes, parts.peer_wake_fd)
        frame_bytes_max, fd = limits.frame_bytes_max, parts.peer_wake_fd
        reader = RingReader(parts.mapping, theirs, parts.ring_bytes, fd, frame_bytes_max)
        self._loans: LinkLoans | None = None
        if own_segment is not None and peer_segment is not None:
            self._loans = LinkLoans(own_segment.frame_lender, writer, peer.pid)
            self._takes_pieces = True
        self._said_goodbye = False
        self.spins = SpinPolicy(limits.spin_ns)
        """The policy by which its reader spins or parks."""
        lends = self._loans is not None
        self._begin_rings(
            writer, reader, self.spins, look_ns=LOOK_NS, lends_from_bytes=BLOCK_BYTES_MIN, lends=lends
        )
        self._loop.add_reader(self._wake_fd, self._on_wake)
        self._loop.add_reader(self._sock.fileno(), self._on_socket)

    def _lent(self, payload: bytes | Scattered) -> bytes | None:
        return None if self._loans is None else self._loans.lend(payload)

    def _has_room_soon(self) -> bool:
        return self._loans is not None and self._loans.ask()

    def _borrowed(self, frame: bytes) -> BorrowedFrame:
        limit = self._limits.frame_bytes_max
        return _borrow(frame, self._reader, self._peer_segment, frame_bytes_max=limit)

    def _on_wake(self) -> None:
        # Whatever the peer, who has the same descriptor, made of its O_NONBLOCK.
        with contextlib.suppress(BlockingIOError):
            os.preadv(self._wake_fd, (self._wake_count,), -1, os.RWF_NOWAIT)
        self._pump()
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
        lost = PeerLost(self._peer.name, "its end of the link closed without a goodbye")
        self._peer_ended(None if self._said_goodbye else lost)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(OSError):  # the peer may be gone, or never read its socket
            self._sock.send(GOODBYE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _tear_down(self) -> None:
        self._loop.remove_reader(self._wake_fd)
        self._loop.remove_reader(self._sock.fileno())
        self._reader.done()
        self._sock.close()
        os.close(self._wake_fd)
        os.close(self._peer_wake_fd)
        if self._loans is not None:
            self._loans.end()
        del self._writer, self._reader, self._mapping


def _borrow(
    frame: bytes, reader: RingReader, memory: PeerSegment | None, *, frame_bytes_max: int
) -> BorrowedFrame:
    """The frame that a marked one stands for; the peer's block is brought back with the last view of it.

    Raises `RemoteProtocolError` on anything that is none: the numbers are a peer's.
    """
    header = unpack_header(frame)
    if len(frame) != HEADER_BYTES + BLOCK_RECORD.size:
        raise RemoteProtocolError(f"a frame that names a block has {len(frame)} bytes")
    if HEADER_BYTES + header.payload_bytes > frame_bytes_max:
        raise RemoteProtocolError(
            f"a frame with a block of {header.payload_bytes} bytes is over the bound of {frame_bytes_max}"
        )
    offset, block = BLOCK_RECORD.unpack_from(frame, HEADER_BYTES)
    if memory is None or block >= RING_BLOCKS:
        raise RemoteProtocolError(
            f"a frame names block {block} in {'no memory' if memory is None else 'an arena'}: there is none"
        )
    memory.require_arena(offset, header.payload_bytes)
    view = reader.take(block, memory.mapping, offset, header.payload_bytes)
    return BorrowedFrame(header, view, frame[:HEADER_BYTES])
