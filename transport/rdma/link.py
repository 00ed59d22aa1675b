"""One end of an RDMA link, once its queue pair stands: frames as messages that land in the peer's buffers.

The authenticated TCP link that it was set up over stays open beside it: the end of that is how an idle
peer's death is noticed at once, by the kernel's word. A goodbye is the last message of the queue pair, and
the TCP link is closed once all that was sent has arrived.
"""

from __future__ import annotations

import contextlib
import ipaddress
import mmap
import secrets
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError, UserError, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.rdma.credit import MESSAGE_BYTES, CreditFlow, Immediate, unpack_immediate
from zbmd.transport.rdma.message_device import CONTROL_SLOTS, SEND_SLOTS, MessageDevice, address_of, verbs
from zbmd.transport.rdma.setup import RETRIES, TIMEOUT, QueuePairAt, why_broken
from zbmd.transport.tcp.link import TcpLink

if TYPE_CHECKING:
    from zbmd.transport.rdma.peer import RdmaPeer

# ---- a reliable connected queue pair for messages
#
# Sends are numbered. What was sent stays in a ring of registered slots until the peer's device has
# acknowledged it. A queue pair that ends lives on until all that was sent has arrived, or the device has
# given up.

INLINE_BYTES: Final = 220
"""Up to so many bytes travel in the work request itself."""
RNR_TIMER: Final = 26
"""82 ms before the next try where the peer has no buffer, which credit rules out: half a second, too."""
READS_MAX: Final = 1
ENTRY: Final = 1 << 32
"""Tells a send's number from a receive buffer's."""


class QueuePairState(Enum):
    """Of a queue pair."""

    MADE = "made"
    OPEN = "open"
    FAILED = "failed"
    DRAINING = "draining"
    CLOSED = "closed"


class Receiver(Protocol):
    """The user of a queue pair."""

    def on_message(self, word: int, data: bytes) -> None:
        """A message has come."""
        ...

    def on_room(self) -> None:
        """Something that was sent has arrived."""
        ...

    def on_failed(self, reason: str) -> None:
        """Nothing more can be sent or come."""
        ...


