"""Targets of links: a peer that holds the cookie and then does anything, at a listener and in a bulk stream.

The listener is real. The peer is this process too, but it talks to the listener only as another process can:
over the socket, by the descriptors that it hands over, and in the memory that both have mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import numpy as np

from zbmd.tools.fuzzing.target import Broken, Script, block, target
from zbmd.tools.fuzzing.targets import wires
from zbmd.tools.fuzzing.targets.memories import segment_file
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
from zbmd.transport.errors import LinkClosed, LinkFull, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.frames import HEADER_BYTES
from zbmd.transport.handshake.hello import Accept, BytesReceived, Opened, Reject, SendBytes
from zbmd.transport.handshake.hello import HelloMachine as Hello
from zbmd.transport.identity import Identity, Side
from zbmd.transport.link.interface import Link, LinkLimits
from zbmd.transport.memory.frame_loans import BLOCK_BYTES_MIN
from zbmd.transport.memory.memfd import PAGE_BYTES, create_memfd
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native
from zbmd.transport.native._native import CHANNELS, OFF_END, RING_HEADER_BYTES, Mapping, address_of
from zbmd.transport.shm.attach import MESSAGE_BYTES_MAX, AttachOffer
from zbmd.transport.shm.connect import Endpoint, ShmListener, dial, listen
from zbmd.transport.shm.link import link_memory_bytes

# ---- the bulk stream between hosts: single records, and a peer that sends any, in any order

RECORDS_MAX = 64
STRIPES = 2
OWN_GETS = 2
REGION = RegionHandle(slot=1, incarnation=3, offset=4096, nbytes=1 << 16, writable=True)
_SEQUENCE = slice(8, 16)
LONG_BYTES = 20_000
LONG_CUT = 50
"""Its cut, in units of 256 bytes."""
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


@target("bulk.record", "the header of a bulk record", _record_seeds, BulkError)
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


@target("bulk.peer", "a peer's records on several stripes, in any order", _peer_seeds)
def _peer(data: bytes) -> None:
    """Any records on any stripe; their numbers are corrected, or the first wrong one would be the last."""
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
        """One record, its number corrected, in two parts, the first of which has so many bytes."""
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


@target("bulk.quick", "a peer's records, past the machine", _quick_seeds)
def _quick(data: bytes) -> None:
    """The decoder takes what the fast path takes, too; the rest it leaves as it came."""
    script, quick = Script(data), _Quick()
    for _ in range(RECORDS_MAX):
        if script.ended:
            break
        cut = script.number(1) << 8
        record = bytearray(script.block())
        if len(record) >= br.HEADER_BYTES:
            quick.hear(record, cut)


RING_BYTES = 1 << 12
STEPS_MAX = 200
FDS_MAX = 8
MARK = 1 << 31
"""In a frame's length: its payload is lent."""
RECORDS = ((_native.OFF_END + PAGE_BYTES, 0), (_native.OFF_END + PAGE_BYTES, 16), (0, 1), ((1 << 64) - 8, 2))
ARENA_BYTES = 4 << 20
LENT = bytes(BLOCK_BYTES_MIN)
"""So large that it is lent."""
PATIENCE_NS = 5_000_000_000
PATIENCE_S = PATIENCE_NS / 1e9

_addresses = itertools.count()


def _endpoint(name: str, segment: Segment | None = None) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=3, job=wires.JOB)
    limits = LinkLimits(ring_bytes=RING_BYTES, queue_bytes_max=1 << 18, queue_frames_max=64)
    return Endpoint(identity=identity, cookie=wires.COOKIE, limits=limits, segment=segment)


