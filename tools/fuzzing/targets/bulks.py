"""Targets of the bulk stream between hosts: single records, and a peer that sends any, in any order."""

from __future__ import annotations

from collections import deque

import numpy as np

from zbmd.tools.fuzzing.target import Broken, Script, Target, block
from zbmd.transport.bulk import records as br
from zbmd.transport.bulk._fast_path import QuickPuts
from zbmd.transport.bulk.events import (
    BulkAction,
    BulkEvent,
    End,
    GetAsked,
    GetRefused,
    GetResolved,
    NotifyAsked,
    PayloadCame,
    Publish,
    PutRefused,
    ReceiveGet,
    ReceivePut,
    ReceiveText,
    RecordCame,
    RecordsSent,
    SendRecord,
    Serve,
    StripeFailed,
    StripeOpened,
)
from zbmd.transport.bulk.machine import BulkMachine
from zbmd.transport.bulk.records import BulkError
from zbmd.transport.bulk.stream import PayloadArrived, StripeReader
from zbmd.transport.errors import LinkClosed, PeerLost
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native._native import CHANNELS, OFF_END, address_of

RECORDS_MAX = 64
STRIPES = 2
OWN_GETS = 2
REGION = RegionHandle(slot=1, incarnation=3, offset=4096, nbytes=1 << 16, writable=True)
_SEQUENCE = slice(8, 16)
LONG_BYTES = 20_000
LONG_CUT = 50
"""Where it is cut, by 256 bytes."""
_scratch = bytearray(br.FRAGMENT_BYTES_MAX)


def _records() -> tuple[br.Record, ...]:
    def put(transfer: int, offset: int, nbytes: int) -> br.Put:
        return br.Put(
            transfer=transfer, handle=REGION, at=8, total=100, fragment_bytes=64, offset=offset,
            nbytes=nbytes, channel=1, value=transfer + 1,
        )  # fmt: skip

    return (
        put(0, 0, 64),
        put(0, 64, 36),
        put(1, 0, 64),
        br.Notify(transfer=2, channel=0, value=9),
        br.Get(transfer=5, handle=REGION, at=0, total=50, after=0),
        br.Get(transfer=6, handle=REGION, at=0, total=50, after=2),
        br.Data(transfer=0, total=10, fragment_bytes=64, offset=0, nbytes=10),
        br.TransferRefusal(transfer=1, nbytes=4),
        br.PutRefusal(transfer=0, nbytes=4),
        br.Ack(puts=1),
        br.Error(nbytes=5),
        br.Goodbye(),
    )


def _record_seeds() -> tuple[bytes, ...]:
    return tuple(br.encode(record, 0) for record in _records())


def _record(data: bytes) -> None:
    header = data[: br.HEADER_BYTES].ljust(br.HEADER_BYTES, b"\0")
    if br.encode(br.decode(header, 0), 0) != header:
        raise Broken("a record has two encodings")


def _said(*records: br.Record) -> bytes:
    """As the peer sends them: stripe, header, and a payload of the right length."""
    return b"".join(
        bytes([number % STRIPES]) + block(br.encode(record, 0) + b"x" * record.nbytes)
        for number, record in enumerate(records)
    )


def _peer_seeds() -> tuple[bytes, ...]:
    records = _records()
    small = br.Put(
        transfer=1, handle=REGION, at=8, total=40, fragment_bytes=64, offset=0, nbytes=40, channel=1, value=2
    )
    quick = _said(br.Notify(transfer=0, channel=0, value=1), small, br.Ack(puts=1), br.Ack(puts=2))
    return (quick, _said(*records), _said(*records[:5]), _said(*records[3:9]), _said(*reversed(records[:8])))


def _quick_seeds() -> tuple[bytes, ...]:
    """Also one whose payload is received in its region, as it comes in two parts."""
    long = br.Put(
        transfer=0, handle=REGION, at=8, total=LONG_BYTES, fragment_bytes=1 << 15, offset=0,
        nbytes=LONG_BYTES, channel=1, value=1,
    )  # fmt: skip
    return (*_peer_seeds(), LONG_CUT.to_bytes(1) + _said(long)[1:])