class QueuePair:
    """One end. Raises `UserError` if the device refuses one. For its loop's thread."""

    def __init__(self, device: MessageDevice) -> None:
        v = verbs()
        device.require_room()
        self._device = device
        self._state = QueuePairState.MADE
        self._psn = secrets.randbits(24)
        self._sent = 0
        self._acknowledged = 0
        self.receiver: Receiver | None = None
        self._on_ended: Callable[[], None] = _nothing
        self._early: list[tuple[int, bytes]] = []
        self._slots = mmap.mmap(-1, SEND_SLOTS * MESSAGE_BYTES)
        cap = v.QPCap(max_send_wr=SEND_SLOTS, max_send_sge=1, max_recv_wr=0, max_recv_sge=0)
        cap.max_inline_data = INLINE_BYTES
        wanted = v.QPInitAttr(
            qp_type=v.c.IBV_QPT_RC,
            scq=device.queue,
            rcq=device.queue,
            cap=cap,
            srq=device.receives,
            sq_sig_all=0,
        )
        try:
            # Not in any domain of shared memory: what is registered here only we can read.
            self._region: Any = v.MR(device.domain, len(self._slots), 0, address=address_of(self._slots))
            self._qp: Any = v.QP(device.domain, wanted)
        except v.Error as error:
            raise UserError(f"the RDMA device {device.name} gives no queue pair: {error}.") from error
        device.add(self._qp.qp_num, self)

    @property
    def at(self) -> QueuePairAt:
        """For the peer."""
        device = self._device
        return QueuePairAt(
            gid=device.gid, lid=device.lid, number=self._qp.qp_num, first_psn=self._psn, mtu=device.mtu
        )

    def connect(self, peer: QueuePairAt) -> None:
        """Ready to receive and to send. Raises `UserError` if the device cannot."""
        v, device = verbs(), self._device
        gid = ipaddress.IPv6Address(peer.gid).exploded
        route = v.GlobalRoute(dgid=v.GID(gid), sgid_index=device.gid_index)
        route.hop_limit = 64
        path = v.AHAttr(gr=route, is_global=1, port_num=device.port, dlid=peer.lid)
        to = v.QPAttr(port_num=device.port)
        to.path_mtu, to.dest_qp_num = min(peer.mtu, device.mtu), peer.number
        to.rq_psn, to.sq_psn = peer.first_psn, self._psn
        to.max_rd_atomic = to.max_dest_rd_atomic = READS_MAX
        to.min_rnr_timer, to.timeout = RNR_TIMER, TIMEOUT
        to.retry_cnt = to.rnr_retry = RETRIES
        to.qp_access_flags = 0
        to.ah_attr = path
        try:
            self._qp.to_rts(to)
        except v.Error as error:
            raise UserError(f"the RDMA device {device.name} cannot reach {gid}: {error}.") from error
        self._state = QueuePairState.OPEN

    # -- sending -----------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a message of a frame can be sent now: some slots are kept for those without credit."""
        return (
            self._state is QueuePairState.OPEN
            and self._sent - self._acknowledged < SEND_SLOTS - CONTROL_SLOTS
        )

    @property
    def all_arrived(self) -> bool:
        """Whether the peer's device has all that was sent."""
        return self._sent == self._acknowledged or self._state is QueuePairState.CLOSED

    def send(self, word: Immediate, *parts: memoryview | bytes) -> None:
        """Send one message of at most `MESSAGE_BYTES`."""
        v = verbs()
        number = self._sent
        at = start = number % SEND_SLOTS * MESSAGE_BYTES
        for part in parts:
            self._slots[at : at + len(part)] = part
            at += len(part)
        self._sent += 1
        flags = v.c.IBV_SEND_INLINE if at - start <= INLINE_BYTES else 0
        flags |= v.c.IBV_SEND_SIGNALED
        place = v.SGE(self._region.buf + start, at - start, self._region.lkey)
        request = v.SendWR(
            wr_id=ENTRY | number & (ENTRY - 1),
            opcode=v.c.IBV_WR_SEND_WITH_IMM,
            num_sge=1,
            sg=[place],
            imm_data=word.pack(),
            send_flags=flags,
        )
        self._qp.post_send(request)

    # -- completions -------------------------------------------------------------------------------------

    def on_sent(self, number: int, status: int) -> None:
        """See `message_device.Completes`."""
        if status:
            self._failed(status)
            return
        self._acknowledged += (number + 1 - self._acknowledged) & (ENTRY - 1)
        if self._state is QueuePairState.DRAINING:
            if self.all_arrived:
                self._destroy()
        elif self.receiver is not None:
            self.receiver.on_room()

    def on_message(self, word: int, data: bytes) -> None:
        """See `message_device.Completes`."""
        if self._state is QueuePairState.DRAINING:
            return
        if self.receiver is None:
            self._early.append((word, data))
        else:
            self.receiver.on_message(word, data)

    def receive_with(self, receiver: Receiver) -> None:
        """Deliver to `receiver` from now on, and at once what has come before."""
        self.receiver = receiver
        early, self._early = self._early, []
        for word, data in early:
            receiver.on_message(word, data)

    def _failed(self, status: int) -> None:
        if self._state is QueuePairState.DRAINING:
            self._destroy()
        elif self._state is QueuePairState.OPEN:
            self._state = QueuePairState.FAILED
            self._sent = self._acknowledged
            if self.receiver is not None:
                self.receiver.on_failed(why_broken(status))

    # -- the end -----------------------------------------------------------------------------------------

    def end(self, on_ended: Callable[[], None]) -> None:
        """Let what was sent arrive, then close and call `on_ended`, once. Nothing more is delivered."""
        self.receiver = None
        self._on_ended = on_ended
        if self._state is QueuePairState.OPEN and not self.all_arrived:
            self._state = QueuePairState.DRAINING
        else:
            self._destroy()

    def _destroy(self) -> None:
        """Into its error state, so that nothing new comes; what has completed is taken; then no more."""
        v, number = verbs(), self._qp.qp_num
        if self._state is not QueuePairState.MADE:
            self._qp.modify(v.QPAttr(qp_state=v.c.IBV_QPS_ERR), v.c.IBV_QP_STATE)
        self._state = QueuePairState.CLOSED
        self._device.remove(number)
        self._qp.close()
        self._region.close()
        self._slots.close()
        self._on_ended()


def _nothing() -> None:
    """Nobody waits for its end."""


class RdmaLink(LinkSide):
    """See `zbmd.transport.link.interface.Link`. Made by `rdma.dial` and `rdma.listen`."""

    carrier = "rdma"

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
        """See `Receiver`."""
        if self._closed:
            return
        if self._room_wanted:
            self._room_wanted = False
            self._pump()
        if self._waiters and not self._queue and self._queue_pair.all_arrived:
            self._wake_waiters()

    # -- receiving ---------------------------------------------------------------------------------------

    def on_message(self, word: int, data: bytes) -> None:
        """See `Receiver`."""
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
        """See `Receiver`."""
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