class _Ours:
    """Our side: a listener, the links that it makes, and all that goes wrong on the loop."""

    def __init__(self) -> None:
        self.address = f"zbmd-fuzz-{os.getpid()}-{next(_addresses)}"
        self.trouble: list[dict[str, Any]] = []
        self.ends: list[ZbmdError | None] = []
        self.frames = 0
        self.made: asyncio.Queue[Link] = asyncio.Queue()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.trouble.append(context))
        self.segment = Segment.create(slot=0, incarnation=3, arena_bytes=ARENA_BYTES, inbox_bytes=0)
        self.listener: ShmListener = listen(
            self.address, self._on_link, _endpoint("node", self.segment), timeout_ns=PATIENCE_NS
        )
        self.ended = asyncio.Event()

    def _on_link(self, link: Link) -> None:
        link.on_frame = self._on_frame
        link.on_closed = self._on_closed
        self.made.put_nowait(link)

    def _on_frame(self, header: object, payload: memoryview) -> None:
        self.frames += 1

    def _on_closed(self, error: ZbmdError | None) -> None:
        self.ends.append(error)
        self.ended.set()

    async def close(self) -> None:
        """Our listener must still welcome others; then nothing may be left, and nothing have gone wrong."""
        link = await dial(self.address, _endpoint("friend"))
        link.close()
        self.listener.close()
        await self.listener.wait_closed()
        while not self.made.empty():
            self.made.get_nowait().close()
        await asyncio.sleep(0)
        self.segment.arena.check_invariants()
        self.segment.close()
        for context in self.trouble:
            raise context.get("exception") or Broken(str(context["message"]))
        for error in self.ends:
            if not isinstance(error, RemoteProtocolError | PeerLost | None):
                raise error


@contextlib.asynccontextmanager
async def _enemy(address: str) -> AsyncGenerator[socket.socket]:
    """A connection of somebody who has said a good hello."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(b"\0" + address.encode())
        await _say_hello(sock)
        yield sock
    finally:
        sock.close()


async def _say_hello(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    machine = Hello(
        side=Side.DIALER,
        identity=_endpoint("enemy").identity,
        cookie=wires.COOKIE,
        nonce=os.urandom(32),
        deadline_ns=1 << 62,
    )
    actions = machine.handle(Opened(peer_uid=os.getuid()), now_ns=0)
    while True:
        for action in actions:
            match action:
                case SendBytes(data=data):
                    sock.send(data)
                case Accept():
                    return
                case Reject(error=error):
                    raise error
                case _:
                    pass
        actions = machine.handle(BytesReceived(data=await loop.sock_recv(sock, 1 << 16)), now_ns=0)


# ---- what is handed over


def _eventfd(flags: int) -> int:
    return os.eventfd(0, flags | os.EFD_CLOEXEC)


def _bare_memory(nbytes: int) -> int:
    fd = os.memfd_create("zbmd-fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


def _segment_of(slot: int) -> int:
    header = segment_file(slot, 3)
    fd = create_memfd("zbmd-fuzz", int.from_bytes(header[-8:], "little") * os.sysconf("SC_PAGESIZE"))
    os.pwrite(fd, header[:-8], 0)
    return fd


DESCRIPTORS: tuple[Callable[[], int], ...] = (
    lambda: create_memfd("zbmd-fuzz", link_memory_bytes(RING_BYTES)),
    lambda: _eventfd(os.EFD_NONBLOCK),
    lambda: _segment_of(1),
    lambda: _eventfd(0),
    lambda: _eventfd(os.EFD_NONBLOCK | os.EFD_SEMAPHORE),
    lambda: _bare_memory(link_memory_bytes(RING_BYTES)),
    lambda: _bare_memory(1 << 50),
    lambda: create_memfd("zbmd-fuzz", 4096),
    lambda: os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC),
    lambda: os.open("/", os.O_PATH | os.O_CLOEXEC),
)


def _offers() -> tuple[bytes, ...]:
    encode = msgspec.msgpack.encode
    good, bare = AttachOffer(ring_bytes=RING_BYTES, slot=1), AttachOffer(ring_bytes=RING_BYTES, slot=None)
    return (
        b"\4\0\1\1\2" + encode(good),
        b"\3\0\1\1" + encode(bare),
        b"\3\0\3\1" + encode(bare),
        b"\4\5\1\1\6" + encode(good),
    )


@target("link.handover", "an offer with its descriptors, at a real listener", _offers, bytes_per_byte=4096)
def _handover(data: bytes) -> None:
    """A count, which descriptors, and the offer: our listener takes it, or ends this connection alone."""

    async def main() -> None:
        script = Script(data)
        ours = _Ours()
        fds = [DESCRIPTORS[kind % len(DESCRIPTORS)]() for kind in script.take(script.number(1) % FDS_MAX)]
        try:
            async with _enemy(ours.address) as sock:
                offer = script.rest()[: 2 * MESSAGE_BYTES_MAX] or b"\0"
                socket.send_fds(sock, [offer], fds)
                with contextlib.suppress(ConnectionResetError):
                    async with asyncio.timeout(PATIENCE_S):
                        await asyncio.get_running_loop().sock_recv(sock, 1024)
        finally:
            for fd in fds:
                os.close(fd)
        await ours.close()

    asyncio.run(main())


# ---- what is done with a link that stands


def _deeds() -> tuple[bytes, ...]:
    frame = wires.frame(b"payload")
    wire = len(frame).to_bytes(4, "little") + frame
    good = b"\0" + block(wire)
    return (
        good * 3,
        good + b"\2\1\6\3" + good,
        good + b"\4\1\1",
        b"\1" + (0).to_bytes(2, "little") + (1 << 20).to_bytes(8, "little") + b"\2",
        b"\0" + block((1 << 21).to_bytes(4, "little")) + b"\2",
        b"\5\5\5\7" + good,
        b"\0" + block(wire + bytes(4)) + b"\3\5",
        *(b"\0" + block(_marked(offset, number)) + b"\3\5" for offset, number in RECORDS),
    )


def _marked(offset: int, number: int) -> bytes:
    """A frame that says where in our peer's arena its payload lies."""
    lying = wires.frame(bytes(64))[:HEADER_BYTES] + struct.pack("<QI", offset, number)
    return (len(lying) | MARK).to_bytes(4, "little") + lying


