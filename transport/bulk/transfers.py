"""The bulk machine's record of what is in flight. Sans-I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

from zbmd.transport.bulk.events import GetAsked, NotifyAsked, PutAsked, SourceKind
from zbmd.transport.bulk.records import PUTS_AHEAD_MAX, Data, Malformed, Notify, Put, Record

# Sans-I/O: which parts of a peer's transfers have come, and which of its puts may be published.
#
# Puts and notifications carry consecutive numbers, and are published in that order, each once it is whole. On
# several stripes a put can overtake an earlier one; it is received at once where it cannot make a difference,
# and held back while an earlier one that is not whole, or not even known, may write the same bytes.


class Fragments:
    """The fragments of one transfer that have arrived. record: the first of them; the others must fit it."""

    __slots__ = ("_claimed", "first", "left", "refused")

    def __init__(self, record: Put | Data) -> None:
        self.first = record
        self.left = max(1, -(-record.total // record.fragment_bytes))
        """Fragments that are not in place."""
        self.refused: str | None = None
        """Why it is not to be published."""
        self._claimed = 0
        """Bit i: fragment i has come or is coming."""

    def claim(self, fragment: Put | Data) -> None:
        """One more is coming. Raises `Malformed` if it has come already or does not fit the first."""
        if _common(fragment) != _common(self.first):
            raise Malformed(f"the fragments of transfer {fragment.transfer} do not fit each other")
        bit = 1 << fragment.offset // fragment.fragment_bytes
        if self._claimed & bit:
            raise Malformed(f"the fragment at {fragment.offset} of transfer {fragment.transfer} came twice")
        self._claimed |= bit


class Arrivals:
    """The peer's puts and notifications, from their arrival to their publication."""

    def __init__(self) -> None:
        self._waiting: dict[int, Fragments | Notify] = {}
        self._partial: dict[int, Fragments] = {}
        """Those of them of which fragments are missing."""
        self._known = 0
        """Of all puts before this number, something has come."""
        self.published = 0
        """Puts of the peer that are published."""
        self.acknowledged = 0
        """Of `published`, how many have been acknowledged to the peer."""

    def notify(self, record: Notify) -> None:
        """A notification has come. Raises `Malformed` if its number is out of range or came before."""
        self._check_number(record.transfer)
        if record.transfer in self._waiting:
            raise Malformed(f"put {record.transfer} came twice")
        self._waiting[record.transfer] = record
        self._note_known()

    def fragment(self, put: Put) -> None:
        """A fragment is coming. Raises `Malformed` as `notify` and `Fragments.claim` do."""
        self._check_number(put.transfer)
        fragments = self._waiting.get(put.transfer)
        if isinstance(fragments, Notify):
            raise Malformed(f"put {put.transfer} came twice")
        if fragments is None:
            fragments = self._waiting[put.transfer] = self._partial[put.transfer] = Fragments(put)
            self._note_known()
        fragments.claim(put)

    def may_land(self, put: Put) -> bool:
        """Whether the bytes of a fragment that came may be written now.

        Every overlapping put before it has.
        """
        if not put.nbytes:
            return True
        if put.transfer > self._known:
            return False
        begin, end = _extent(put)
        for number, fragments in self._partial.items():
            first, last = _extent(fragments.first)
            if number < put.transfer and begin < last and first < end:
                return False
        return True

    def fragment_done(self, put: Put) -> None:
        """That fragment is in place and authentic."""
        fragments = self._waiting[put.transfer]
        assert isinstance(fragments, Fragments)
        fragments.left -= 1
        if fragments.left == 0:
            del self._partial[put.transfer]

    def refuse(self, put: Put, reason: str) -> None:
        """That put is not to be published; its fragments are still counted."""
        fragments = self._waiting[put.transfer]
        assert isinstance(fragments, Fragments)
        fragments.refused = fragments.refused or reason

    def publish(self) -> Iterator[tuple[Put | Notify, str | None]]:
        """Yield each put that is due now, in order, with None to publish it or the reason of its refusal."""
        while (entry := self._waiting.get(self.published)) is not None:
            if isinstance(entry, Fragments):
                if entry.left:
                    return
                assert isinstance(entry.first, Put)
            record = entry.first if isinstance(entry, Fragments) else entry
            assert not isinstance(record, Data)
            del self._waiting[self.published]
            self.published += 1
            yield record, entry.refused if isinstance(entry, Fragments) else None

    @property
    def at_rest(self) -> bool:
        """Whether nothing has come that is not published."""
        return not self._waiting

    def go_on(self, published: int, acknowledged: int) -> None:
        """At rest: so many have been published meanwhile, and acknowledged to the peer."""
        self._known = self.published = published
        self.acknowledged = acknowledged

    @property
    def ack_due(self) -> bool:
        """Whether the peer does not know of all that is published."""
        return self.acknowledged < self.published

    def acknowledge(self) -> int:
        """Return how many puts are published or refused; the peer learns of it now."""
        self.acknowledged = self.published
        return self.acknowledged

    def check_invariants(self) -> None:
        """Waiting puts are bounded, unpublished, and cannot be published yet."""
        assert self.acknowledged <= self.published
        assert self.published <= self._known and self._known not in self._waiting
        assert self._partial == {
            n: s for n, s in self._waiting.items() if isinstance(s, Fragments) and s.left
        }, "what is partial is wrong"
        assert all(0 <= number - self.published < PUTS_AHEAD_MAX for number in self._waiting)
        first = self._waiting.get(self.published)
        assert first is None or (isinstance(first, Fragments) and first.left), "something waits for nothing"

    def _note_known(self) -> None:
        while self._known in self._waiting:
            self._known += 1

    def _check_number(self, number: int) -> None:
        if not 0 <= number - self.published < PUTS_AHEAD_MAX:
            raise Malformed(f"put {number} came, and {self.published} are published")


