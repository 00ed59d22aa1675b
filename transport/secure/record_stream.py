"""Records over a byte stream that an attacker may write into: bytes in, frames out, and back. Sans-I/O.

A record is, little-endian:

    offset  bytes  field
     0      3      bytes of the body
     3      1      kind (`RecordKind`)
     4      4      sequence number of its direction, from 0: the low half of a u64
     8      n      body
     8+n    16     MAC (`record_mac`), if the session's protection is one

Before its MAC has been found right nothing of a record is used but its length, which is bounded, and its
kind and number, which the MAC binds. The number on the wire only serves to name what has happened to a record
that is not the expected one: a MAC that holds for the number it carries was made by the peer, for another
place in the stream. Without keys the numbers are all there is, and they stop accidents, not attackers.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.frames import MAX_FRAME_BYTES
from zbmd.transport.secure.protection import TAG_BYTES, Buffer, Keys, RecordMac

RECORD_HEADER_BYTES: Final = 8
SCRATCH_BYTES: Final = 1 << 16
"""The buffer that all streams of a thread read into; what stays of a record moves to one of its own size."""
JOINED_BYTES_MAX: Final = 1 << 12
"""A record up to this size leaves in one piece; the parts of a larger one are not copied together."""

_HEADER: Final = struct.Struct("<II")
_LENGTH_BITS: Final = 24
_LENGTH_MASK: Final = (1 << _LENGTH_BITS) - 1
_LOW: Final = 0xFFFF_FFFF
_HALF: Final = 1 << 31
assert MAX_FRAME_BYTES <= _LENGTH_MASK


class RecordKind(IntEnum):
    """The kind of a record's body."""

    SETUP = 1
    """A message of `session_setup`: the first record of each side, under the setup keys."""
    FRAME = 2
    """A frame, header and payload (`frames`)."""
    GOODBYE = 3
    """Empty: this end closes in order, and sends nothing more."""


class RecordError(RemoteProtocolError):
    """The stream is not what the peer sent, or the peer does not keep to the rules: the connection ends."""


class TruncatedRecord(RecordError):
    """The stream ended inside a record."""


class OversizedRecord(RecordError):
    """A record announces more than the bound, or than its kind may have."""


class ForgedRecord(RecordError):
    """The MAC of a record is wrong: it was altered, injected, or made for another connection."""


class DuplicatedRecord(RecordError):
    """The record that came last has come again."""


class ReplayedRecord(RecordError):
    """An earlier record has come again."""


class ReorderedRecord(RecordError):
    """A record has come before its turn: others were held back, or left out."""


class MalformedRecord(RecordError):
    """A genuine record that has no place here."""


class Sealer:
    """Makes the records of one direction. key: None for no MAC."""

    __slots__ = ("_mac", "sequence")

    def __init__(self, key: bytes | None) -> None:
        self._mac = None if key is None else RecordMac(key)
        self.sequence = 0
        """Of the next record."""

    def seal(self, kind: RecordKind, parts: Sequence[Buffer] = ()) -> list[Buffer]:
        """The record whose body is `parts` one after the other, as what to send in order.

        Every record that was made must be sent, in the order of making. Parts larger than
        `JOINED_BYTES_MAX` are not copied: they must stay as they are until they have been sent.
        """
        nbytes = sum(len(part) for part in parts)
        if nbytes > MAX_FRAME_BYTES:
            raise LocalProtocolError(f"a record of {nbytes} bytes; {MAX_FRAME_BYTES} is the bound")
        header = _HEADER.pack(nbytes | kind << _LENGTH_BITS, self.sequence & _LOW)
        tag = b"" if self._mac is None else self._mac.tag(kind, self.sequence, parts)
        self.sequence += 1
        if nbytes <= JOINED_BYTES_MAX:
            return [b"".join((header, *parts, tag))]
        pieces = (header, *parts, tag)
        return [piece for piece in pieces if len(piece)]


