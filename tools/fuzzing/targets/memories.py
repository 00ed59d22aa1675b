"""Targets in shared memory: what an enemy can store where both sides look."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Generator

import msgspec
import numpy as np

from zbmd.collectives.device.windows import WindowOffer, decode_offer, encode_offer
from zbmd.tools.fuzzing.target import Broken, Script, target
from zbmd.training.model_actors.actors import ArrayData, pack, unpack
from zbmd.transport.cuda.array import ITEM_BYTES, DeviceHandle, EventHandle, decode_handle, encode_handle
from zbmd.transport.errors import ArenaFull, OutOfMemory, RemoteProtocolError
from zbmd.transport.memory.arena import Arena
from zbmd.transport.memory.kept import KeptBlocks
from zbmd.transport.memory.memfd import PAGE_BYTES, SEALS, TABLE_BYTES
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native import _native
from zbmd.transport.native._native import RING_HEADER_BYTES, Mapping, RingReader, RingWriter
from zbmd.transport.rdma.credit import (
    CREDITS,
    MESSAGE_BYTES,
    CreditFlow,
    Immediate,
    MessageKind,
    unpack_immediate,
)
from zbmd.transport.rdma.setup import (
    MemoryAt,
    Message,
    QueuePairAt,
    RdmaAnswer,
    RdmaOffer,
    RdmaReady,
    RdmaRefusal,
    decode_setup,
    encode_setup,
    require_fits,
)

# ---- RDMA links: set-up and messages

_KINDS: tuple[type[Message], ...] = (RdmaOffer, RdmaAnswer, RdmaReady)
_FRAME_BYTES_MAX = 1 << 14
_WORD_BYTES = 4


def _setup_seeds() -> tuple[bytes, ...]:
    at = QueuePairAt(gid=bytes(range(16)), lid=0, number=17, first_psn=1 << 23, mtu=3)
    memory = MemoryAt(at=at, base=1 << 40, nbytes=1 << 20, arena_offset=1 << 18, inbox_key=1, arena_key=2)
    messages: tuple[Message, ...] = (
        RdmaOffer(at=at, memory=memory),
        RdmaAnswer(at=at),
        RdmaReady(),
        RdmaRefusal(why="full"),
    )
    return tuple(bytes([kind]) + encode_setup(message) for kind, message in enumerate(messages))


@target("rdma.setup", "a message that sets up an RDMA link", _setup_seeds, RemoteProtocolError)
def _setup(data: bytes) -> None:
    """The first byte picks what is due."""
    message = decode_setup(data[1:], _KINDS[(data[:1] or b"\0")[0] % len(_KINDS)], "peer")
    if isinstance(message, RdmaOffer | RdmaAnswer) and len(require_fits(message.at, "peer").gid) != 16:
        raise Broken(f"a queue pair at {message.at.gid!r}")


def _messages_seeds() -> tuple[bytes, ...]:
    words = (
        (Immediate(kind=MessageKind.FRAME, more=True), 200),
        (Immediate(kind=MessageKind.FRAME), 3),
        (Immediate(kind=MessageKind.CREDITS), 0),
        (Immediate(kind=MessageKind.GOODBYE), 0),
    )
    return (b"".join(word.pack().to_bytes(_WORD_BYTES) + bytes([nbytes]) for word, nbytes in words),)


@target("rdma.messages", "messages on the queue pair of an RDMA link", _messages_seeds, RemoteProtocolError)
def _messages(data: bytes) -> None:
    """Each five bytes are a message: its word, and how many bytes come with it."""
    flow = CreditFlow(frame_bytes_max=_FRAME_BYTES_MAX)
    step = _WORD_BYTES + 1
    for start in range(0, len(data) - step + 1, step):
        word = unpack_immediate(int.from_bytes(data[start : start + _WORD_BYTES]))
        nbytes = data[start + _WORD_BYTES]
        flow.came(word, bytes(min(nbytes * 17, MESSAGE_BYTES)))
        if nbytes % 2:
            frame = flow.next_frame()
            if frame is not None and len(frame) > _FRAME_BYTES_MAX:
                raise Broken(f"a frame of {len(frame)} bytes")
            flow.credits_due()
        flow.check_invariants()
        if flow.unread > CREDITS:
            raise Broken(f"{flow.unread} messages wait")


# ---- handles of device memory and of events

_SLOT, _INCARNATION = 3, 7
_UUID, _OPAQUE = bytes(range(16)), bytes(range(64))


def _seeds() -> tuple[bytes, ...]:
    memory = DeviceHandle(
        slot=_SLOT,
        incarnation=_INCARNATION,
        offset=512,
        nbytes=24,
        writable=True,
        device=_UUID,
        memory=_OPAQUE,
        typestr="<f4",
        shape=(2, 3),
    )
    event = EventHandle(slot=_SLOT, incarnation=_INCARNATION, channel=5, device=_UUID, event=_OPAQUE)
    return b"\0" + encode_handle(memory), b"\1" + encode_handle(event)


@target("device.handle", "a handle of device memory or of an event", _seeds, RemoteProtocolError)
def _device_handle(data: bytes) -> None:
    """The first byte picks what is due."""
    if data[:1] == b"\1":
        event = decode_handle(data[1:], EventHandle, slot=_SLOT, incarnation=_INCARNATION)
        if (event.slot, event.incarnation) != (_SLOT, _INCARNATION) or len(event.event) != len(_OPAQUE):
            raise Broken(f"{event}")
        return
    handle = decode_handle(data[1:], DeviceHandle, slot=_SLOT, incarnation=_INCARNATION)
    fits = math.prod(handle.shape) * ITEM_BYTES[handle.typestr] == handle.nbytes
    if not fits or handle.offset < 0 or (handle.slot, handle.incarnation) != (_SLOT, _INCARNATION):
        raise Broken(f"{handle}")


@target(
    "device.window",
    "a member's window of device memory",
    lambda: (
        encode_offer(WindowOffer(why="none")).tobytes(),
        encode_offer(WindowOffer(name="H200")).tobytes(),
    ),
    RemoteProtocolError,
)
def _window(data: bytes) -> None:
    offer = decode_offer(data)
    if len(offer.memory) != len(_OPAQUE) or decode_offer(encode_offer(offer).tobytes()) != offer:
        raise Broken(f"{offer}")


# ---- arrays in messages

_SEEDS = (np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.int64), np.array(True))


@target(
    "array",
    "an array in a message",
    lambda: tuple(msgspec.msgpack.encode(pack(array)) for array in _SEEDS),
    RemoteProtocolError,
    msgspec.MsgspecError,
    ValueError,
    RecursionError,
)
def _array(data: bytes) -> None:
    array = unpack(msgspec.msgpack.decode(data, type=ArrayData))
    again = unpack(pack(array))
    if again.dtype != array.dtype or again.shape != array.shape or again.tobytes() != array.tobytes():
        raise Broken(f"{array!r:.200}")


RING_BYTES = 1 << 12
FRAME_BYTES_MAX = 3 * RING_BYTES
STEPS_MAX = 256
FILE_BYTES_MAX = 1 << 20
HEADER_BYTES = 64
"""The words of a segment's header that are read when it is attached."""


