"""The data plane's end of a peer: performs the bulk machine's actions on sockets, regions and cells.

Any thread asks; the data-plane thread alone drives the machine and touches sockets and memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, assert_never

import structlog

from zbmd.transport.bulk import events
from zbmd.transport.bulk._fast_path import QUICK_BYTES_MAX
from zbmd.transport.bulk.fast_path import QuickStripe
from zbmd.transport.bulk.machine import BulkMachine, BulkState
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.bulk.records import Ack, BulkError, Error
from zbmd.transport.bulk.stream import PayloadArrived
from zbmd.transport.bulk.stripe_io import (
    SCRATCH_BYTES,
    SLOW_BYTES_PER_S,
    ReadResult,
    Stripe,
    StripeSocket,
    StripeUse,
    buffer_bytes_max,
    read_work,
    round_trip_us,
    stripes_for,
)
from zbmd.transport.errors import (
    LinkClosed,
    LinkFull,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.memory.region import CheckedRegion, RegionHandle, require_owner
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.transfer import DONE, Transfer
from zbmd.transport.native import _native

TURN_CALLS_MAX: Final = 16
"""Receives or sends on one stripe before others have their turn."""
LINGER_NS: Final = 1_000_000_000
"""Time to go on reading after an error was sent: closing earlier would discard it."""

log: Final = structlog.stdlib.get_logger("zbmd.transport.bulk")


class BulkPeer:
    """One-sided transfers to and from one incarnation of a peer.

    segment: ours, whose cells and lost mask report on the peer, and whose regions the peer may use. on_ended:
    called once from the plane's thread, when the connection has ended. adapts: use as many stripes as the
    path needs (see `stripe_io`), not all.

    It has as many stripes as are given to it, at any time, and waits for the first. Once `ended` is done it
    touches no region, cell or buffer again. Its methods may be called from any thread. Raises
    `LocalProtocolError` if the slot is out of range or the plane is closed.
    """

    def __init__(
        self,
        plane: DataPlane,
        info: events.BulkPeerInfo,
        *,
        segment: Segment,
        limits: events.BulkLimits | None = None,
        on_ended: events.OnEnded | None = None,
        adapts: bool = False,
    ) -> None:
        if not 0 <= info.slot < _native.MAX_SLOTS:
            raise LocalProtocolError(f"slot {info.slot} is not below {_native.MAX_SLOTS}")
        limits = limits or events.BulkLimits()
        self.info = info
        self.ended = Transfer()
        """Done when the connection has ended and nothing is touched any more; raises why, if not orderly."""
        self.plane = plane
        """The data plane, which moves the bytes."""
        self._own = segment.mapping
        self._regions = segment.regions
        self._limits = limits
        self._on_ended = on_ended
        self._adapts = adapts
        self._lock = threading.Lock()
        self._next_transfer = 0
        self._under_way = 0
        self._error: ZbmdError | None = None
        """The error that new transfers raise."""
        # What follows belongs to the data-plane thread.
        self._machine = BulkMachine(peer=info.name, limits=limits)
        self._events: deque[events.BulkEvent] = deque()
        """Events for the machine; the first is being handled."""
        self._stripes: dict[int, StripeSocket] = {}
        self._buffers: dict[int, tuple[Transfer, memoryview]] = {}
        self._served: dict[int, memoryview] = {}
        self._landing: dict[int, int] = {}
        """Stripe to the get of ours whose answer is what it receives now, or received last."""
        self._unsent: dict[int, StripeSocket] = {}
        """Stripes that have something to send."""
        self._prompt = False
        """Some of it is more than an acknowledgement."""
        self._quick = QuickStripe(self._machine, self._regions, self._own, info.slot)
        self._use: StripeUse | None = None
        self._lingering = False
        self._error_sent = False
        plane.add(self)

    # -- any thread ----------------------------------------------------------------------------------

    @property
    def one_sided(self) -> bool:
        """Our memory is reached by us: what is not lent any more is refused."""
        return False

    def open_region(self, handle: RegionHandle) -> BulkRegion:
        """The peer's region behind `handle`. Raises `RemoteProtocolError` if it is forged or stale."""
        require_owner(handle, slot=self.info.slot, incarnation=self.info.incarnation)
        return BulkRegion(self, handle)

    def add_stripe(self, stripe: Stripe) -> None:
        """Use one more connection; it is ours now. Closed at once if we have ended."""
        if not self.plane.call(lambda: self._open_stripe(stripe)):
            stripe.sock.close()

    def close(self) -> None:
        """Finish what is under way, say goodbye and end, within `BulkLimits.close_ns`. Idempotent."""
        self._refuse_new(LinkClosed(f"the bulk connection with {self.info.name} is closed"))
        self.plane.call(lambda: self._handle(events.CloseAsked()))

    def abort(self, error: ZbmdError) -> None:
        """End at once, with `error` for all that is under way: the peer is known to be gone. Idempotent."""
        self._refuse_new(error)
        self.plane.call(lambda: self.cut(error))

    def put(
        self, handle: RegionHandle, src: memoryview, at: int, *, channel: int, value: int, owner: object
    ) -> Transfer:
        """Put `src`, flat bytes of `owner`, which is kept alive. What can be checked has been."""
        if self.put_now(handle, src, at, channel=channel, value=value):
            return DONE
        return self._ask(
            lambda n: events.PutAsked(
                transfer=n, handle=handle, at=at, total=len(src), channel=channel, value=value
            ),
            src,
            owner,
        )

    def put_now(self, handle: RegionHandle, src: memoryview, at: int, *, channel: int, value: int) -> bool:
        """Put `src` past the machine: whether that was done. Then it may change at once."""
        return len(src) <= QUICK_BYTES_MAX and self.plane.at_once(
            lambda: self._go_quickly(lambda stripe: stripe.put(handle, src, at, channel, value))
        )

    def get(self, handle: RegionHandle, into: memoryview, at: int, *, owner: object) -> Transfer:
        """Get into `into`, flat bytes of `owner`, which is kept alive. What can be checked has been."""
        return self._ask(
            lambda n: events.GetAsked(transfer=n, handle=handle, at=at, total=len(into)), into, owner
        )

    def let_go(self, transfers: Iterable[Transfer]) -> None:
        """Once this returns, `transfers` touch their buffers no more, nor does what the peer is being served.

        Puts and answers to the peer's gets go out as they are now, from copies; the answers to gets of ours
        come to nothing. For who has to give up, and cannot wait for the peer.
        """
        given_up, gone = frozenset(transfers), threading.Event()

        def on_thread() -> None:
            try:
                self._let_go(given_up)
            finally:
                gone.set()

        if self.plane.call(on_thread):
            gone.wait()

    def notify(self, channel: int, value: int) -> None:
        """Set the peer's cell of (our slot, channel) behind all puts before."""
        if self.plane.at_once(lambda: self._go_quickly(lambda stripe: stripe.notify(channel, value))):
            return
        self._ask(
            lambda n: events.NotifyAsked(transfer=n, channel=channel, value=value), memoryview(b""), None
        )

    def settled(self) -> Transfer:
        """Done once all that was put and notified before has arrived; raises what ends the connection."""
        # A cell only grows: this notification changes none.
        return self._ask(lambda n: events.NotifyAsked(transfer=n, channel=0, value=0), memoryview(b""), None)

    def _ask(
        self,
        event: Callable[[int], events.PutAsked | events.GetAsked | events.NotifyAsked],
        view: memoryview,
        owner: object,
    ) -> Transfer:
        transfer = Transfer(owner, view)
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._under_way >= self._limits.transfers_max:
                raise LinkFull(
                    f"{self._under_way} transfers with {self.info.name} are under way: wait for some"
                )
            self._under_way += 1
            self._next_transfer += 1
            asked, number = event(self._next_transfer), self._next_transfer
            # Under the lock, so that numbers and order are one.
            if not self.plane.call(lambda: self._start(number, asked, transfer, view)):
                raise LinkClosed("the data plane of this process is closed")
        return transfer

    def _refuse_new(self, error: ZbmdError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    # -- the data-plane thread -----------------------------------------------------------------------

    def _go_quickly(self, send: Callable[[QuickStripe], bool | None]) -> bool:
        """Send something past the machine, if it is at rest; whether that was done."""
        quick = self._quick
        if self._events or self._error is not None:
            return False
        if quick.stripe < 0:
            self.flush()  # acknowledgements that are held back are all that may be in the way
            if not quick.begin(self._stripes):
                return False
        whole = send(quick)
        if whole is None:
            return False
        self._sent_quickly(whole=whole)
        return True

    def _sent_quickly(self, *, whole: bool) -> None:
        self.plane.check_silence_of(self)
        self.plane.flushed(self)
        if whole and self._quick.owes:
            self.plane.flush_later(self)  # it came while we waited to send
        if not whole:
            number = self._quick.stripe
            self._leave_quick()
            self._unsent[number] = self._stripes[number]
            self._prompt = True
            self.plane.flush_soon(self)

    def _leave_quick(self) -> None:
        """Return from the fast path to the machine."""
        number = self._quick.stripe
        if number >= 0:
            self._handle(self._quick.end())
            if self._stripes[number].has_surplus:
                self.plane.again(self, number)

    def _start(self, number: int, event: events.BulkEvent, transfer: Transfer, view: memoryview) -> None:
        self._buffers[number] = transfer, view
        self._handle(event)

    def _let_go(self, transfers: frozenset[Transfer]) -> None:
        for number, (transfer, view) in self._buffers.items():
            if transfer in transfers:
                self._buffers[number] = transfer, memoryview(bytearray(view))
        for stripe, number in self._landing.items():
            if number in self._buffers and self._buffers[number][0] in transfers:
                self._stripes[stripe].reader.redirect()
        self._served = {get: memoryview(bytes(view)) for get, view in self._served.items()}
        for io in self._stripes.values():
            io.writer.let_go()

    def _open_stripe(self, stripe: Stripe) -> None:
        number = stripe.session.stripe
        if self._machine.state is BulkState.ENDED or number in self._stripes:
            stripe.sock.close()
            return
        io = self._stripes[number] = StripeSocket(stripe, self.info.name, self.plane.tag_helper)
        self.plane.watch(io.sock, self, number)
        if self._adapts and self._use is None:
            at_first = stripes_for(round_trip_us(io.sock), buffer_bytes_max(), SLOW_BYTES_PER_S)
            self._use = StripeUse(at_first)
            self._handle(events.StripesUsed(count=at_first))
        self._handle(events.StripeOpened(stripe=number))
        if stripe.surplus:
            self.readable(number)

    def readable(self, number: int) -> None:
        """Bytes may have come on a stripe."""
        io = self._stripes.get(number)
        if io is None or io.paused:
            return
        if number == self._quick.stripe or (self.plane.is_driven and self._quick_again(number)):
            if self._quick.receive():
                if self._quick.owes:
                    self.plane.flush_later(self)
                return
            self._leave_quick()
        if self._lingering:
            self._discard(io)
            return
        for _ in range(TURN_CALLS_MAX):
            try:
                came = io.receive()
            except (BulkError, PeerLost) as error:
                self._handle(events.StripeFailed(stripe=number, error=error))
                return
            match came:
                case ReadResult.MORE:
                    continue
                case ReadResult.BLOCKED:
                    return
                case ReadResult.ENDED:
                    self.plane.want_read(io.sock, wanted=False)
                    self._handle(events.StripeEnded(stripe=number, between_records=io.reader.between_records))
                    return
                case PayloadArrived():
                    self._handle(events.PayloadCame(stripe=number, text=came.text))
                case _:
                    self._handle(events.RecordCame(stripe=number, record=came))
            if self._stripes.get(number) is not io or self._lingering:
                return
            if not io.reader.wanted_bytes:
                # What comes next has no place yet. Unread, it slows the peer down.
                io.paused = True
                self.plane.want_read(io.sock, wanted=False)
                return
        self.plane.again(self, number)

    def flush(self) -> None:
        """Send on every stripe that has something to send, as far as sockets take it."""
        self._prompt = False
        if self._quick.stripe >= 0 and self._quick.owes:
            self._sent_quickly(whole=self._quick.acknowledge())
        while self._unsent:
            number, io = self._unsent.popitem()
            self.writable(number, io)

    def writable(self, number: int, io: StripeSocket | None = None) -> None:
        """A stripe's socket may take bytes."""
        io = io or self._stripes.get(number)
        if io is None:
            return
        for _ in range(TURN_CALLS_MAX):
            if io.writer.idle:
                self.plane.want_write(io.sock, wanted=False)
                return
            try:
                records = io.send()
            except (BulkError, PeerLost) as error:
                self._handle(events.StripeFailed(stripe=number, error=error))
                return
            if records is None:
                break
            self.plane.check_silence_of(self)
            if records:
                self._handle(events.RecordsSent(stripe=number, records=records))
            if self._stripes.get(number) is not io:
                return
        self.plane.want_write(io.sock, wanted=True)

    def check_stripes(self) -> None:
        """Use more stripes if those in use are too few for the path."""
        if self._use is None or self._lingering:
            return
        used = self._use.count
        count, reason = self._use.look({number: read_work(io.sock) for number, io in self._stripes.items()})
        if count != used:
            log.info("more stripes are used", peer=self.info.name, stripes=count, reason=reason.value)
            self._handle(events.StripesUsed(count=count))

    def check_silence(self) -> bool:
        """Give the peer up if its host is silent; whether there is something to check again."""
        for number, io in list(self._stripes.items()):
            if io.owed and not self._lingering and io.is_silent(self._limits.silent_ms):
                reason = f"its host has acknowledged nothing for {self._limits.silent_ms} ms"
                self._handle(events.StripeFailed(stripe=number, error=PeerLost(self.info.name, reason)))
                return False
        return any(io.owed for io in self._stripes.values())

    def cut(self, error: ZbmdError) -> None:
        """End now, without a word to the peer. On the thread, and never from within an action."""
        self._events.clear()  # nothing, unless a bug of ours has broken off
        self._handle(events.StripeFailed(stripe=-1, error=error))
        self._close_stripes()

    def timer_fired(self) -> None:
        """The time asked for has come."""
        if self._lingering:
            self._close_stripes()
        else:
            self._handle(TimerFired())

    def _handle(self, event: events.BulkEvent) -> None:
        if self._quick.stripe >= 0:
            self._leave_quick()
        self._events.append(event)
        if len(self._events) > 1:
            return  # by an action of the event before, all of whose actions come first
        while self._events:
            for action in self._machine.handle(self._events[0], now_ns=_native.now_ns()):
                self._perform(action)
            self._events.popleft()
        if self._prompt:
            self.plane.flush_soon(self)
        elif self._unsent:
            self.plane.flush_later(self)

    def _perform(self, action: events.BulkAction) -> None:
        match action:
            case events.SendRecord():
                self._send(action)
            case events.ReceivePut():
                self._receive_put(action)
            case events.ReceiveGet(stripe=stripe, transfer=transfer, offset=offset, nbytes=nbytes):
                self._landing[stripe] = transfer
                _, view = self._buffers[transfer]
                self._receive_into(stripe, nbytes, view[offset : offset + nbytes])
            case events.ReceiveText(stripe=stripe):
                self._landing.pop(stripe, None)
                self._stripes[stripe].reader.receive_text()
            case events.Serve():
                self._serve(action)
            case events.Unserve(get=get):
                self._served.pop(get, None)
            case events.Publish(channel=channel, value=value):
                # A cell only grows. We alone write those of this slot.
                if value > _native.load_cell(self._own.address, self.info.slot, channel):
                    _native.notify(self._own.address, self.info.slot, channel, value)
            case events.Finish(transfer=number, error=error):
                self._finish(number, error)
            case events.ShutStripe(stripe=stripe):
                self._stripes[stripe].shut()
            case events.CloseStripe(stripe=stripe):
                self._close_stripe(stripe)
            case SetTimer(at_ns=at_ns):
                self.plane.set_timer(self, at_ns)
            case events.MarkLost():
                _native.set_lost(self._own.address, self.info.slot)
            case events.End(error=error):
                self._end(error)
            case _:
                assert_never(action)

    def _send(self, action: events.SendRecord) -> None:
        io = self._stripes[action.stripe]
        payload = memoryview(action.text) if action.text else None
        if (source := action.source) is not None:
            ours = source.of is events.SourceKind.TRANSFER
            whole = self._buffers[source.number][1] if ours else self._served[source.number]
            payload = whole[source.offset : source.offset + source.nbytes]
        self._error_sent |= isinstance(action.record, Error)
        self._prompt |= not isinstance(action.record, Ack)
        io.writer.add(action.record, payload)
        self._unsent[action.stripe] = io

    def _receive_put(self, action: events.ReceivePut) -> None:
        self._landing.pop(action.stripe, None)
        try:
            view = self._regions.resolve(action.handle, action.offset, action.nbytes, write=True)
        except RemoteProtocolError as error:
            self._handle(events.PutRefused(stripe=action.stripe, reason=str(error)))
            view = None
        self._receive_into(action.stripe, action.nbytes, view)

    def _receive_into(self, stripe: int, nbytes: int, view: memoryview | None) -> None:
        if not nbytes:
            self._handle(events.PayloadCame(stripe=stripe))
            return
        io = self._stripes[stripe]
        if view is None:
            io.reader.receive_nowhere()
        else:
            io.reader.receive_into(view)
        if io.paused:
            io.paused = False
            self.plane.want_read(io.sock, wanted=True)
            self.plane.again(self, stripe)

    def _serve(self, action: events.Serve) -> None:
        try:
            view = self._regions.resolve(action.handle, action.at, action.total, write=False)
        except RemoteProtocolError as error:
            self._handle(events.GetRefused(get=action.get, reason=str(error)))
        else:
            self._served[action.get] = view
            self._handle(events.GetResolved(get=action.get))

    def _finish(self, number: int, error: ZbmdError | None) -> None:
        transfer, _ = self._buffers.pop(number)
        with self._lock:
            self._under_way -= 1
        transfer.finish(error)

    # -- the end -------------------------------------------------------------------------------------

    def _end(self, error: ZbmdError | None) -> None:
        self._served.clear()
        # We alone write on its behalf, and write no more.
        self._regions.writer_gone(self.info.slot)
        self._refuse_new(self._machine.end_error)
        if self._error_sent and self._stripes:
            self._lingering = True
            for io in self._stripes.values():
                io.paused = False
                self.plane.want_read(io.sock, wanted=True)
            self.plane.set_timer(self, _native.now_ns() + LINGER_NS)
        else:
            self._close_stripes()
        self.ended.finish(error)
        if self._on_ended is not None:
            self._on_ended(error)
        if error is not None:
            log.warning("bulk connection ended", peer=self.info.name, reason=str(error))

    def _quick_again(self, number: int) -> bool:
        """Whether what comes on this stripe may go past the machine from now on."""
        if self._lingering or self._quick.stripe >= 0:  # then on another stripe, which goes on
            return False
        return self._quick.begin(self._stripes) and self._quick.stripe == number

    def _discard(self, io: StripeSocket) -> None:
        if not io.discard(bytearray(SCRATCH_BYTES)):
            self._close_stripes()

    def _close_stripes(self) -> None:
        for number in list(self._stripes):
            self._close_stripe(number)
        self._lingering = False
        self.plane.forget(self)

    def _close_stripe(self, number: int) -> None:
        io = self._stripes.pop(number)
        self._landing.pop(number, None)
        self._unsent.pop(number, None)
        self.plane.unwatch(io.sock)
        io.close()


class BulkRegion(CheckedRegion):
    """A `RemoteRegion` of a peer on another host, reached over TCP. Made by `BulkPeer.open_region`.

    A call only hands the transfer to the data-plane thread. Raises `LinkFull` if too many are in flight.
    """

    def __init__(self, peer: BulkPeer, handle: RegionHandle) -> None:
        super().__init__(handle)
        self._peer = peer

    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        return self._peer.put(self._handle, view, offset, channel=channel, value=value, owner=owner)

    def _put_now(self, view: memoryview, offset: int, channel: int, value: int) -> bool:
        return self._peer.put_now(self._handle, view, offset, channel=channel, value=value)

    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        return self._peer.get(self._handle, view, offset, owner=owner)

    def _notify(self, channel: int, value: int) -> None:
        self._peer.notify(channel, value)