class Opener:
    """Checks the records of one direction. key: None for no MAC. body_bytes_max: of a record."""

    __slots__ = ("_body_bytes_max", "_mac", "sequence", "tag_bytes")

    def __init__(self, key: bytes | None, *, body_bytes_max: int) -> None:
        self._mac = None if key is None else RecordMac(key)
        self._body_bytes_max = body_bytes_max
        self.tag_bytes = 0 if key is None else TAG_BYTES
        self.sequence = 0
        """Of the next record."""

    def body_bytes(self, header: Buffer) -> int:
        """Return the length of the body that follows these 8 bytes. Raises `OversizedRecord`."""
        word, _ = _HEADER.unpack_from(header)
        nbytes: int = word & _LENGTH_MASK
        if nbytes > self._body_bytes_max:
            raise OversizedRecord(
                f"record {self.sequence} announces {nbytes} bytes; {self._body_bytes_max} is the bound"
            )
        return nbytes

    def open(self, header: Buffer, body: Buffer, tag: Buffer) -> RecordKind:
        """The kind of a whole record, which is now known to be the peer's next one.

        Raises a `RecordError` that names what it is instead.
        """
        word, low = _HEADER.unpack_from(header)
        kind, expected = word >> _LENGTH_BITS, self.sequence
        if low != expected & _LOW:
            raise self._out_of_order(kind, low, body, tag)
        if self._mac is not None and not self._mac.holds(kind, expected, body, tag):
            raise ForgedRecord(
                f"the MAC of record {expected} is wrong: it was changed on its way, or injected"
            )
        self.sequence += 1
        try:
            return RecordKind(kind)
        except ValueError:
            raise MalformedRecord(f"record {expected} is of unknown kind {kind}") from None

    def _out_of_order(self, kind: int, low: int, body: Buffer, tag: Buffer) -> RecordError:
        expected = self.sequence
        ahead = (low - expected) & _LOW
        if ahead >= _HALF:
            ahead -= 1 << 32
        claimed = expected + ahead
        if claimed < 0 or (self._mac is not None and not self._mac.holds(kind, claimed, body, tag)):
            return ForgedRecord(
                f"a record says it is number {claimed} where {expected} is due, and its MAC is wrong"
            )
        if ahead == -1:
            return DuplicatedRecord(f"record {claimed} has come twice")
        if ahead < 0:
            return ReplayedRecord(f"record {claimed} has come again where {expected} is due")
        return ReorderedRecord(f"record {claimed} has come where {expected} is due")


_of_thread = threading.local()


def _scratch() -> memoryview:
    """The thread's buffer. It holds something only between `get_buffer` and `buffer_updated`."""
    view: memoryview | None = getattr(_of_thread, "scratch", None)
    if view is None:
        view = _of_thread.scratch = memoryview(bytearray(SCRATCH_BYTES))
    return view