class _Driver:
    """Does what the machine says, with readers that are fed by a script."""

    def __init__(self) -> None:
        self.machine = BulkMachine(peer="enemy")
        self.readers = [StripeReader(None) for _ in range(STRIPES)]
        self.sequences = [0] * STRIPES
        self.ends: list[End] = []
        for stripe in range(STRIPES):
            self.tell(StripeOpened(stripe=stripe))
        for transfer in range(OWN_GETS):
            self.tell(GetAsked(transfer=transfer, handle=REGION, at=0, total=10))
        for transfer in range(OWN_GETS, OWN_GETS + 2):
            self.tell(NotifyAsked(transfer=transfer, channel=0, value=transfer))

    def tell(self, event: BulkEvent) -> None:
        waiting = deque([event])
        while waiting:
            actions = self.machine.handle(waiting.popleft(), now_ns=0)
            self.machine.check_invariants()
            for action in actions:
                waiting += self._perform(action)

    def _perform(self, action: BulkAction) -> list[BulkEvent]:
        match action:
            case SendRecord(stripe=stripe):
                return [RecordsSent(stripe=stripe, records=1)]
            case Serve(get=get, handle=handle):
                known = handle == REGION
                return [GetResolved(get=get) if known else GetRefused(get=get, reason="no such region")]
            case ReceivePut(stripe=stripe, handle=handle, nbytes=nbytes):
                if handle == REGION:
                    return self._destined(stripe, nbytes)
                refused = PutRefused(stripe=stripe, reason="no such region")
                if nbytes == 0:
                    return [refused, PayloadCame(stripe=stripe, text="")]
                self.readers[stripe].receive_nowhere()
                return [refused]
            case ReceiveGet(stripe=stripe, nbytes=nbytes):
                return self._destined(stripe, nbytes)
            case ReceiveText(stripe=stripe):
                self.readers[stripe].receive_text()
            case Publish(channel=channel):
                if not 0 <= channel < CHANNELS:
                    raise Broken(f"channel {channel} was published")
            case End():
                self.ends.append(action)
            case _:
                pass
        return []

    def _destined(self, stripe: int, nbytes: int) -> list[BulkEvent]:
        if nbytes == 0:
            return [PayloadCame(stripe=stripe, text="")]
        self.readers[stripe].receive_into(memoryview(_scratch)[:nbytes])
        return []

    def hear(self, stripe: int, data: bytes) -> None:
        """Bytes of a stripe, as they come from its socket."""
        reader, rest = self.readers[stripe], memoryview(data)
        while rest and not self.ends and reader.wanted_bytes:
            into = reader.want()
            step = min(len(into), len(rest))
            into[:step] = rest[:step]
            rest = rest[step:]
            try:
                came = reader.filled(step)
            except BulkError as error:
                self.tell(StripeFailed(stripe=stripe, error=error))
                return
            if isinstance(came, PayloadArrived):
                self.tell(PayloadCame(stripe=stripe, text=came.text))
            elif came is not None:
                self.sequences[stripe] += 1
                self.tell(RecordCame(stripe=stripe, record=came))


def _peer(data: bytes) -> None:
    """Any records on any stripe; their numbers are put right, or the first wrong one would be the last."""
    script, driver = Script(data), _Driver()
    for _ in range(RECORDS_MAX):
        if script.ended or driver.ends:
            break
        stripe, record = script.number(1) % STRIPES, bytearray(script.block())
        if len(record) >= br.HEADER_BYTES and not driver.readers[stripe].in_payload:
            record[_SEQUENCE] = driver.sequences[stripe].to_bytes(8, "little")
        driver.hear(stripe, bytes(record))
    if len(driver.ends) > 1:
        raise Broken(f"it ended {len(driver.ends)} times")
    for end in driver.ends:
        if not isinstance(end.error, BulkError | PeerLost | LinkClosed | None):
            raise end.error


class _Quick:
    """`QuickPuts` over memory of its own, and nothing that peers may write but `REGION`."""

    version = 0

    def __init__(self) -> None:
        self._own = np.zeros(OFF_END, np.uint8)
        self._memory = bytearray(REGION.nbytes)
        self.puts = QuickPuts(
            seal_sent=None,
            seal_come=None,
            resolve=self._resolve,
            versions=self,
            own=address_of(self._own),
            slot=REGION.slot,
        )
        self.puts.begin(0, 0, OWN_GETS, 0, 1, 0, 0)

    def _resolve(self, slot: int, incarnation: int, offset: int, nbytes: int) -> memoryview | None:
        named = RegionHandle(slot=slot, incarnation=incarnation, offset=offset, nbytes=nbytes, writable=True)
        return memoryview(self._memory) if named == REGION else None

    def hear(self, record: bytearray, cut: int) -> None:
        """One record, its number put right, in two parts, the first of which has so many bytes."""
        puts, number = self.puts, self.puts.come_records
        record[_SEQUENCE] = number.to_bytes(8, "little")
        given, goes_on = 0, True
        while goes_on and given < len(record):
            room = puts.room[0]  # of two, the first is filled first
            end = min(len(record), given + len(room), cut if given < cut else len(record))
            room[: end - given] = record[given:end]
            goes_on = puts.came(end - given)
            given = end
        taken = puts.come_records - number
        if taken and not isinstance(
            br.decode(record[: br.HEADER_BYTES], number), br.Put | br.Notify | br.Ack
        ):
            raise Broken("it has taken a record that it does not know")
        rest = puts.end()
        if not taken and rest != bytes(record[:given]):
            raise Broken("what it has left is not what came")
        puts.begin(puts.sent_records, puts.come_records, OWN_GETS, puts.acked, 1, puts.published, puts.told)


def _quick(data: bytes) -> None:
    """What the shortcut takes the decoder takes, too; the rest it leaves as it came."""
    script, quick = Script(data), _Quick()
    for _ in range(RECORDS_MAX):
        if script.ended:
            break
        cut = script.number(1) << 8
        record = bytearray(script.block())
        if len(record) >= br.HEADER_BYTES:
            quick.hear(record, cut)


TARGETS = (
    Target(
        name="bulk.record",
        what="the header of a bulk record",
        allowed=(BulkError,),
        seeds=_record_seeds,
        run=_record,
    ),
    Target(
        name="bulk.peer",
        what="a peer's records on several stripes, in any order",
        allowed=(),
        seeds=_peer_seeds,
        run=_peer,
    ),
    Target(
        name="bulk.quick",
        what="a peer's records, past the machine",
        allowed=(),
        seeds=_quick_seeds,
        run=_quick,
    ),
)
