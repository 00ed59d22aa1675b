"""One end of an RDMA link, once its queue pair stands: frames as messages that land in the peer's buffers.

The authenticated TCP link that it was set up over stays open beside it: the end of that is how an idle
peer's death is noticed at once, by the kernel's word. A goodbye is the last message of the queue pair, and
the TCP link is closed once all that was sent has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.rdma.credit import MESSAGE_BYTES, CreditFlow, unpack_immediate
from zbmd.transport.rdma.message_device import MessageDevice
from zbmd.transport.rdma.queue_pair import QueuePair
from zbmd.transport.tcp.link import TcpLink

if TYPE_CHECKING:
    from zbmd.transport.rdma.peer import RdmaPeer


class RdmaLink(LinkSide):
    """See `zbmd.transport.link.interface.Link`. Made by `rdma.dial` and `rdma.listen`."""

    def __init__(
        self,
        tcp_link: TcpLink,
        queue_pair: QueuePair,
        device: MessageDevice,
        *,
        endpoint: Endpoint,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(endpoint, tcp_link.peer)
        self.tcp_link = tcp_link
        """The TCP link over which it was set up."""
        self._queue_pair = queue_pair
        self._device = device
        self._on_end = on_end
        self._flow = CreditFlow(frame_bytes_max=endpoint.limits.frame_bytes_max)
        self._head_done = 0
        """Bytes of the frame at the head that have left."""
        self._room_wanted = False
        self.memory: RdmaPeer | None = None
        """Opens regions; None if one of the two sides has no memory for it."""
        tcp_link.on_frame = self._on_tcp_frame
        tcp_link.on_closed = self._on_tcp_closed
        queue_pair.receive_with(self)

    # -- regions -----------------------------------------------------------------------------------------

    def carry(self, memory: RdmaPeer) -> None:
        """Open regions by `memory`, which ends with this link: orderly if it does, else at once."""
        self.memory = memory

    def open_region(self, handle: RegionHandle) -> RemoteRegion:
        """See `zbmd.transport.link.interface.Link.open_region`."""
        if self.memory is None:
            raise LocalProtocolError(f"no memory came with the link to {self._peer.name}: nothing to open")
        return self.memory.open_region(handle)

    def memory_ended(self, error: ZbmdError | None) -> None:
        """The memory of `carry` has ended; if it failed, so does this link. For any thread."""
        if error is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._peer_ended, error)

    # -- sending -----------------------------------------------------------------------------------------

    def _push(self, header: bytes, payload: bytes) -> bool:
        flow, queue_pair = self._flow, self._queue_pair
        nbytes = len(header) + len(payload)
        while True:
            if not flow.may_send or not queue_pair.has_room:
                self._room_wanted = True
                return False
            start = self._head_done
            end = min(start + MESSAGE_BYTES, nbytes)
            queue_pair.send(flow.send(more=end < nbytes), *_cut(header, payload, start, end))
            self._head_done = end
            if end == nbytes:
                self._head_done = 0
                return True

    async def flush(self) -> None:
        """Wait until all frames have arrived. Raises `LinkClosed` if the link ends first."""
        await self._until(lambda: not self._queue and self._queue_pair.all_arrived)

    def on_room(self) -> None:
        """See `rdma_queue_pair.Receiver`."""
        if self._closed:
            return
        if self._room_wanted:
            self._room_wanted = False
            self._pump()
        if self._waiters and not self._queue and self._queue_pair.all_arrived:
            self._wake_waiters()

    # -- receiving ---------------------------------------------------------------------------------------

    def on_message(self, word: int, data: bytes) -> None:
        """See `rdma_queue_pair.Receiver`."""
        if self._closed or self._peer_end is not None:
            return
        try:
            self._flow.came(unpack_immediate(word), data)
        except RemoteProtocolError as error:
            self._fail(error)
            return
        self.on_room()
        if self._flow.goodbye:
            self._peer_ended(None)
        self._schedule_drain()

    def _next_frame(self) -> bytes | None:
        frame = self._flow.next_frame()
        if self._peer_end is None and (due := self._flow.credits_due()) is not None:
            self._queue_pair.send(due)
        return frame

    def _park(self) -> bool:
        return not self._flow.unread

    # -- the end -----------------------------------------------------------------------------------------

    def on_failed(self, reason: str) -> None:
        """See `rdma_queue_pair.Receiver`."""
        self._device.poll()
        self._lost(PeerLost(self._peer.name, reason))

    def _on_tcp_frame(self, header: FrameHeader, payload: memoryview) -> None:
        self._fail(RemoteProtocolError(f"{self._peer.name} sent a frame beside its RDMA link"))

    def _on_tcp_closed(self, error: ZbmdError | None) -> None:
        self._device.poll()  # what the peer sent first, its goodbye perhaps
        if isinstance(error, PeerLost):
            self._lost(error)
        elif error is None:
            self._lost(PeerLost(self._peer.name, "it closed its RDMA link without a goodbye"))
        else:
            self._fail(error)

    def _lost(self, error: PeerLost) -> None:
        """The peer is gone: what it has sent is delivered first, but nothing of its memory is waited for."""
        if self.memory is not None and self._peer_end is None:
            self.memory.abort(error)
        self._peer_ended(error)

    def _say_goodbye(self) -> None:
        if self._peer_end is None:
            self._queue_pair.send(self._flow.say_goodbye())

    def _tear_down(self) -> None:
        if self._on_end is not None:
            self._on_end()
        self.tcp_link.on_closed = None
        if self.memory is not None:
            if self._end_error is None:
                self.memory.close()
            else:
                self.memory.abort(self._end_error)
        self._queue_pair.end(self.tcp_link.close)


def _cut(header: bytes, payload: bytes, start: int, end: int) -> tuple[memoryview, memoryview]:
    """Bytes `start` to `end` of both together."""
    head = len(header)
    return memoryview(header)[start:end], memoryview(payload)[max(0, start - head) : max(0, end - head)]