class _Deeds:
    """Does what a script says with the memory, the eventfds and the socket of a link."""

    def __init__(self, sock: socket.socket, mapping: Mapping, wakes: tuple[int, int]) -> None:
        self._sock = sock
        self._mapping = mapping
        self._wakes = wakes
        self._written = 0

    def do(self, script: Script) -> None:
        """The next instruction but those that need our side."""
        match script.number(1) % 8:
            case 0:
                for byte in script.block():
                    at = RING_HEADER_BYTES + self._written % RING_BYTES
                    self._mapping.view(at, 1, writable=True)[0] = byte
                    self._written += 1
                self._mapping.store64(0, self._written)
                self._wake(1)
            case 1:
                word = script.number(2) % (self._mapping.nbytes // 8)
                self._mapping.store64(word * 8, script.number(8))
                self._wake(1)
            case 2:
                self._wake(1)
            case 3:
                self._wake(0)
            case 4:
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    self._sock.send(script.take(script.number(1) % 8) or b"\1")
            case 7:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
            case _:
                pass

    def _wake(self, which: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wakes[which], 1)


@target(
    "link.standing", "the peer of a link that stands: rings, eventfds, socket", _deeds, bytes_per_byte=4096
)
def _standing(data: bytes) -> None:
    """A link stands; what its peer does then ends that link, with a typed error, or changes nothing else."""

    async def main() -> None:
        script, ours = Script(data), _Ours()
        nbytes = link_memory_bytes(RING_BYTES)
        memory = create_memfd("zbmd-fuzz", nbytes)
        segment = _segment_of(1)
        wakes = (_eventfd(os.EFD_NONBLOCK), _eventfd(os.EFD_NONBLOCK))
        try:
            async with _enemy(ours.address) as sock:
                offer = msgspec.msgpack.encode(AttachOffer(ring_bytes=RING_BYTES, slot=1))
                socket.send_fds(sock, [offer], [memory, *wakes, segment])
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.get_running_loop().sock_recv(sock, 1024)
                async with asyncio.timeout(PATIENCE_S):
                    link = await ours.made.get()
                await _misbehave(script, link, _Deeds(sock, Mapping(memory, nbytes, nbytes), wakes))
            # Its end of the socket is closed now: whatever it did before, our end must come to its end too.
            async with asyncio.timeout(PATIENCE_S):
                await ours.ended.wait()
        finally:
            for fd in (memory, segment, *wakes):
                os.close(fd)
        if len(ours.ends) != 1 or not link.closed:
            raise Broken(f"the link ended {len(ours.ends)} times")
        await ours.close()

    asyncio.run(main())


async def _misbehave(script: Script, link: Link, deeds: _Deeds) -> None:
    for step in range(STEPS_MAX):
        if script.ended:
            return
        deeds.do(script)
        await asyncio.sleep(0)
        if step % 4 == 3:
            with contextlib.suppress(LinkClosed, LinkFull):
                link.send(LENT if step % 8 == 7 else bytes(100))