def _extent(fragment: Put | Data) -> tuple[int, int]:
    """The range of the owner's segment that a put writes."""
    assert isinstance(fragment, Put)
    begin = fragment.handle.offset + fragment.at
    return begin, begin + fragment.total


def _common(fragment: Put | Data) -> tuple[object, ...]:
    if isinstance(fragment, Data):
        return fragment.total, fragment.fragment_bytes
    return (
        fragment.handle,
        fragment.at,
        fragment.total,
        fragment.fragment_bytes,
        fragment.channel,
        fragment.value,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPathCounts:
    """The counts from which `_quick.QuickPuts` goes on, while there is nothing for the machine to do."""

    stripe: int
    """The number of the stripe that it uses."""
    puts: int
    """Ours so far."""
    acked: int
    """Of those, how many the peer has published."""
    awaited: int
    """Up to which transfers wait for acknowledgements."""
    published: int
    """The peer's that are."""
    acknowledged: int
    """Of those, how many have been acknowledged to the peer."""


@dataclass(slots=True)
class Outgoing:
    """A put of ours, or the answer to a peer's get, while it is cut and sent."""

    of: SourceKind
    number: int
    """The transfer, or the get."""
    total: int
    order: int = 0
    """Of a put: its number on the wire."""
    ask: PutAsked | NotifyAsked | None = None
    fragment_bytes: int = 0
    cut_bytes: int = 0
    unsent: int = 0
    """Records given to stripes and not sent."""
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
    fragments: Fragments | None = None
    asked: bool = False


@dataclass(slots=True)
class StripeState:
    """The records in flight on a stripe."""

    handed: deque[tuple[Record, Outgoing | None]] = field(default_factory=deque)
    """Given to the stripe and not sent."""
    handed_bytes: int = 0
    receiving: Record | None = None
    """The record whose payload is due."""
    held_back: bool = False
    """That payload has to wait for earlier puts."""
    goodbye_said: bool = False
    goodbye_sent: bool = False
    goodbye_heard: bool = False


def fragment_record(outgoing: Outgoing, offset: int, nbytes: int) -> Record:
    """The record of this fragment of it."""
    ask = outgoing.ask
    match ask:
        case NotifyAsked():
            return Notify(transfer=outgoing.order, channel=ask.channel, value=ask.value)
        case PutAsked():
            return Put(
                transfer=outgoing.order, handle=ask.handle, at=ask.at, total=ask.total, offset=offset,
                fragment_bytes=outgoing.fragment_bytes, nbytes=nbytes, channel=ask.channel, value=ask.value,
            )  # fmt: skip
        case None:
            return Data(
                transfer=outgoing.number, total=outgoing.total, fragment_bytes=outgoing.fragment_bytes,
                offset=offset, nbytes=nbytes,
            )  # fmt: skip
        case _:
            assert_never(ask)