@contextlib.contextmanager
def memfd(nbytes: int, seals: int = SEALS) -> Generator[int]:
    """A memfd of any size, without the memory behind it: what a peer may hand over."""
    fd = os.memfd_create("zbmd-fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


# ---- rings


def _ring_seeds() -> tuple[bytes, ...]:
    good = b"\x07\x05hello\x03"
    half = (
        b"\x01\x06\x00\x0a\x00\x00\x00ab"
        + RING_HEADER_BYTES.to_bytes(2, "little")
        + b"\x02\x06\x03\x02\x04\x03"
    )
    written = b"\x06\x06\x05\x00" + ((RING_HEADER_BYTES + RING_BYTES + 64) // 8).to_bytes(2, "little")
    return (
        good * 3 + b"\x05",
        half,
        b"\x00\x00\x00" + (RING_BYTES).to_bytes(8, "little") + b"\x03" * 20,
        written + (4000).to_bytes(8, "little") + b"\x06",
    )


@target(
    "ring",
    "both ends of a byte ring against a peer that stores anything anywhere",
    _ring_seeds,
    RemoteProtocolError,
)
def _ring(data: bytes) -> None:
    """A reader and a writer over two rings whose other ends are the script's."""
    nbytes = 2 * (RING_HEADER_BYTES + RING_BYTES)
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        with memfd(nbytes) as fd:
            mapping = Mapping(fd, nbytes, nbytes)
        reader = RingReader(mapping, 0, RING_BYTES, wake, FRAME_BYTES_MAX)
        writer = RingWriter(mapping, nbytes // 2, RING_BYTES, wake)
        _ring_steps(Script(data), mapping, reader, writer)
    finally:
        os.close(wake)


def _ring_steps(script: Script, mapping: Mapping, reader: RingReader, writer: RingWriter) -> None:
    done, message = 0, bytes(range(256)) * 9
    for _ in range(STEPS_MAX):
        if script.ended:
            return
        match script.number(1) % 8:
            case 0:
                mapping.store64(script.number(2) % (mapping.nbytes // 8) * 8, script.number(8))
            case 1:
                part = script.block()
                at = script.number(2) % mapping.nbytes
                part = part[: mapping.nbytes - at]
                mapping.view(at, len(part), writable=True)[:] = part
            case 2:
                mapping.store64(0, (mapping.load64(0) + script.number(1)) % (1 << 64))
            case 3 | 4:
                frame = reader.read()
                if frame is not None and len(frame) > FRAME_BYTES_MAX:
                    raise Broken(f"a frame of {len(frame)} bytes came out of the ring")
            case 5:
                reader.park()
                writer.park()
            case 6:
                done = writer.write(message[:48], message, done)
                if not 0 <= done <= 4 + 48 + len(message):
                    raise Broken(f"{done} bytes of {4 + 48 + len(message)} are written")
                done = 0 if done == 4 + 48 + len(message) else done
            case _:
                # One good frame, so that what follows meets a reader in the middle of things.
                _good_frame(mapping, script.take(script.number(1)))


def _good_frame(mapping: Mapping, body: bytes) -> None:
    head = mapping.load64(0)
    for i, byte in enumerate(len(body).to_bytes(4, "little") + body):
        mapping.view(RING_HEADER_BYTES + (head + i) % RING_BYTES, 1, writable=True)[0] = byte
    mapping.store64(0, (head + 4 + len(body)) & (1 << 64) - 1)


# ---- segments and handles


def segment_file(slot: int = 2, incarnation: int = 9, pages: int = 2) -> bytes:
    """The start of a good segment, as the file of its process has it."""
    made = Segment.create(
        slot=slot, incarnation=incarnation, arena_bytes=PAGE_BYTES * pages, inbox_bytes=PAGE_BYTES
    )
    try:
        return bytes(made.mapping.view(0, HEADER_BYTES)) + (made.nbytes // PAGE_BYTES).to_bytes(8, "little")
    finally:
        made.close()


def _segment_seeds() -> tuple[bytes, ...]:
    good = segment_file()
    return (good, good + b"\x08", good + b"\x00\x01", good[:HEADER_BYTES] + (1 << 50).to_bytes(8, "little"))


@target("segment", "a forged segment: header, size, seals", _segment_seeds, RemoteProtocolError, OutOfMemory)
def _segment(data: bytes) -> None:
    """A segment out of a header, a size in pages, which seals it has, and how it is opened."""
    script = Script(data)
    header = script.take(HEADER_BYTES)
    nbytes = min(script.number(8), (1 << 63) // PAGE_BYTES - 1) * PAGE_BYTES
    seals, how = script.number(1), script.number(1)
    with _forged(header, nbytes, SEALS ^ (seals & 31), read_only=how & 1 == 1) as fd:
        peer = PeerSegment.attach([fd], slot=2)
    if peer.slot != 2 or not peer.incarnation > 0 or not _native.OFF_END <= peer.arena_offset <= peer.nbytes:
        raise Broken(f"a segment of slot {peer.slot}, arena at {peer.arena_offset} of {peer.nbytes}")
    peer.notify(1, 0, 5)
    peer.close()


@contextlib.contextmanager
def _forged(header: bytes, nbytes: int, seals: int, *, read_only: bool) -> Generator[int]:
    fd = os.memfd_create("zbmd-fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, header[:nbytes], 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        if read_only:
            other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            os.close(fd)
            fd = other
        yield fd
    finally:
        os.close(fd)


def _handles() -> tuple[bytes, ...]:
    known = {"slot": 1, "incarnation": 4, "offset": _native.OFF_END, "nbytes": 4096}
    handles = [
        RegionHandle(**known, writable=True),
        RegionHandle(**{**known, "offset": _native.OFF_END + PAGE_BYTES}, writable=False),
    ]
    return tuple(
        at.to_bytes(8, "little") + count.to_bytes(8, "little") + msgspec.msgpack.encode(handle)
        for handle in handles
        for at, count in ((0, 4096), (4000, 96), (4096, 0))
    )


@target("region.handle", "a forged region handle, read and written through", _handles, RemoteProtocolError)
def _handle(data: bytes) -> None:
    """A handle from a wire, and where in it somebody asks for what."""
    script = Script(data)
    at, count = script.number(8), script.number(8)
    try:
        handle = msgspec.msgpack.decode(script.rest(), type=RegionHandle)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the contract that carries it refuses it: see contracts.message
    segment = Segment.create(slot=1, incarnation=4, arena_bytes=PAGE_BYTES, inbox_bytes=PAGE_BYTES)
    own = Segment.create(slot=0, incarnation=4, arena_bytes=0, inbox_bytes=0)
    try:
        peer = PeerSegment.attach(segment.fds, slot=1)
        _use_region(peer, own, handle, at, count)
    finally:
        own.close()
        segment.close()


def _use_region(peer: PeerSegment, own: Segment, handle: RegionHandle, at: int, count: int) -> None:
    inbox, arena = (_native.OFF_END, peer.arena_offset), (peer.arena_offset, peer.nbytes)
    low, high = inbox if handle.writable else arena
    region = peer.open_region(handle, own)
    view = region.view(at, count)
    begin = _native.address_of(view) - peer.base
    if not (low <= begin and begin + view.nbytes <= high and view.readonly and view.nbytes == count):
        raise Broken(f"{handle} gave {view.nbytes} bytes at {begin}")
    buffer = np.zeros(count, np.uint8)
    region.get(buffer, at).wait()
    region.put(buffer, at, channel=0, value=1).wait()
    region.close()
    peer.close()


# ---- memory that outlives its process


class _Bytes:
    """Memory that is a process's own."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)
        self.address = _native.address_of(self.array)

    def view(self, offset: int, nbytes: int, *, writable: bool = False) -> memoryview:
        """See `Memory`."""
        part = self.array[offset : offset + nbytes].data
        return part if writable else part.toreadonly()


def _kept_seeds() -> tuple[bytes, ...]:
    memory = _Bytes(TABLE_BYTES + _KEPT_BYTES)
    blocks = KeptBlocks(Arena(memory, TABLE_BYTES, _KEPT_BYTES), memory, 0)
    for name, nbytes in (("state", 4096), ("other", 100), ("fourth", 200), ("fifth", 300)):
        blocks.block(name, nbytes)
    blocks.release("other")
    return (memory.array[:TABLE_BYTES].tobytes(), b"")


_KEPT_BYTES = 1 << 16


@target("memory.kept", "the table of an arena that a peer has written over", _kept_seeds)
def _kept(data: bytes) -> None:
    """Whatever the table says, blocks lie in the arena, and never over each other."""
    memory = _Bytes(TABLE_BYTES + _KEPT_BYTES)
    memory.array[: len(data[:TABLE_BYTES])] = np.frombuffer(data[:TABLE_BYTES], np.uint8)
    arena = Arena(memory, TABLE_BYTES, _KEPT_BYTES, was_used=True)
    blocks = KeptBlocks(arena, memory, 0)
    found = list[tuple[int, int]]()
    if blocks.left("fourth"):
        blocks.peek("fourth", 64)
        blocks.release("fourth")
    if blocks.has("fourth"):
        raise Broken("a block that was given back is listed")
    for name, nbytes in (("state", 4096), ("other", 100), ("third", 1 << 10)):
        try:
            block, _ = blocks.block(name, nbytes)
        except ArenaFull:
            continue
        offset = arena.offset_of(block)
        if offset is None or block.nbytes != nbytes:
            raise Broken(f"the block {name!r} has {block.nbytes} bytes at {offset}")
        if any(offset < end and begin < offset + nbytes for begin, end in found):
            raise Broken(f"the block {name!r} at {offset} lies over another of {found}")
        found.append((offset, offset + nbytes))
    arena.check_invariants()