class SecureStream:
    """Both directions of a connection that carries frames, from its setup on.

    Receiving: fill what `get_buffer` gives, call `buffer_updated`, take frames from `next_frame`. Both calls
    belong together, without another stream's in between on the same thread. An idle stream holds no buffer.
    Of what has not been taken it holds the records that one filling completes, and the one under way: who
    reads on while `ready_bytes` is large decides on the bound.
    """

    def __init__(self, keys: Keys | None, *, frame_bytes_max: int) -> None:
        self._sealer = Sealer(None if keys is None else keys.send)
        self._opener = Opener(None if keys is None else keys.receive, body_bytes_max=frame_bytes_max)
        self._ready: deque[bytes | bytearray] = deque()
        self.ready_bytes = 0
        """Of the frames that wait to be taken."""
        self._head = b""
        """The beginning of a header that is not whole yet."""
        self._header = b""
        self._partial = bytearray()
        """Body and tag of the record under way, in full size."""
        self._partial_filled = 0
        self._error: RecordError | None = None
        self.goodbye = False
        """Whether the peer has said that nothing more comes."""

    # -- sending -----------------------------------------------------------------------------------------

    def seal_frame(self, header: bytes, payload: Buffer) -> list[Buffer]:
        """Return the bytes to send for a frame; see `Sealer.seal`."""
        return self._sealer.seal(RecordKind.FRAME, (header, payload))

    def seal_goodbye(self) -> list[Buffer]:
        """Return the bytes to send last."""
        return self._sealer.seal(RecordKind.GOODBYE)

    # -- receiving ---------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether reading on makes no sense; `next_frame` raises why, after the good frames."""
        return self._error is not None

    @property
    def partial_bytes(self) -> int:
        """The memory of the record under way."""
        return len(self._partial)

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes, at least one. Release it before `buffer_updated`."""
        if self._header:
            return memoryview(self._partial)[self._partial_filled :]
        scratch, head = _scratch(), self._head
        scratch[: len(head)] = head
        return scratch[len(head) :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were put there."""
        if self._error is not None:
            return
        try:
            if self._header:
                self._partial_filled += nbytes
                if self._partial_filled == len(self._partial):
                    self._complete_partial()
            else:
                self._take(_scratch()[: len(self._head) + nbytes])
        except RecordError as error:
            self._error = error
            self._header, self._partial = b"", bytearray()

    def feed(self, data: Buffer) -> None:
        """Bytes of the stream that were read elsewhere."""
        rest = memoryview(data)
        while rest:
            with self.get_buffer() as buffer:
                step = min(len(buffer), len(rest))
                buffer[:step] = rest[:step]
            self.buffer_updated(step)
            rest = rest[step:]

    def next_frame(self) -> bytes | bytearray | None:
        """The next frame, header and payload, in a buffer of its own. Raises the `RecordError` behind it."""
        if self._ready:
            frame = self._ready.popleft()
            self.ready_bytes -= len(frame)
            return frame
        if self._error is not None:
            raise self._error
        return None

    def end(self) -> TruncatedRecord | None:
        """Return the error of a stream that ends here: None between records."""
        if self._header:
            missing = len(self._partial) - self._partial_filled
            what = f"{missing} bytes before the end of record {self._opener.sequence}"
        elif self._head:
            what = f"inside the header of record {self._opener.sequence}"
        else:
            return None
        return TruncatedRecord(f"the stream ended {what}")

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the buffers do not fit together."""
        assert self.ready_bytes == sum(len(frame) for frame in self._ready)
        assert len(self._head) < RECORD_HEADER_BYTES
        assert not (self._head and self._header)
        assert bool(self._header) == bool(self._partial), "a body is waited for, and has its room"
        assert self._partial_filled < len(self._partial) or not self._header

    def _take(self, data: memoryview) -> None:
        """Take what the scratch holds: records whole, and the beginning of one."""
        tag_bytes, at, end = self._opener.tag_bytes, 0, len(data)
        self._head = b""
        while end - at >= RECORD_HEADER_BYTES:
            header = data[at : at + RECORD_HEADER_BYTES]
            body_bytes = self._opener.body_bytes(header)
            at += RECORD_HEADER_BYTES
            if end - at < body_bytes + tag_bytes:
                self._header = bytes(header)
                self._partial = bytearray(body_bytes + tag_bytes)
                self._partial[: end - at] = data[at:]
                self._partial_filled = end - at
                return
            body, tag = data[at : at + body_bytes], data[at + body_bytes : at + body_bytes + tag_bytes]
            kind = self._opener.open(header, body, tag)
            at += body_bytes + tag_bytes
            self._accept(kind, bytes(body))
        self._head = bytes(data[at:])

    def _complete_partial(self) -> None:
        body, body_bytes = self._partial, len(self._partial) - self._opener.tag_bytes
        with memoryview(body) as view:
            kind = self._opener.open(self._header, view[:body_bytes], view[body_bytes:])
        del body[body_bytes:]
        self._header, self._partial, self._partial_filled = b"", bytearray(), 0
        self._accept(kind, body)

    def _accept(self, kind: RecordKind, body: bytes | bytearray) -> None:
        if self.goodbye:
            raise MalformedRecord(f"a record of kind {kind.name} has come after the goodbye")
        match kind:
            case RecordKind.FRAME:
                self._ready.append(body)
                self.ready_bytes += len(body)
            case RecordKind.GOODBYE if not body:
                self.goodbye = True
            case _:
                raise MalformedRecord(f"a record of kind {kind.name} with {len(body)} bytes is out of place")
