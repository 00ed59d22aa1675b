"""One end of a TCP link, once its session stands: records of a secure stream over one socket.

A frame leaves at once, by one sendmsg, if it is the first in its turn of the loop; those after it leave
together at the turn's end. What the kernel does not take waits in a bounded backlog, and then in the queue of
the base. Reading stops while nobody takes frames, so that the peer's kernel, then its queue, fill up, and its
`send` raises `LinkFull`. The goodbye is a record like others; what comes after it is the end of the stream.
After a `close`, `linger` lets the last records leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.stripe_io import OnStripe, Stripe
from zbmd.transport.errors import LinkFull, LocalProtocolError, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.handshake.driver import PIECES_PER_WRITE_MAX, ByteSocket, lost_reason
from zbmd.transport.host.tcp_silence import LOOKS, Silence, read_progress
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Endpoint, MemoryShare
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.scattered import Scattered
from zbmd.transport.native._native import now_ns
from zbmd.transport.secure.protection import Buffer
from zbmd.transport.secure.record_stream import SecureStream
from zbmd.transport.tcp.address import TcpAddress, TcpSettings
from zbmd.transport.tcp.sockets import Ready

# ---- lingering: the end of a link after its close
#
# A socket that is closed with something unread resets its connection, and what is on its way to the peer is
# lost with it. So the closing side sends what it has, says that this is all, and then reads and forgets until
# the peer has closed too. By a deadline, and for a bounded number of connections at once.

LINGERING_MAX: Final = 256
"""Of a process; a connection beyond it is closed at once."""
_FORGOTTEN: Final = memoryview(bytearray(1 << 16))


def linger(
    byte_socket: ByteSocket, backlog: deque[Buffer], loop: asyncio.AbstractEventLoop, duration_ns: int
) -> None:
    """Take over a socket that no one watches any more, with what is still to be sent."""
    if len(_lingering) >= LINGERING_MAX:
        byte_socket.close()
        return
    _Linger(byte_socket, backlog, loop, duration_ns)


def drop_sent(backlog: deque[Buffer], nbytes: int) -> None:
    """Take the first `nbytes` off what is to be sent."""
    while nbytes:
        piece = backlog[0]
        if len(piece) <= nbytes:
            nbytes -= len(piece)
            backlog.popleft()
        else:
            backlog[0] = memoryview(piece)[nbytes:]
            nbytes = 0


class _Linger:
    """One connection; the loop holds it while it lasts."""

    def __init__(
        self,
        byte_socket: ByteSocket,
        backlog: deque[Buffer],
        loop: asyncio.AbstractEventLoop,
        duration_ns: int,
    ) -> None:
        self._socket = byte_socket
        self._fd = byte_socket.sock.fileno()
        self._backlog = backlog
        self._loop = loop
        self._finished = False
        _lingering.add(self)
        self._timer = loop.call_later(duration_ns / 1e9, self._close)
        loop.add_reader(self._fd, self._read)
        loop.add_writer(self._fd, self._write)
        self._write()

    def __del__(self) -> None:
        self._socket.close()  # the loop has ended before we had

    def _write(self) -> None:
        if self._finished:
            return
        try:
            while self._backlog:
                taken = self._socket.write(list(islice(self._backlog, PIECES_PER_WRITE_MAX)))
                if taken is None:
                    return
                drop_sent(self._backlog, taken)
        except (OSError, ZbmdError):
            self._close()
            return
        self._finished = True
        self._loop.remove_writer(self._fd)
        self._socket.finish()

    def _read(self) -> None:
        try:
            for _ in range(READS_PER_WAKE):
                taken = self._socket.read_into(_FORGOTTEN)
                if taken is None:
                    return
                if taken == 0:
                    self._close()
                    return
        except (OSError, ZbmdError):
            self._close()

    def _close(self) -> None:
        if self in _lingering:
            _lingering.discard(self)
            self._timer.cancel()
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._socket.close()


_lingering: weakref.WeakSet[_Linger] = weakref.WeakSet()


BACKLOG_BYTES_MAX: Final = 1 << 16
"""Records that wait for the kernel, but for the last; more frames wait in the queue unsealed."""
UNREAD_BYTES_MAX: Final = 1 << 16
"""Frames that wait to be taken, but for those of the last read; then the socket is not read."""
UNHEARD_BYTES_MAX: Final = 1 << 12
"""The same while nobody takes frames: enough to hear a goodbye, not enough to hide that nobody does."""
READS_PER_WAKE: Final = 4


class TcpLink(LinkSide):
    """See `zbmd.transport.link.interface.Link`. Made by `tcp.dial` and `tcp.listen`."""

    carrier = "tcp"

    def __init__(
        self,
        ready: Ready,
        *,
        endpoint: Endpoint,
        on_end: Callable[[], object] | None = None,
        dialed: TcpAddress | None = None,
        settings: TcpSettings | None = None,
    ) -> None:
        session, byte_socket = ready.session, ready.byte_socket
        super().__init__(endpoint, session.peer)
        self.session = session
        self.dialed = dialed
        """The address that we dialed; None if the peer dialed."""
        self.settings = settings
        self._on_end = on_end
        self._socket = byte_socket
        self._fd = byte_socket.sock.fileno()
        self._deadlines = endpoint.deadlines
        self.local_address = ready.local
        """Our end, as the kernel has it."""
        self.remote_address = ready.remote
        """The peer's end, as the kernel has it."""
        self._records = SecureStream(session.keys, frame_bytes_max=endpoint.limits.frame_bytes_max)
        self._backlog: deque[Buffer] = deque()
        self._backlog_bytes = 0
        self._writing = False
        """Whether the loop tells when there is room."""
        self._sent_in_turn = False
        self._silence = Silence()
        self._look: asyncio.TimerHandle | None = None
        """Runs while the peer has something to acknowledge."""
        self._broken: OSError | None = None
        """Why nothing more can be written; what can still be read comes first."""
        self._unsent = MemoryShare(endpoint.send_memory)
        self._unread = MemoryShare(endpoint.receive_memory)
        self._reading_socket = False
        self._on_stripe: OnStripe | None = None
        self._stripes: deque[Stripe] = deque()
        self._stripes_joined: set[int] = set()
        self._bulk: BulkPeer | None = None
        self._records.feed(ready.surplus)
        self._read_on()
        if ready.surplus or byte_socket.pending:
            self._loop.call_soon(self._on_readable)

    # -- who, where --------------------------------------------------------------------------------------

    # -- stripes -------------------------------------------------------------------------------------------

    @property
    def on_stripe(self) -> OnStripe | None:
        """Called with each stripe that the peer has dialed; they wait until it is set."""
        return self._on_stripe

    @on_stripe.setter
    def on_stripe(self, callback: OnStripe | None) -> None:
        self._on_stripe = callback
        while self._stripes and self._on_stripe is not None:
            self._on_stripe(self._stripes.popleft())

    def has_place_for(self, stripe: int) -> bool:
        """Whether the peer may add this stripe: each number once."""
        return not self._closed and stripe not in self._stripes_joined

    def add_stripe(self, stripe: Stripe) -> None:
        """The listener has let a stripe join that has a place."""
        self._stripes_joined.add(stripe.session.stripe)
        if self._on_stripe is None:
            self._stripes.append(stripe)
        else:
            self._on_stripe(stripe)

    # -- regions -----------------------------------------------------------------------------------------

    def carry(self, bulk: BulkPeer) -> None:
        """Open regions by `bulk`, which ends with this link: orderly if it does, else at once.

        And this link ends with `bulk`, if that fails: a peer is there whole or not at all.
        """
        self._bulk = bulk
        if self._closed:
            self._end_bulk()

    def open_region(self, handle: RegionHandle) -> RemoteRegion:
        """See `zbmd.transport.link.interface.Link.open_region`."""
        if self._bulk is None:
            raise LocalProtocolError(f"no memory came with the link to {self._peer.name}: nothing to open")
        return self._bulk.open_region(handle)

    def bulk_ended(self, error: ZbmdError | None) -> None:
        """The bulk connection of `carry` has ended. For any thread."""
        if error is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._end_with_bulk, error)

    def _end_with_bulk(self, error: ZbmdError) -> None:
        if not self._closed:
            self._fail(error)

    def _end_bulk(self) -> None:
        if self._bulk is None:
            return
        if self._end_error is None:
            self._bulk.close()
        else:
            self._bulk.abort(self._end_error)

    # -- sending -----------------------------------------------------------------------------------------

    def send(self, payload: bytes | Scattered, *, epoch: int = 0, trace_id: int = 0, flags: int = 0) -> None:
        """Send one frame, or queue it. `LinkFull` also if all links together hold too much (`NodeMemory`)."""
        memory = self._unsent.memory
        if memory.full and not self._closed:
            raise LinkFull(
                f"the links of this process hold {memory.used_bytes} bytes to be sent, the bound: "
                "await writable() and send again"
            )
        super().send(payload, epoch=epoch, trace_id=trace_id, flags=flags)
        self._count_unsent()

    def _has_room(self) -> bool:
        memory = self._unsent.memory
        if not memory.full:
            return super()._has_room()
        memory.wait(self, self._wake_waiters)
        return False

    def _count_unsent(self) -> None:
        self._unsent.hold(0 if self._closed else self._queue_bytes + self._backlog_bytes)

    def _count_unread(self) -> None:
        records = self._records
        self._unread.hold(0 if self._closed else records.ready_bytes + records.partial_bytes)

    def _on_room_to_read(self) -> None:
        self._read_on()
        self._loop.call_soon(self._on_readable)

    async def flush(self) -> None:
        """Wait until all frames are the kernel's. Raises `LinkClosed` if the link ends first."""
        await self._until(lambda: not self._queue and not self._backlog)

    def _push(self, header: bytes, payload: bytes) -> bool:
        if self._backlog_bytes >= BACKLOG_BYTES_MAX or self._broken is not None:
            return False
        self._append(self._records.seal_frame(header, payload))
        if self._writing:
            return True
        if not self._sent_in_turn:
            self._sent_in_turn = True
            self._loop.call_soon(self._on_turn_end)
            self._write()
        elif self._backlog_bytes >= BACKLOG_BYTES_MAX:
            self._write()
        return True

    def _append(self, pieces: list[Buffer]) -> None:
        self._backlog.extend(pieces)
        self._backlog_bytes += sum(len(piece) for piece in pieces)

    def _on_turn_end(self) -> None:
        self._sent_in_turn = False
        if not self._closed and not self._writing:
            self._write()

    def _write(self) -> None:
        """Hand the backlog to the kernel, as far as there is room; then wait for more room."""
        backlog = self._backlog
        try:
            while backlog:
                taken = self._socket.write(list(islice(backlog, PIECES_PER_WRITE_MAX)))
                if taken is None:
                    break
                self._backlog_bytes -= taken
                drop_sent(backlog, taken)
        except (OSError, ZbmdError) as error:
            self._broke(error)
            return
        self._wait_for_room(bool(backlog))
        self._count_unsent()
        self._look_again()
        if self._waiters and not backlog and not self._queue:
            self._wake_waiters()

    def _on_writable(self) -> None:
        self._write()
        if not self._closed and self._backlog_bytes < BACKLOG_BYTES_MAX:
            self._pump()
            self._count_unsent()

    def _on_silence(self) -> None:
        """Has the peer's host acknowledged anything?"""
        self._look = None
        progress = read_progress(self._socket.sock)
        if self._silence.look(progress, now_ns(), self._deadlines.tcp_user_timeout_ms * 1_000_000):
            self._ended(PeerLost(self._peer.name, self._why(TimeoutError())))
        elif progress.owed or self._backlog:
            self._look_again()

    def _look_again(self) -> None:
        if self._look is None:
            pause_s = self._deadlines.tcp_user_timeout_ms / LOOKS / 1e3
            self._look = self._loop.call_later(pause_s, self._on_silence)

    def _wait_for_room(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._on_writable)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _broke(self, error: OSError | ZbmdError) -> None:
        """Nothing more can be written. A final record of the peer, such as a goodbye, may still be unread."""
        self._wait_for_room(False)
        self._backlog.clear()
        self._backlog_bytes = 0
        if not isinstance(error, OSError):
            self._broken = BrokenPipeError()
            self._loop.call_soon(self._fail, error)
            return
        self._broken = error
        if self._room() > 0:
            self._loop.call_soon(self._on_readable)
        else:
            self._ended(PeerLost(self._peer.name, self._why(error)))

    # -- receiving ---------------------------------------------------------------------------------------

    def _next_frame(self) -> bytes | bytearray | None:
        frame = self._records.next_frame()
        if frame is not None:
            self._count_unread()
        return frame

    def _park(self) -> bool:
        self._read_on()
        if not self._socket.pending:
            return True
        self._read()
        return not self._records.ready_bytes and not self._records.failed and self._peer_end is None

    def _on_readable(self) -> None:
        if self._closed:
            return
        self._read()
        records = self._records
        if records.failed and self._on_frame is None and not records.ready_bytes:
            try:
                records.next_frame()
            except RemoteProtocolError as error:  # nobody has to take a frame first
                self._fail(error)
        self._drain()

    def _read(self) -> None:
        """Read a bounded amount; not at all while enough waits to be taken.

        To the end of what there is: libuv reports a reset once, and if data came with it never again.
        """
        records = self._records
        for _ in range(READS_PER_WAKE):
            room = self._room()
            if room <= 0 or records.failed or self._peer_end is not None:
                self._read_no_more()
                return
            try:
                with records.get_buffer() as whole, whole[:room] as buffer:
                    taken = self._socket.read_into(buffer)
            except OSError as error:
                self._ended(PeerLost(self._peer.name, self._why(error)))
                return
            except ZbmdError as error:
                self._ended(error)
                return
            if taken is None:
                return
            if taken == 0:
                self._ended(PeerLost(self._peer.name, self._why(self._broken)))
                return
            records.buffer_updated(taken)
            self._count_unread()
        self._loop.call_soon(self._on_readable)

    def _room(self) -> int:
        """Return how many more bytes may be read."""
        memory = self._unread.memory
        if memory.full and not self._records.partial_bytes:
            memory.wait(self, self._on_room_to_read)
            return 0
        heard = self._on_frame is not None or self._broken is not None
        return (UNREAD_BYTES_MAX if heard else UNHEARD_BYTES_MAX) - self._records.ready_bytes

    def _why(self, error: OSError | None) -> str:
        if error is None:
            return "its connection closed without a goodbye: it ended or was killed"
        return lost_reason(error, silent_ms=self._deadlines.tcp_user_timeout_ms)

    def _ended(self, error: ZbmdError) -> None:
        """The stream is at its end, for this reason unless the peer has said goodbye."""
        self._read_no_more()
        if self._records.goodbye:
            self._peer_ended(None)
            return
        error.__cause__ = self._records.end()
        self._peer_ended(error)

    def _read_on(self) -> None:
        if not self._reading_socket and self._peer_end is None and not self._closed:
            self._reading_socket = True
            self._loop.add_reader(self._fd, self._on_readable)

    def _read_no_more(self) -> None:
        if self._reading_socket:
            self._reading_socket = False
            self._loop.remove_reader(self._fd)

    # -- the end -----------------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        if self._broken is None:
            self._append(self._records.seal_goodbye())
            self._write()

    def _tear_down(self) -> None:
        self._read_no_more()
        self._wait_for_room(False)
        if self._look is not None:
            self._look.cancel()
        for share in (self._unsent, self._unread):
            share.memory.forget(self)
            share.hold(0)
        for stripe in self._stripes:
            stripe.sock.close()
        self._stripes.clear()
        self._end_bulk()
        if self._on_end is not None:
            self._on_end()
        if self._end_error is None and self._peer_end is None and self._broken is None:
            linger(self._socket, self._backlog, self._loop, self._deadlines.flush_ns)
        else:
            self._socket.close()
