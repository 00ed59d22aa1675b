"""What the bulk machine keeps of what is under way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from zbmd.transport.bulk.arrivals import Stripes
from zbmd.transport.bulk.events import GetAsked, NotifyAsked, Of, PutAsked
from zbmd.transport.bulk.records import Data, Notify, Put, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The counts from which `_quick.QuickPuts` goes on, while there is nothing for the machine to do."""

    lane: int
    """Which it goes on."""
    puts: int
    """Ours so far."""
    acked: int
    """Of those, how many the peer has published."""
    awaited: int
    """Up to which transfers wait for acknowledgements."""
    published: int
    """The peer's that are."""
    told: int
    """Of those, what the peer has been told."""


@dataclass(slots=True)
class Outgoing:
    """A put of ours, or the answer to a peer's get, while it is cut and sent."""

    of: Of
    number: int
    """The transfer, or the get."""
    total: int
    order: int = 0
    """Of a put: its number on the wire."""
    ask: PutAsked | NotifyAsked | None = None
    stripe_bytes: int = 0
    cut_bytes: int = 0
    unsent: int = 0
    """Records given to lanes and not sent."""
    cut_whole: bool = False
    refused: bool = False
    """Of a put: it is finished with an error, ahead of its acknowledgement."""
    settled: bool = False
    """Of a put: its transfer was finished when it was sent."""


@dataclass(slots=True)
class OwnGet:
    """A get of ours."""

    ask: GetAsked
    after: int
    """Our puts that were asked for before."""
    stripes: Stripes | None = None
    asked: bool = False


@dataclass(slots=True)
class LaneState:
    """What is under way on a lane."""

    handed: deque[tuple[Record, Outgoing | None]] = field(default_factory=deque)
    """Given to the lane and not sent."""
    handed_bytes: int = 0
    receiving: Record | None = None
    """The record whose payload is due."""
    held_back: bool = False
    """That payload has to wait for earlier puts."""
    goodbye_said: bool = False
    goodbye_sent: bool = False
    goodbye_heard: bool = False


def stripe_record(outgoing: Outgoing, offset: int, nbytes: int) -> Record:
    """The record of this stripe of it."""
    ask = outgoing.ask
    match ask:
        case NotifyAsked():
            return Notify(transfer=outgoing.order, channel=ask.channel, value=ask.value)
        case PutAsked():
            return Put(
                transfer=outgoing.order, handle=ask.handle, at=ask.at, total=ask.total, offset=offset,
                stripe_bytes=outgoing.stripe_bytes, nbytes=nbytes, channel=ask.channel, value=ask.value,
            )  # fmt: skip
        case None:
            return Data(
                transfer=outgoing.number, total=outgoing.total, stripe_bytes=outgoing.stripe_bytes,
                offset=offset, nbytes=nbytes,
            )  # fmt: skip
        case _:
            assert_never(ask)
