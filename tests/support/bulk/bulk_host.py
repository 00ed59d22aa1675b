"""Data planes joined by real sockets, as a handshake would have left them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from zbmd.transport.bulk.events import BulkLimits, BulkPeerInfo
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.bulk.stripe_io import Stripe
from zbmd.transport.identity import Identity, Side
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native
from zbmd.transport.secure.protection import Keys, Protection, Purpose, Session

PATIENCE_NS = 30 * 10**9
"""Far more than anything here takes; a test that waits so long has failed."""


def deadline() -> int:
    return _native.now_ns() + PATIENCE_NS


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = socket.create_connection(server.getsockname())
        listener, _ = server.accept()
    for sock in (dialer, listener):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dialer, listener


def stripe_of(
    sock: socket.socket, number: int, side: Side, protection: Protection, surplus: bytes = b""
) -> Stripe:
    """A stripe as `session_setup` would have made it."""
    keys = None
    if protection is Protection.MAC:
        of_dialer, of_listener = (bytes([number, role]) * 16 for role in (1, 2))
        keys = Keys(send=of_dialer, receive=of_listener)
        if side is Side.LISTENER:
            keys = Keys(send=of_listener, receive=of_dialer)
    session = Session(
        session_id=bytes([number]) * 16,
        side=side,
        peer=Identity(name="peer", pid=1, uid=0, incarnation=1),
        purpose=Purpose.STRIPE,
        protection=protection,
        keys=keys,
        control_id=bytes(16),
        stripe=number,
    )
    return Stripe(session=session, sock=sock, surplus=surplus)


class BulkHost:
    """A process's segment, regions and data plane. slot: also the name."""

    def __init__(self, slot: int, *, nbytes: int = 1 << 20) -> None:
        self.slot = slot
        self._stack = ExitStack()
        self.segment = Segment.create(slot=slot, incarnation=slot + 1, arena_bytes=nbytes, inbox_bytes=nbytes)
        self._stack.callback(self.segment.close)
        self.regions = self.segment.regions
        self.plane = DataPlane()
        self._stack.callback(self.plane.close)

    def connect(self, slot: int, *, limits: BulkLimits | None = None) -> BulkPeer:
        """The bulk connection with the host of that slot, without a stripe."""
        info = BulkPeerInfo(name=f"rank{slot}", slot=slot, incarnation=slot + 1)
        return BulkPeer(self.plane, info, segment=self.segment, limits=limits)

    def wait(self, slot: int, channel: int, value: int) -> int:
        """Wait for a notification, by the patience of tests; see `Segment.wait`."""
        return self.segment.wait(slot, channel, value, group_mask=1 << slot, deadline_ns=deadline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


def join(
    a: BulkHost,
    b: BulkHost,
    *,
    stripes: int = 1,
    protection: Protection = Protection.MAC,
    limits: BulkLimits | None = None,
) -> tuple[BulkPeer, BulkPeer]:
    """Connect two hosts; what `a` sees and what `b` sees."""
    ends = a.connect(b.slot, limits=limits), b.connect(a.slot, limits=limits)
    for number in range(stripes):
        for end, sock, side in zip(ends, tcp_pair(), (Side.DIALER, Side.LISTENER), strict=True):
            end.add_stripe(stripe_of(sock, number, side, protection))
    return ends
