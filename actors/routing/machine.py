"""The route machine (sans-I/O): links to processes outside of our views, and who waits for them.

Its driver (`routes`) locates a process, dials it, and reports the result. A link that the other side dialed
serves as well. Two processes that dial each other at once have two links: each keeps sending on the one that
it had first, so that no link in use is closed and messages stay in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias, assert_never

PROCESSES_MAX: Final = 256
"""Processes that are linked with, or sought, at once."""
TICKETS_MAX: Final = 4096
"""Messages and the like that wait for a link."""


class RefusalKind(Enum):
    """Why there is no link."""

    LOST = "lost"
    DEAD = "dead"
    TOO_MANY = "too many"


# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A link to a process is wanted. incarnation: which of its incarnations, 0 for any."""

    process: str
    incarnation: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The holder of this ticket waits no more."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFound:
    """The process listens; the driver keeps where."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFound:
    """It does not listen, as far as is known, or could not be dialed."""

    process: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLinked:
    """A link to it carries our messages from now on, dialed by either."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnded:
    """That link has ended."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The cluster says that this incarnation is over."""

    process: str
    incarnation: int
    reason: str


Event: TypeAlias = Wanted | GivenUp | ProcessFound | NotFound | ProcessLinked | LinkEnded | Gone

# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seek:
    """Find out where it listens: `ProcessFound` or `NotFound` must follow, within a bounded time."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Dial it: `ProcessLinked` or `NotFound` must follow, within a bounded time."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrive:
    """There is a link."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseLink:
    """There is none, and why."""

    ticket: int
    process: str
    kind: RefusalKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitEnd:
    """Have the cluster tell when this incarnation is over."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Close the links to it."""

    process: str
    incarnation: int
    reason: str


Action: TypeAlias = Seek | Dial | Arrive | RefuseLink | AwaitEnd | Detach


class SearchPhase(Enum):
    """The activity under way for a process."""

    IDLE = "idle"
    SEEKING = "seeking"
    DIALING = "dialing"


@dataclass(slots=True)
class RouteState:
    """A process. linked: the incarnation that is linked, or 0; waiting: the incarnation wanted, by ticket."""

    phase: SearchPhase = SearchPhase.IDLE
    linked: int = 0
    waiting: dict[int, int] = field(default_factory=dict[int, int])


