"""Two bulk machines joined by stripes that are byte buffers: cut anywhere, in any order, without a socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from zbmd.transport.bulk import events
from zbmd.transport.bulk.machine import BulkMachine
from zbmd.transport.bulk.records import BulkError
from zbmd.transport.bulk.stream import PayloadArrived, StripeReader, StripeWriter
from zbmd.transport.errors import PeerLost, ZbmdError
from zbmd.transport.machine import SetTimer
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.secure.protection import RecordMac

REGION_BYTES = 1 << 16
Tamper = Callable[[bytes], bytes]


@dataclass
class Wire:
    """One direction of one stripe."""

    data: bytearray = field(default_factory=bytearray)
    shut: bool = False


@dataclass
class Port:
    """One end of one stripe."""

    reader: StripeReader
    writer: StripeWriter
    into: Wire
    out: Wire
    closed: bool = False
    told_end: bool = False


class BulkEnd:
    """A machine, its memory and its stripes. Performs actions as the data plane does, on byte buffers."""

    def __init__(self, slot: int, *, limits: events.BulkLimits | None = None) -> None:
        self.slot = slot
        self.machine = BulkMachine(peer=f"rank{1 - slot}", limits=limits)
        self.inbox = bytearray(REGION_BYTES)
        self.arena = bytearray(REGION_BYTES)
        self.ports: dict[int, Port] = {}
        self.buffers: dict[int, bytearray] = {}
        self.served: dict[int, memoryview] = {}
        self.finished: dict[int, ZbmdError | None] = {}
        self.published: list[tuple[int, int]] = []
        self.on_publish: Callable[[int, int], None] | None = None
        self.end: events.End | None = None
        self.lost = False
        self.transfers = 0

    @property
    def inbox_handle(self) -> RegionHandle:
        return RegionHandle(slot=self.slot, incarnation=1, offset=0, nbytes=REGION_BYTES, writable=True)

    @property
    def arena_handle(self) -> RegionHandle:
        return RegionHandle(
            slot=self.slot, incarnation=1, offset=REGION_BYTES, nbytes=REGION_BYTES, writable=False
        )

    def handle(self, event: events.BulkEvent) -> None:
        actions = self.machine.handle(event, now_ns=0)
        self.machine.check_invariants()
        for action in actions:
            self._perform(action)

    # -- what a user asks for ------------------------------------------------------------------------

    def put(self, handle: RegionHandle, data: bytes, at: int, *, channel: int, value: int) -> int:
        transfer = self._transfer(bytearray(data))
        self.handle(
            events.PutAsked(
                transfer=transfer, handle=handle, at=at, total=len(data), channel=channel, value=value
            )
        )
        return transfer

    def notify(self, channel: int, value: int) -> int:
        transfer = self._transfer(bytearray())
        self.handle(events.NotifyAsked(transfer=transfer, channel=channel, value=value))
        return transfer

    def get(self, handle: RegionHandle, nbytes: int, at: int) -> int:
        transfer = self._transfer(bytearray(nbytes))
        self.handle(events.GetAsked(transfer=transfer, handle=handle, at=at, total=nbytes))
        return transfer

    def _transfer(self, buffer: bytearray) -> int:
        self.transfers += 1
        self.buffers[self.transfers] = buffer
        return self.transfers

    # -- moving bytes --------------------------------------------------------------------------------

    def send(self, stripe: int, nbytes_max: int) -> int:
        """Let up to `nbytes_max` bytes leave on a stripe; how many have."""
        port = self.ports[stripe]
        parts = port.writer.pending(4)
        data = b"".join(parts)[:nbytes_max]
        if not data or port.closed:
            return 0
        port.out.data += data
        if records := port.writer.sent(len(data)):
            self.handle(events.RecordsSent(stripe=stripe, records=records))
        return len(data)

    def receive(self, stripe: int, nbytes_max: int) -> int:
        """Take up to `nbytes_max` bytes that have come on a stripe; how many were taken."""
        port = self.ports[stripe]
        taken = 0
        while port.into.data and taken < nbytes_max and not port.closed and port.reader.wanted_bytes:
            try:
                want = port.reader.want()
                n = min(len(want), len(port.into.data), nbytes_max - taken)
                want[:n] = port.into.data[:n]
                del port.into.data[:n]
                taken += n
                came = port.reader.filled(n)
            except BulkError as error:
                self.handle(events.StripeFailed(stripe=stripe, error=error))
                break
            if isinstance(came, PayloadArrived):
                self.handle(events.PayloadCame(stripe=stripe, text=came.text))
            elif came is not None:
                self.handle(events.RecordCame(stripe=stripe, record=came))
        if port.into.shut and not port.into.data and not port.told_end and not port.closed:
            port.told_end = True
            self.handle(events.StripeEnded(stripe=stripe, between_records=port.reader.between_records))
        return taken

    # -- actions -------------------------------------------------------------------------------------

    def _perform(self, action: events.BulkAction) -> None:
        match action:
            case events.SendRecord(stripe=stripe, record=record, source=source, text=text):
                payload = memoryview(text) if text else None
                if source is not None:
                    ours = source.of is events.SourceKind.TRANSFER
                    whole = memoryview(self.buffers[source.number]) if ours else self.served[source.number]
                    payload = whole[source.offset : source.offset + source.nbytes]
                self.ports[stripe].writer.add(record, payload)
            case events.ReceivePut(stripe=stripe, handle=handle, offset=offset, nbytes=nbytes):
                if handle != self.inbox_handle:
                    self.handle(events.PutRefused(stripe=stripe, reason="no such region"))
                    self._receive(stripe, nbytes, None)
                else:
                    self._receive(stripe, nbytes, memoryview(self.inbox)[offset : offset + nbytes])
            case events.ReceiveGet(stripe=stripe, transfer=transfer, offset=offset, nbytes=nbytes):
                self._receive(stripe, nbytes, memoryview(self.buffers[transfer])[offset : offset + nbytes])
            case events.ReceiveText(stripe=stripe):
                self.ports[stripe].reader.receive_text()
            case events.Serve(get=get, handle=handle, at=at, total=total):
                if handle != self.arena_handle:
                    self.handle(events.GetRefused(get=get, reason="no such region"))
                else:
                    self.served[get] = memoryview(self.arena)[at : at + total]
                    self.handle(events.GetResolved(get=get))
            case events.Unserve(get=get):
                self.served.pop(get, None)
            case events.Publish(channel=channel, value=value):
                self.published.append((channel, value))
                if self.on_publish is not None:
                    self.on_publish(channel, value)
            case events.Finish(transfer=transfer, error=error):
                assert self.lost or not isinstance(error, PeerLost)
                assert transfer not in self.finished
                self.finished[transfer] = error
            case events.ShutStripe(stripe=stripe):
                self.ports[stripe].out.shut = True
            case events.CloseStripe(stripe=stripe):
                self._close(self.ports[stripe])
            case SetTimer():
                pass
            case events.MarkLost():
                self.lost = True
            case events.End():
                assert self.end is None
                self.end = action
                for stripe, port in self.ports.items():
                    while not port.closed and self.send(stripe, 1 << 30):
                        pass
                    self._close(port)
            case _:
                assert_never(action)

    def _receive(self, stripe: int, nbytes: int, view: memoryview | None) -> None:
        if not nbytes:
            self.handle(events.PayloadCame(stripe=stripe))
        elif view is None:
            self.ports[stripe].reader.receive_nowhere()
        else:
            self.ports[stripe].reader.receive_into(view)

    def _close(self, port: Port) -> None:
        port.closed = True
        port.out.shut = True


class BulkPair:
    """Two ends and the stripes between them. key: None for stripes without a MAC."""

    def __init__(self, stripes: int, *, key: bytes | None, limits: events.BulkLimits | None = None) -> None:
        self.key = key
        self.a = BulkEnd(0, limits=limits)
        self.b = BulkEnd(1, limits=limits)
        for stripe in range(stripes):
            self.open_stripe(stripe)

    def open_stripe(self, stripe: int) -> None:
        there, back = Wire(), Wire()
        for end, into, out, names in ((self.a, back, there, b"ba"), (self.b, there, back, b"ab")):
            macs = [self._mac(stripe, name) for name in names]
            end.ports[stripe] = Port(StripeReader(macs[0]), StripeWriter(macs[1]), into, out)
            end.handle(events.StripeOpened(stripe=stripe))

    def _mac(self, stripe: int, name: int) -> RecordMac | None:
        return None if self.key is None else RecordMac(bytes([stripe, name]) + self.key[2:])

    def run(self) -> None:
        """Until nothing moves."""
        moved = True
        while moved:
            moved = False
            for end in (self.a, self.b):
                for stripe in list(end.ports):
                    moved |= bool(end.send(stripe, 1 << 30))
                    moved |= bool(end.receive(stripe, 1 << 30))
