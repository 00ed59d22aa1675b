"""Sans-I/O: one stripe of the bulk stream as bytes, in either direction, with sequence numbers and tags.

The reader says where the next bytes belong, so that a payload is received straight into its destination; the
writer gives out views of the source, so that it is sent from where it lies. Nothing in a header is looked at
before its tag is found right. A payload is already in its destination when its tag is checked: if that
fails, `Forged` is raised, the payload is never reported, and so its notification is never given; what has
come to lie in the destination is then of no account, as after a put that a dying peer left half done.

A payload's tag (`secure.protection`) goes behind it, so it is made by chunk while the payload is on its way.
"""

from __future__ import annotations

import hmac
from collections import deque
from typing import Final

from zbmd.transport.bulk.records import (
    HEADER_BYTES,
    TEXT_BYTES_MAX,
    Error,
    Forged,
    Goodbye,
    Malformed,
    PutRefusal,
    Record,
    TransferRefusal,
    decode,
    encode,
)
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.secure.protection import TAG_BYTES, LyingTag, PassingTag, RecordMac, Seal, TagHelper

CHUNK_BYTES: Final = 1 << 22
"""Bytes that are moved at a time."""
SCRATCH_BYTES: Final = 1 << 14
"""Buffer for unwanted payloads, a piece at a time."""
# The kind of a header's tag (`record_mac`); of payloads: `secure.protection`. A stripe's keys are its own.
_HEADER: Final = 1


