"""Sans-I/O: which parts of a peer's transfers have come, and which of its puts may be published.

Puts and notifications carry consecutive numbers, and are published in that order, each once it is whole. On
several lanes a put can overtake an earlier one; it is received at once where it cannot make a difference, and
held back while an earlier one that is not whole, or not even known, may write the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbmd.transport.bulk.records import PUTS_AHEAD_MAX, Data, Malformed, Notify, Put


class Stripes:
    """Which stripes of one transfer have come. record: the first that comes; the others must fit it."""

    __slots__ = ("_claimed", "first", "left", "refused")

    def __init__(self, record: Put | Data) -> None:
        self.first = record
        self.left = max(1, -(-record.total // record.stripe_bytes))
        """Stripes that are not in place."""
        self.refused: str | None = None
        """Why it is not to be published."""
        self._claimed = 0
        """Bit i: stripe i has come or is coming."""

    def claim(self, stripe: Put | Data) -> None:
        """One more is coming. Raises `Malformed` if it has come already or does not fit the first."""
        if _common(stripe) != _common(self.first):
            raise Malformed(f"the stripes of transfer {stripe.transfer} do not fit each other")
        bit = 1 << stripe.offset // stripe.stripe_bytes
        if self._claimed & bit:
            raise Malformed(f"the stripe at {stripe.offset} of transfer {stripe.transfer} came twice")
        self._claimed |= bit


class Arrivals:
    """The peer's puts and notifications, from their arrival to their publication."""

    def __init__(self) -> None:
        self._waiting: dict[int, Stripes | Notify] = {}
        self._partial: dict[int, Stripes] = {}
        """Those of them of which stripes are missing."""
        self._known = 0
        """Of all puts before this number, something has come."""
        self._published = 0
        self._told = 0
        """Of `_published`, what the peer has been told."""

    @property
    def published(self) -> int:
        """How many puts are published."""
        return self._published

    def notify(self, record: Notify) -> None:
        """A notification has come. Raises `Malformed` if its number is out of range or came before."""
        self._check_number(record.transfer)
        if record.transfer in self._waiting:
            raise Malformed(f"put {record.transfer} came twice")
        self._waiting[record.transfer] = record
        self._note_known()

    def stripe(self, put: Put) -> None:
        """A stripe is coming. Raises `Malformed` as `notify` and `Stripes.claim` do."""
        self._check_number(put.transfer)
        stripes = self._waiting.get(put.transfer)
        if isinstance(stripes, Notify):
            raise Malformed(f"put {put.transfer} came twice")
        if stripes is None:
            stripes = self._waiting[put.transfer] = self._partial[put.transfer] = Stripes(put)
            self._note_known()
        stripes.claim(put)

    def may_land(self, put: Put) -> bool:
        """Whether the bytes of a stripe that came may be written now: every overlapping put before it has."""
        if not put.nbytes:
            return True
        if put.transfer > self._known:
            return False
        begin, end = _extent(put)
        for number, stripes in self._partial.items():
            first, last = _extent(stripes.first)
            if number < put.transfer and begin < last and first < end:
                return False
        return True

    def stripe_done(self, put: Put) -> None:
        """That stripe is in place and authentic."""
        stripes = self._waiting[put.transfer]
        assert isinstance(stripes, Stripes)
        stripes.left -= 1
        if stripes.left == 0:
            del self._partial[put.transfer]

    def refuse(self, put: Put, reason: str) -> None:
        """That put is not to be published; its stripes are still counted."""
        stripes = self._waiting[put.transfer]
        assert isinstance(stripes, Stripes)
        stripes.refused = stripes.refused or reason

    def publish(self) -> Iterator[tuple[Put | Notify, str | None]]:
        """What is due now and was not before, in order: to publish, or why it is refused."""
        while (entry := self._waiting.get(self._published)) is not None:
            if isinstance(entry, Stripes):
                if entry.left:
                    return
                assert isinstance(entry.first, Put)
            record = entry.first if isinstance(entry, Stripes) else entry
            assert not isinstance(record, Data)
            del self._waiting[self._published]
            self._published += 1
            yield record, entry.refused if isinstance(entry, Stripes) else None

    @property
    def at_rest(self) -> bool:
        """Whether nothing has come that is not published."""
        return not self._waiting

    @property
    def told(self) -> int:
        """Of what is published, how much the peer has been told of."""
        return self._told

    def go_on(self, published: int, told: int) -> None:
        """At rest: so much has been published meanwhile, and the peer told of."""
        self._known = self._published = published
        self._told = told

    @property
    def ack_due(self) -> bool:
        """Whether the peer does not know of all that is published."""
        return self._told < self._published

    def acknowledge(self) -> int:
        """How many puts are published or refused; the peer is told now."""
        self._told = self._published
        return self._told

    def check_invariants(self) -> None:
        """What waits is bounded, unpublished, and cannot be published."""
        assert self._told <= self._published
        assert self._published <= self._known and self._known not in self._waiting
        assert self._partial == {
            n: s for n, s in self._waiting.items() if isinstance(s, Stripes) and s.left
        }, "what is partial is wrong"
        assert all(0 <= number - self._published < PUTS_AHEAD_MAX for number in self._waiting)
        first = self._waiting.get(self._published)
        assert first is None or (isinstance(first, Stripes) and first.left), "something waits for nothing"

    def _note_known(self) -> None:
        while self._known in self._waiting:
            self._known += 1

    def _check_number(self, number: int) -> None:
        if not 0 <= number - self._published < PUTS_AHEAD_MAX:
            raise Malformed(f"put {number} came, and {self._published} are published")


def _extent(stripe: Put | Data) -> tuple[int, int]:
    """Where a put writes in the owner's segment."""
    assert isinstance(stripe, Put)
    begin = stripe.handle.offset + stripe.at
    return begin, begin + stripe.total


def _common(stripe: Put | Data) -> tuple[object, ...]:
    if isinstance(stripe, Data):
        return stripe.total, stripe.stripe_bytes
    return stripe.handle, stripe.at, stripe.total, stripe.stripe_bytes, stripe.channel, stripe.value
