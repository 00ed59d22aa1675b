"""Events and actions of the bulk machine, and the bounds of a connection. Sans-I/O.

Payloads are named, never held: a put's source and a get's destination by the number of the transfer, what a
peer reads from us by the number of its get, and our regions by their handles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zbmd.transport.bulk.records import FRAGMENT_BYTES_MAX, Record
from zbmd.transport.errors import LocalProtocolError, ZbmdError
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.memory.region import RegionHandle

OnEnded = Callable[[ZbmdError | None], None]
"""Called once when a connection has ended, with the error, or None after an orderly end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLimits:
    """The bounds of the bulk connection with one peer."""

    transfers_max: int = 1 << 14
    """Our transfers that are not done; past it a new one raises `LinkFull`."""
    stripe_bytes_max: int = 1 << 20
    """With that much given to a stripe and not sent, it gets no further record."""
    fragment_bytes: int = 1 << 22
    """The longest fragment, if there are several stripes; if there is one, it is `FRAGMENT_BYTES_MAX`."""
    fragment_bytes_min: int = 1 << 18
    """Not cut smaller than that to give every stripe a part."""
    close_ns: int = 1_000_000_000
    """Longest time for an orderly end."""
    silent_ms: int = 1_000
    """A host that acknowledges nothing for so long is lost. One whose process does not read is not."""

    def __post_init__(self) -> None:
        if min(self.transfers_max, self.stripe_bytes_max, self.close_ns, self.silent_ms) < 1:
            raise LocalProtocolError("the bounds of a bulk connection must be positive")
        if not 0 < self.fragment_bytes_min <= self.fragment_bytes <= FRAGMENT_BYTES_MAX:
            raise LocalProtocolError(
                f"fragments of {self.fragment_bytes_min}..{self.fragment_bytes} bytes: must be positive, "
                f"in order and at most {FRAGMENT_BYTES_MAX}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkPeerInfo:
    """The peer of a bulk connection."""

    name: int | str
    """Names the peer in errors."""
    slot: int
    """Of the peer's cells and its bit of the lost mask in our segment."""
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeOpened:
    """A further connection to the peer stands. stripe: its number, not used before."""

    stripe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StripesUsed:
    """From now on, give what is to be sent to the first `count` stripes alone; at first, all are used."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAsked:
    """Put `total` bytes to `at` of the peer's region, then set its cell of `channel`. transfer: fresh."""

    transfer: int
    handle: RegionHandle
    at: int
    total: int
    channel: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyAsked:
    """Set the peer's cell of `channel`, behind all puts asked for before. transfer: fresh."""

    transfer: int
    channel: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GetAsked:
    """Get `total` bytes at `at` of the peer's region. transfer: fresh."""

    transfer: int
    handle: RegionHandle
    at: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickMoved:
    """The fast path moved these while the machine was at rest (`BulkMachine.rest`)."""

    puts: int
    """Puts and notifications of ours, whose transfers are finished."""
    acked: int
    """Puts of ours that the peer has published, of all."""
    published: int
    """The peer's that are, of all."""
    acknowledged: int
    """Of those, how many have been acknowledged to the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsSent:
    """The oldest `records` of those given to this stripe with `SendRecord` have left whole."""

    stripe: int
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCame:
    """The header of a record has arrived and is authentic."""

    stripe: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadCame:
    """The payload that was last asked for on this stripe is in place and authentic. text: if it is one."""

    stripe: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRefused:
    """The region of `ReceivePut` on this stripe is not to be written; its payload is thrown away."""

    stripe: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetResolved:
    """The region of `Serve` can be read."""

    get: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRefused:
    """The region of `Serve` is not to be read."""

    get: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeEnded:
    """The peer's side of the stripe has ended; between two records, or in the middle of one."""

    stripe: int
    between_records: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeFailed:
    """The stripe is of no use any more.

    Error: a `BulkError` if what came on it was wrong, else `PeerLost`.
    """

    stripe: int
    error: ZbmdError


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAsked:
    """Finish what is under way, say goodbye and end."""


BulkEvent: TypeAlias = (
    StripeOpened
    | StripesUsed
    | PutAsked
    | NotifyAsked
    | GetAsked
    | QuickMoved
    | RecordsSent
    | RecordCame
    | PayloadCame
    | PutRefused
    | GetResolved
    | GetRefused
    | StripeEnded
    | StripeFailed
    | CloseAsked
    | TimerFired
)


class SourceKind(Enum):
    """The owner of a payload's bytes."""

    TRANSFER = "the source of our put"
    SERVED = "what the peer's get reads from us"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`nbytes` at `offset` of the buffer with this number."""

    of: SourceKind
    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRecord:
    """Send a record behind those given before, with its payload: a source, or a text, or none."""

    stripe: int
    record: Record
    source: Source | None = None
    text: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivePut:
    """Check that peers may write these bytes of our region, and receive the payload there.

    It may come later than the record: until then nothing is to be read from the stripe. Answer `PayloadCame`
    when it is there, at once if `nbytes` is 0; and before it `PutRefused` if they may not.
    """

    stripe: int
    handle: RegionHandle
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveGet:
    """Receive the payload into the destination of our get; answer as to `ReceivePut`."""

    stripe: int
    transfer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveText:
    """Receive the payload as a text."""

    stripe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Check that peers may read these bytes of our region; keep them until `Unserve`.

    Answer `GetResolved` or `GetRefused`.
    """

    get: int
    handle: RegionHandle
    at: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserve:
    """The peer's get needs its bytes no more."""

    get: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Set our own cell of (the peer's slot, channel)."""

    channel: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A transfer of ours is over: its buffer is not touched any more."""

    transfer: int
    error: ZbmdError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutStripe:
    """Nothing more will be sent on this stripe: tell the peer's kernel."""

    stripe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStripe:
    """Both sides are done with this stripe."""

    stripe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLost:
    """The peer's notifications cannot come any more: set its bit in the lost mask.

    Over stripes it comes before any transfer is finished, so that whoever learns of an end by one finds the
    bit set; over RDMA it follows the end of the queue pair.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The connection is over, with all that is under way. error: None after an orderly end."""

    error: ZbmdError | None


BulkAction: TypeAlias = (
    SendRecord
    | ReceivePut
    | ReceiveGet
    | ReceiveText
    | Serve
    | Unserve
    | Publish
    | Finish
    | ShutStripe
    | CloseStripe
    | SetTimer
    | MarkLost
    | End
)