class PayloadArrived:
    """The payload of the record before is in its destination, whole and with the right tag."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text
        """The reason in a REFUSAL or ERROR; else empty."""


class StripeReader:
    """The receiving side of a stripe.

    mac: checks the tags; None if the stripe is protected otherwise. helper: makes tags beside us; may be
    None.
    """

    def __init__(self, mac: RecordMac | None, helper: TagHelper | None = None) -> None:
        self._mac = mac
        self._helper = helper
        self.records = 0
        """Headers that have come."""
        self._small = memoryview(bytearray(HEADER_BYTES + TAG_BYTES if mac else HEADER_BYTES))
        self._tag_view = memoryview(bytearray(TAG_BYTES))
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._text = memoryview(bytearray(TEXT_BYTES_MAX))
        self._view = self._small
        """The part that is being filled: a header, a payload, or a payload's tag."""
        self._at = 0
        self._record: Record | None = None
        """Set from its header's arrival until its payload is whole."""
        self._lying: LyingTag | None = None
        """The tag of the payload, if it has a destination and needs one."""
        self._passing: PassingTag | None = None
        """The same if it is thrown away."""
        self._unwanted_bytes = 0
        """Bytes still to come of a payload that is discarded."""
        self._ended = False

    @property
    def seal(self) -> Seal | None:
        """Computes the tags; None if there are none."""
        return None if self._mac is None else self._mac.seal

    @property
    def wanted_bytes(self) -> int:
        """Return how many bytes are missing until the next part is whole.

        0 while a destination is awaited.
        """
        return self._unwanted_bytes or len(self._view) - self._at

    @property
    def in_payload(self) -> bool:
        """Whether the next bytes are a payload's: they must have a destination."""
        return self._record is not None and self._view is not self._tag_view

    def want(self) -> memoryview:
        """Return the buffer for the next bytes of the stripe, never empty.

        Report to `filled` how many came.
        """
        if self._unwanted_bytes:
            return self._scratch[: self._unwanted_bytes]
        if self._at == len(self._view):
            raise LocalProtocolError("a payload is due and has been given no destination")
        return self._view[self._at : self._at + CHUNK_BYTES]

    def filled(self, nbytes: int) -> Record | PayloadArrived | None:
        """`nbytes` (at least 1) of what `want` gave have come. The record or payload that is whole by them.

        A record with `nbytes` of payload needs `receive_into`, `receive_text` or `receive_nowhere` next.
        Raises `Forged`, `OutOfSequence` and `Malformed`, after which the stripe is of no use.
        """
        if self._ended:
            raise Malformed("a stripe goes on after its goodbye")
        view = self._view
        if self._unwanted_bytes:
            self._unwanted_bytes -= nbytes
            if self._passing is not None:
                self._passing.update(self._scratch[:nbytes])
        else:
            self._at += nbytes
            if self._lying is not None and view is not self._tag_view:
                self._lying.reached(self._at)
        if self._at < len(view) or self._unwanted_bytes:
            return None
        if self._record is None:
            return self._header_whole()
        tag = self._passing or self._lying
        if tag is None:
            return self._payload_whole()
        if view is self._tag_view:
            if not hmac.compare_digest(tag.tag(), view):
                raise Forged(f"the payload of record {self.records - 1} of a stripe does not match its tag")
            self._passing = self._lying = None
            return self._payload_whole()
        self._view, self._at = self._tag_view, 0
        return None

    def receive_into(self, view: memoryview) -> None:
        """Give the payload that is due its destination, a writable view of its length in bytes."""
        if self._record is None or self._record.nbytes != len(view) or view.itemsize != 1:
            raise LocalProtocolError(f"{len(view)} bytes are no destination for {self._record}")
        self._view, self._at = view, 0
        if self._mac is not None:
            self._lying = LyingTag(self._mac, self.records - 1, view, self._helper)

    def receive_nowhere(self) -> None:
        """Discard the payload that is due, after checking its tag."""
        nbytes = 0 if self._record is None else self._record.nbytes
        self._view, self._at = self._scratch[:0], 0
        self._unwanted_bytes = nbytes
        if self._mac is not None:
            self._passing = PassingTag(self._mac, self.records - 1, nbytes)

    def redirect(self) -> None:
        """Let go of the destination of the payload that is under way: it goes on in memory of its own."""
        if self._record is None:
            return
        apart = memoryview(bytearray(self._view)) if self.in_payload else None
        if self._lying is not None:
            self._lying = self._lying.apart()
            apart = self._lying.payload
        if self.in_payload and apart is not None:
            self._view = apart

    def receive_text(self) -> None:
        """Take the payload that is due as the text of a REFUSAL or ERROR."""
        if not isinstance(self._record, TransferRefusal | PutRefusal | Error):
            raise LocalProtocolError(f"the payload of {self._record} is no text")
        self.receive_into(self._text[: self._record.nbytes])

    @property
    def between_records(self) -> bool:
        """Whether a stream that ends here has not cut a record short."""
        return self._record is None and self._at == 0

    def _header_whole(self) -> Record:
        header = bytes(self._small[:HEADER_BYTES])
        if self._mac is not None and not self._mac.holds(
            _HEADER, self.records, header, bytes(self._small[HEADER_BYTES:])
        ):
            raise Forged(f"the header of record {self.records} of a stripe does not match its tag")
        record = decode(header, self.records)
        self.records += 1
        self._at = 0
        if record.nbytes:
            self._record = record
            self._view = self._small[:0]
        self._ended = isinstance(record, Goodbye)
        return record

    def _payload_whole(self) -> PayloadArrived:
        text = ""
        if isinstance(self._record, TransferRefusal | PutRefusal | Error):
            text = bytes(self._text[: self._record.nbytes]).decode(errors="replace")
            text = "".join(c if c.isprintable() else "?" for c in text)
        self._record = None
        self._view, self._at = self._small, 0
        return PayloadArrived(text)


