"""Who is in the cluster by way of this process: the processes that it says where to find, and when they go.

A machine: a guest is in the book for as long as it is linked with us and has said where it listens. Whoever
wants to be told of its end is told once, also if it comes back under the same life: as after a network that
was cut, references to its actors are good again then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

HEEDED_MAX: Final = 16_384
"""Ends of guests that are waited for, by all who ask."""
SEEN_MAX: Final = 4096
"""Guests that were in the book, the newest."""

# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """This life of a process has a link to us."""

    process: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """It has said where it listens; the driver keeps that."""

    process: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The link to that life has ended."""

    process: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heeded:
    """Whoever has this ticket wants to know when that life is over."""

    ticket: int
    process: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unheeded:
    """Not any more."""

    ticket: int


Event: TypeAlias = Linked | Enrolled | Left | Heeded | Unheeded

# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """That life is over, and why."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """It cannot be waited for, and why."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What was kept of where that life listens is void."""

    process: str
    life: int


Action: TypeAlias = Tell | Refuse | Strike


@dataclass(slots=True)
class Guest:
    """A process that is linked with us. enrolled: whether it has said where it listens."""

    life: int
    enrolled: bool = False


@dataclass(slots=True)
class GuestBook:
    """See the module. `handle` returns what the driver is to do, in order. linked: as many as there are
    links.
    """

    linked: dict[str, Guest] = field(default_factory=dict[str, Guest])
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    """The last life of each that was in the book."""
    _heeded: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])

    def handle(self, event: Event) -> list[Action]:
        """Take an event."""
        match event:
            case Linked(process=process, life=life):
                return self._linked(process, life)
            case Enrolled(process=process, life=life):
                return self._enrolled(process, life)
            case Left(process=process, life=life):
                guest = self.linked.get(process)
                if guest is None or guest.life != life:
                    return []
                return self._strike(process)
            case Heeded():
                return self._heed(event)
            case Unheeded(ticket=ticket):
                self._heeded.pop(ticket, None)
                return []
            case _:
                assert_never(event)

    def life_of(self, process: str) -> int:
        """Return the life of a guest that is in the book, or 0."""
        guest = self.linked.get(process)
        return guest.life if guest is not None and guest.enrolled else 0

    def gone(self, process: str, life: int) -> str:
        """Return why that life is known to be over; empty if it is not."""
        guest = self.linked.get(process)
        if guest is not None and guest.life >= life:
            return "" if guest.life == life else f"{process} is incarnation {guest.life}"
        return f"{process} has ended, or lost its link" if self._seen.get(process, 0) >= life else ""

    def check_invariants(self) -> None:
        """Raise AssertionError if the machine contradicts itself."""
        assert len(self._heeded) <= HEEDED_MAX and len(self._seen) <= SEEN_MAX
        for ticket, (process, life) in self._heeded.items():
            assert not self.gone(process, life), f"ticket {ticket} was not told: {self.gone(process, life)}"

    def _linked(self, process: str, life: int) -> list[Action]:
        known = self.linked.get(process)
        if known is not None and known.life >= life:
            return []
        actions = [] if known is None else self._strike(process)
        self.linked[process] = Guest(life)
        return [*actions, *self._tell(process)]

    def _enrolled(self, process: str, life: int) -> list[Action]:
        guest = self.linked.get(process)
        if guest is None or guest.life != life:
            return []  # its link has ended meanwhile
        guest.enrolled = True
        self._seen.pop(process, None)  # so that the newest are last
        self._seen[process] = life
        while len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        return []

    def _strike(self, process: str) -> list[Action]:
        guest = self.linked.pop(process)
        struck: list[Action] = [Strike(process=process, life=guest.life)] if guest.enrolled else []
        return [*struck, *self._tell(process)]  # also if only its last stay was in the book

    def _tell(self, process: str) -> list[Action]:
        actions: list[Action] = []
        for ticket, (name, life) in list(self._heeded.items()):
            if name == process and (reason := self.gone(process, life)):
                del self._heeded[ticket]
                actions.append(Tell(ticket=ticket, reason=reason))
        return actions

    def _heed(self, event: Heeded) -> list[Action]:
        reason = self.gone(event.process, event.life)
        if reason:
            return [Tell(ticket=event.ticket, reason=reason)]
        if len(self._heeded) >= HEEDED_MAX:
            refusal = f"the ends of {HEEDED_MAX} processes are waited for"
            return [Refuse(ticket=event.ticket, reason=refusal)]
        self._heeded[event.ticket] = (event.process, event.life)
        return []
