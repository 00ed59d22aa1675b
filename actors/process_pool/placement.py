"""The machine of places (sans-I/O): which host or device a supervised child runs on next.

A child that failed goes elsewhere if it can: to the place with the fewest children, a place where it has not
just failed before one where it has. A place where children fail too often is in quarantine: nobody goes there
until a probe finds it healthy; each probe that does not doubles the time to the next, up to a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError

PLACES_MAX = 4096
FAILURES_MAX = 1000
DOUBLINGS_MAX = 10


class PlacementState(Enum):
    """Whether children may go there."""

    OPEN = "open"
    QUARANTINED = "quarantined"  # a timer runs
    PROBED = "probed"  # a probe runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A host or a device. capacity: children at once."""

    name: str
    capacity: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A child starts and wants a place; answered by `Assigned` or `Refused`."""

    child: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A child has ended. failed: by a fault, of which its place may be the cause."""

    child: str
    failed: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEnded:
    """The time of the place's quarantine is over."""

    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The result of a probe; problem: empty if the place is healthy."""

    place: str
    problem: str


Event: TypeAlias = Wanted | Released | QuarantineEnded | Probed


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The child runs there."""

    child: str
    place: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """There is no place for the child."""

    child: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Nobody goes there for now; deliver `QuarantineEnded` at `until_ns`."""

    place: str
    until_ns: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Find out whether the place is healthy; deliver `Probed`."""

    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """The place is healthy again; nothing to perform."""

    place: str


Action: TypeAlias = Assigned | Refused | Quarantined | Probe | Reopened


@dataclass(slots=True)
class _Place:
    place: Placement
    state: PlacementState = PlacementState.OPEN
    children: set[str] = field(default_factory=set[str])
    failures_ns: deque[int] = field(default_factory=deque[int])
    quarantines: int = 0  # in a row


class PlacementMachine:
    """Decides for an ordered set of places.

    `failures` within `period_ns` put a place into quarantine, for `quarantine_ns` the first time.
    """

    def __init__(
        self,
        places: Sequence[Placement],
        *,
        failures: int = 2,
        period_ns: int = 60_000_000_000,
        quarantine_ns: int = 5_000_000_000,
    ) -> None:
        if not 1 <= len(places) <= PLACES_MAX or any(place.capacity < 1 for place in places):
            raise LocalProtocolError(f"give 1 to {PLACES_MAX} places, each with room for a child")
        if not 1 <= failures <= FAILURES_MAX or period_ns <= 0 or quarantine_ns <= 0:
            raise LocalProtocolError(
                f"failures {failures} in {period_ns} ns, quarantine of {quarantine_ns} ns: give "
                f"1..{FAILURES_MAX}, > 0, > 0"
            )
        self._places = {place.name: _Place(place) for place in places}
        if len(self._places) != len(places):
            raise LocalProtocolError(f"places must differ: {[place.name for place in places]}")
        self._failures = failures
        self._period_ns = period_ns
        self._quarantine_ns = quarantine_ns
        self._where: dict[str, str] = {}
        self._failed_at: dict[str, str] = {}
        """By child, where it failed last; as many as there are children that did."""

    @property
    def states(self) -> dict[str, PlacementState]:
        """Return how the places stand, in order."""
        return {name: place.state for name, place in self._places.items()}

    def where(self, child: str) -> str | None:
        """Return where the child is."""
        return self._where.get(child)

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one event, return what to do. Raises `LocalProtocolError`."""
        match event:
            case Wanted():
                return self._want(event.child)
            case Released():
                return self._release(event, now_ns)
            case QuarantineEnded():
                place = self._in(event.place, PlacementState.QUARANTINED)
                place.state = PlacementState.PROBED
                return [Probe(place=event.place)]
            case Probed():
                return self._probed(event, now_ns)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        assert {c: p for p, place in self._places.items() for c in place.children} == self._where
        for place in self._places.values():
            assert len(place.children) <= place.place.capacity
            assert len(place.failures_ns) < self._failures or place.state is not PlacementState.OPEN

    def _want(self, child: str) -> list[Action]:
        if child in self._where:
            raise LocalProtocolError(f"{child} is at {self._where[child]}")
        free = [
            place
            for place in self._places.values()
            if place.state is PlacementState.OPEN and len(place.children) < place.place.capacity
        ]
        if not free:
            states = ", ".join(
                f"{name} {p.state.value} with {len(p.children)}" for name, p in self._places.items()
            )
            return [Refused(child=child, reason=f"no place for {child}: {states[:500]}")]
        failed_at = self._failed_at.get(child)
        best = min(free, key=lambda place: (place.place.name == failed_at, len(place.children)))
        elsewhere = failed_at is not None and best.place.name != failed_at
        best.children.add(child)
        self._where[child] = best.place.name
        reason = f"it failed at {failed_at}" if elsewhere else "it has the most room"
        return [Assigned(child=child, place=best.place.name, reason=reason)]

    def _release(self, event: Released, now_ns: int) -> list[Action]:
        name = self._where.pop(event.child, None)
        if name is None:
            raise LocalProtocolError(f"{event.child} is nowhere")
        place = self._places[name]
        place.children.remove(event.child)
        if not event.failed:
            self._failed_at.pop(event.child, None)
            return []
        self._failed_at[event.child] = name
        while place.failures_ns and place.failures_ns[0] < now_ns - self._period_ns:
            place.failures_ns.popleft()
            place.quarantines = 0
        place.failures_ns.append(now_ns)
        if place.state is not PlacementState.OPEN or len(place.failures_ns) < self._failures:
            return []
        return self._quarantine(name, f"{len(place.failures_ns)} failures, the last: {event.reason}", now_ns)

    def _probed(self, event: Probed, now_ns: int) -> list[Action]:
        place = self._in(event.place, PlacementState.PROBED)
        if event.problem:
            return self._quarantine(event.place, f"a probe failed: {event.problem}", now_ns)
        place.state = PlacementState.OPEN
        place.failures_ns.clear()
        return [Reopened(place=event.place)]

    def _quarantine(self, name: str, reason: str, now_ns: int) -> list[Action]:
        place = self._places[name]
        place.state = PlacementState.QUARANTINED
        until_ns = now_ns + (self._quarantine_ns << min(place.quarantines, DOUBLINGS_MAX))
        place.quarantines += 1
        place.failures_ns.clear()
        return [Quarantined(place=name, until_ns=until_ns, reason=reason)]

    def _in(self, name: str, state: PlacementState) -> _Place:
        place = self._places.get(name)
        if place is None or place.state is not state:
            raise LocalProtocolError(f"{name} is not {state.value}")
        return place