class StripeWriter:
    """The sending side of a stripe. Arguments as of `StripeReader`."""

    def __init__(self, mac: RecordMac | None, helper: TagHelper | None = None) -> None:
        self._mac = mac
        self._helper = helper
        self.records = 0
        """Headers that have been given out."""
        self._records: deque[tuple[Record, memoryview | None]] = deque()
        self._payload: memoryview | None = None
        """The uncut rest of the payload of the record whose header went into `_ready` last."""
        self._tag: LyingTag | None = None
        """Of that payload."""
        self._cut_bytes = 0
        """Bytes of it that have been cut."""
        self._ready: deque[memoryview] = deque()
        self._ready_bytes = 0
        self._given_bytes = 0
        """All bytes that were ever put into `_ready`."""
        self._sent_bytes = 0
        self._ends: deque[int] = deque()
        """The values of `_given_bytes` at which records end."""

    @property
    def seal(self) -> Seal | None:
        """As of `StripeReader`."""
        return None if self._mac is None else self._mac.seal

    @property
    def idle(self) -> bool:
        """Whether everything that was added has been sent."""
        return not (self._records or self._ready or self._payload is not None or self._tag is not None)

    def add(self, record: Record, payload: memoryview | None = None) -> None:
        """Send `record` next, with its payload of `record.nbytes` bytes, which must stay as it is."""
        if (0 if payload is None else payload.nbytes) != record.nbytes:
            raise LocalProtocolError(f"a payload that is not that of {record}")
        self._records.append((record, payload))

    def behind(self, rest: memoryview) -> None:
        """The end of a record that was made and begun elsewhere is to be sent next; it is copied."""
        self._give(_copy(rest))

    def let_go(self) -> None:
        """Copy what is still to be sent: the memory that it is in may change now."""
        self._records = deque((r, None if view is None else _copy(view)) for r, view in self._records)
        if self._payload is not None:
            self._payload = _copy(self._payload)
        if self._tag is not None:
            self._tag = self._tag.apart()
        self._ready = deque(map(_copy, self._ready))

    def pending(self, parts_max: int) -> list[memoryview]:
        """The next bytes, in at most `parts_max` views, for one gathering send; empty if there are none."""
        while self._ready_bytes < CHUNK_BYTES and len(self._ready) < parts_max:
            if self._payload is not None:
                self._cut(self._payload)
            elif self._tag is not None:
                self._end(self._tag)
            elif self._records:
                self._begin(*self._records.popleft())
            else:
                break
        return [self._ready[i] for i in range(min(parts_max, len(self._ready)))]

    def sent(self, nbytes: int) -> int:
        """The first `nbytes` of `pending` have left. How many records are sent whole by them."""
        self._sent_bytes += nbytes
        self._ready_bytes -= nbytes
        while nbytes:
            first = self._ready[0]
            if len(first) > nbytes:
                self._ready[0] = first[nbytes:]
                break
            nbytes -= len(first)
            self._ready.popleft()
        records = 0
        while self._ends and self._ends[0] <= self._sent_bytes:
            self._ends.popleft()
            records += 1
        return records

    def _begin(self, record: Record, payload: memoryview | None) -> None:
        header = encode(record, self.records)
        if self._mac is not None:
            header += self._mac.tag(_HEADER, self.records, (header,))
            if payload is not None:
                self._tag = LyingTag(self._mac, self.records, payload, self._helper)
        self.records += 1
        self._payload = payload
        self._cut_bytes = 0
        self._give(memoryview(header))
        if payload is None:
            self._ends.append(self._given_bytes)

    def _cut(self, payload: memoryview) -> None:
        chunk, rest = payload[:CHUNK_BYTES], payload[CHUNK_BYTES:]
        self._give(chunk)
        self._cut_bytes += len(chunk)
        if self._tag is not None:
            self._tag.reached(self._cut_bytes)
        if rest:
            self._payload = rest
            return
        self._payload = None
        if self._tag is None:
            self._ends.append(self._given_bytes)

    def _end(self, tag: LyingTag) -> None:
        """Not before some of the last bytes are on their way: their tag is made meanwhile."""
        self._give(memoryview(tag.tag()))
        self._tag = None
        self._ends.append(self._given_bytes)

    def _give(self, view: memoryview) -> None:
        self._ready.append(view)
        self._ready_bytes += len(view)
        self._given_bytes += len(view)


def _copy(view: memoryview) -> memoryview:
    return memoryview(bytes(view))