class RouteMachine:
    """See the module. `handle` returns what the driver is to do, in order."""

    def __init__(self) -> None:
        self.places: dict[str, RouteState] = {}
        self._tickets: dict[int, str] = {}

    def handle(self, event: Event) -> list[Action]:
        """Take an event."""
        match event:
            case Wanted():
                return self._wanted(event)
            case GivenUp(ticket=ticket):
                process = self._tickets.pop(ticket, None)
                if process is not None:
                    del self.places[process].waiting[ticket]
                return []
            case ProcessFound():
                return self._found(event)
            case NotFound(process=process, reason=reason):
                return self._not_found(process, reason)
            case ProcessLinked(process=process, incarnation=incarnation):
                return self._linked(process, incarnation)
            case LinkEnded(process=process, incarnation=incarnation):
                place = self.places.get(process)
                if place is not None and place.linked == incarnation:
                    place.linked = 0
                    self._tidy(process, place)
                return []
            case Gone(process=process, incarnation=incarnation, reason=reason):
                place = self.places.get(process)
                if place is None or place.linked != incarnation:
                    return []
                return [Detach(process=process, incarnation=incarnation, reason=reason)]
            case _:
                assert_never(event)

    def has_room(self, process: str) -> bool:
        """Return whether a link that this process has dialed may be taken."""
        return process in self.places or len(self.places) < PROCESSES_MAX

    def check_invariants(self) -> None:
        """Raise AssertionError if the machine contradicts itself."""
        waiting = {ticket: process for process, place in self.places.items() for ticket in place.waiting}
        assert waiting == self._tickets, f"tickets {self._tickets} are held as {waiting}"
        assert len(waiting) <= TICKETS_MAX
        for process, place in self.places.items():
            assert place.linked or place.phase is not SearchPhase.IDLE, f"nothing is under way for {process}"
            assert not place.waiting or place.phase is not SearchPhase.IDLE, f"nobody seeks {process}"
            served = [
                incarnation
                for incarnation in place.waiting.values()
                if place.linked and incarnation in (0, place.linked)
            ]
            assert not served, f"{process} is linked, and is waited for"

    def _wanted(self, event: Wanted) -> list[Action]:
        process, incarnation, ticket = event.process, event.incarnation, event.ticket
        place = self.places.get(process)
        if place is not None and place.linked and incarnation in (0, place.linked):
            return [Arrive(ticket=ticket)]
        if place is not None and incarnation < place.linked:
            return [_dead(ticket, process, place.linked)]
        if place is None and len(self.places) >= PROCESSES_MAX:
            reason = f"{PROCESSES_MAX} processes beyond the own view are linked with already"
            return [RefuseLink(ticket=ticket, process=process, kind=RefusalKind.TOO_MANY, reason=reason)]
        if len(self._tickets) >= TICKETS_MAX:
            reason = f"{TICKETS_MAX} messages wait for links already"
            return [RefuseLink(ticket=ticket, process=process, kind=RefusalKind.TOO_MANY, reason=reason)]
        if place is None:
            place = self.places[process] = RouteState()
        place.waiting[ticket] = incarnation
        self._tickets[ticket] = process
        if place.phase is not SearchPhase.IDLE:
            return []
        place.phase = SearchPhase.SEEKING
        return [Seek(process=process)]

    def _found(self, event: ProcessFound) -> list[Action]:
        process, incarnation = event.process, event.incarnation
        place = self.places.get(process)
        if place is None or place.phase is not SearchPhase.SEEKING:
            return []
        actions: list[Action] = []
        for ticket, wanted in list(place.waiting.items()):
            if wanted and wanted < incarnation:
                actions.append(_dead(ticket, process, incarnation))
            elif wanted > incarnation:
                reason = f"its incarnation {wanted} is not known yet, only {incarnation}"
                actions.append(
                    RefuseLink(ticket=ticket, process=process, kind=RefusalKind.LOST, reason=reason)
                )
            else:
                continue
            self._forget(place, ticket)
        if place.waiting:
            place.phase = SearchPhase.DIALING
            return [*actions, Dial(process=process)]
        place.phase = SearchPhase.IDLE
        self._tidy(process, place)
        return actions

    def _not_found(self, process: str, reason: str) -> list[Action]:
        place = self.places.get(process)
        if place is None:
            return []
        actions: list[Action] = [
            RefuseLink(ticket=ticket, process=process, kind=RefusalKind.LOST, reason=reason)
            for ticket in place.waiting
        ]
        for ticket in list(place.waiting):
            self._forget(place, ticket)
        place.phase = SearchPhase.IDLE
        self._tidy(process, place)
        return actions

    def _linked(self, process: str, incarnation: int) -> list[Action]:
        place = self.places.setdefault(process, RouteState())
        place.linked = incarnation
        actions: list[Action] = [AwaitEnd(process=process, incarnation=incarnation)]
        for ticket, wanted in list(place.waiting.items()):
            if wanted in (0, incarnation):
                actions.append(Arrive(ticket=ticket))
            elif wanted < incarnation:
                actions.append(_dead(ticket, process, incarnation))
            else:
                continue
            self._forget(place, ticket)
        if place.phase is SearchPhase.DIALING:
            place.phase = SearchPhase.IDLE
        # For a later incarnation than the one that was dialed.
        if place.waiting and place.phase is SearchPhase.IDLE:
            place.phase = SearchPhase.SEEKING
            actions.append(Seek(process=process))
        return actions

    def _forget(self, place: RouteState, ticket: int) -> None:
        del place.waiting[ticket], self._tickets[ticket]

    def _tidy(self, process: str, place: RouteState) -> None:
        if not place.linked and place.phase is SearchPhase.IDLE:
            del self.places[process]


def _dead(ticket: int, process: str, incarnation: int) -> RefuseLink:
    reason = f"{process} is now incarnation {incarnation}"
    return RefuseLink(ticket=ticket, process=process, kind=RefusalKind.DEAD, reason=reason)
