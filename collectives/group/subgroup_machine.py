"""Bring the members of a new sub-group to one exchange of offers, though some give up and call again.

A member's calls for one set of members are numbered, and it makes one offer for a number at most. So the
offers of all members for a number are the same wherever they have come, and who has all of them may act on
them. A number for which a member has given up, or that it has passed over, cannot be completed any more by
who lacks its offer: a call goes on to the next number that can. So counts that differ, since one member's
call ended and another's did not, are made equal by the next call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from zbmd.collectives.programs.channels import Offer
from zbmd.transport.errors import LocalProtocolError

NUMBER_MAX = 2**32 - 1
OFFERS_KEPT = 2
"""Of a member: one for a sub-group that we are still making, and one for the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """This process makes a sub-group, and can give it this."""

    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A member's offer has come."""

    source: int
    number: int
    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """A member waits no more: what it has offered for this number does not count."""

    source: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """The call of this process has ended by itself."""


MeetingEvent: TypeAlias = Called | Offered | Withdrawn | GaveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class TellOffer:
    """Tell all others."""

    number: int
    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class TellWithdrawn:
    """Tell all others that the call for this number is over here."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """All offers for this number are here, in the members' order."""

    number: int
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A member that we have met for this number had given up by then: it will not open the sub-group."""

    number: int
    source: int


MeetingAction: TypeAlias = TellOffer | TellWithdrawn | Met | Left


class MeetingMachine:
    """The sub-groups of one set of members in one view, one after the other, from the side of `rank`."""

    def __init__(self, rank: int, members: tuple[int, ...]) -> None:
        self._rank = rank
        self._members = members
        self._others = tuple(member for member in members if member != rank)
        self._next = 0
        self._number: int | None = None
        self._offer: Offer | None = None
        self._heard: dict[int, dict[int, Offer]] = {member: {} for member in self._others}
        self._latest = dict.fromkeys(self._others, -1)

    @property
    def missing(self) -> tuple[int, ...]:
        """The members whose offer the call under way lacks."""
        if self._number is None:
            return ()
        return tuple(member for member in self._others if self._number not in self._heard[member])

    def handle(self, event: MeetingEvent, *, now_ns: int) -> list[MeetingAction]:
        """Take one event, return the actions to perform.

        Raises `LocalProtocolError` on a second call at once, and when numbers are used up.
        """
        match event:
            case Called(offer=offer):
                if self._number is not None:
                    raise LocalProtocolError(f"a sub-group of {self._members} is being made already")
                self._number, self._offer = self._next, offer
                return [*self._go_on(offered=False)]
            case Offered(source=source, number=number, offer=offer):
                self._hear(source, number, offer)
                return self._go_on(offered=True)
            case Withdrawn(source=source, number=number):
                if source not in self._heard:
                    return []
                self._latest[source] = max(self._latest[source], number)
                self._heard[source].pop(number, None)
                if number < self._next and number != self._number:
                    return [Left(number=number, source=source), *self._go_on(offered=True)]
                return self._go_on(offered=True)
            case GaveUp():
                if self._number is None:
                    return []
                number, self._number, self._offer = self._number, None, None
                self._next = number + 1
                return [TellWithdrawn(number=number)]
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if what is kept grows, or a call waits for what cannot come."""
        assert all(len(offers) <= OFFERS_KEPT for offers in self._heard.values())
        assert (self._number is None) == (self._offer is None)
        assert self._number is None or (not self._is_dead(self._number) and self.missing)

    def _hear(self, source: int, number: int, offer: Offer) -> None:
        if source not in self._heard or number <= self._latest[source]:
            return  # sent before
        self._latest[source] = number
        offers = self._heard[source]
        offers[number] = offer
        for old in sorted(offers)[:-OFFERS_KEPT]:
            del offers[old]

    def _is_dead(self, number: int) -> bool:
        return any(self._latest[m] >= number and number not in self._heard[m] for m in self._others)

    def _go_on(self, *, offered: bool) -> list[MeetingAction]:
        number, offer = self._number, self._offer
        if number is None or offer is None:
            return []
        first = number
        while self._is_dead(number):
            # Each turn passes what at least one member has sent last.
            number = min(
                latest if latest in self._heard[m] and latest > number else latest + 1
                for m, latest in self._latest.items()
                if latest >= number and number not in self._heard[m]
            )
        if number > NUMBER_MAX:
            raise LocalProtocolError(f"the sub-groups of {self._members} in this view are used up")
        self._number = number
        actions: list[MeetingAction] = []
        if not offered or number != first:
            actions.append(TellOffer(number=number, offer=offer))
        if not self.missing:
            offers = tuple(offer if m == self._rank else self._heard[m][number] for m in self._members)
            actions.append(Met(number=number, offers=offers))
            self._next, self._number, self._offer = number + 1, None, None
            for heard in self._heard.values():
                for old in [n for n in heard if n <= number]:
                    del heard[old]
        return actions
