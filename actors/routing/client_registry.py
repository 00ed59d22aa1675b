"""The registry of external clients (sans-I/O): the processes that joined the cluster by way of this one.

A client is registered while it is linked with this process and has reported its addresses. Each request for a
notice of its end gets one, also if the client comes back with the same incarnation: references to its actors
become valid again then, as after a network partition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

HEEDED_MAX: Final = 16_384
"""Bound of pending notices of the ends of external clients."""
SEEN_MAX: Final = 4096
"""Guests that were in the book, the newest."""

# --- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLinked:
    """This incarnation of a process has a link to us."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """It has said where it listens; the driver keeps that."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The link to that incarnation has ended."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeWanted:
    """The holder of this ticket wants to know when that incarnation is over."""

    ticket: int
    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeDropped:
    """Not any more."""

    ticket: int


Event: TypeAlias = ClientLinked | Enrolled | Left | NoticeWanted | NoticeDropped

# --- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendNotice:
    """That incarnation is over, and why."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseNotice:
    """It cannot be waited for, and why."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Forget where that incarnation listens."""

    process: str
    incarnation: int


Action: TypeAlias = SendNotice | RefuseNotice | Forget


@dataclass(slots=True)
class Client:
    """A process that is linked with us. enrolled: whether it has said where it listens."""

    incarnation: int
    enrolled: bool = False


@dataclass(slots=True)
class ClientRegistry:
    """See the module. `handle` returns what the driver is to do, in order. linked: as many as there are
    links.
    """

    linked: dict[str, Client] = field(default_factory=dict[str, Client])
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    """The last incarnation of each that was in the book."""
    _heeded: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])

    def handle(self, event: Event) -> list[Action]:
        """Take an event."""
        match event:
            case ClientLinked(process=process, incarnation=incarnation):
                return self._linked(process, incarnation)
            case Enrolled(process=process, incarnation=incarnation):
                return self._enrolled(process, incarnation)
            case Left(process=process, incarnation=incarnation):
                client = self.linked.get(process)
                if client is None or client.incarnation != incarnation:
                    return []
                return self._strike(process)
            case NoticeWanted():
                return self._await_end(event)
            case NoticeDropped(ticket=ticket):
                self._heeded.pop(ticket, None)
                return []
            case _:
                assert_never(event)

    def incarnation_of(self, process: str) -> int:
        """Return the incarnation of a registered client, or 0."""
        client = self.linked.get(process)
        return client.incarnation if client is not None and client.enrolled else 0

    def gone(self, process: str, incarnation: int) -> str:
        """Return why that incarnation is known to be over; empty if it is not."""
        client = self.linked.get(process)
        if client is not None and client.incarnation >= incarnation:
            return (
                "" if client.incarnation == incarnation else f"{process} is incarnation {client.incarnation}"
            )
        return f"{process} has ended, or lost its link" if self._seen.get(process, 0) >= incarnation else ""

    def check_invariants(self) -> None:
        """Raise AssertionError if the machine contradicts itself."""
        assert len(self._heeded) <= HEEDED_MAX and len(self._seen) <= SEEN_MAX
        for ticket, (process, incarnation) in self._heeded.items():
            assert not self.gone(process, incarnation), (
                f"ticket {ticket} was not told: {self.gone(process, incarnation)}"
            )

    def _linked(self, process: str, incarnation: int) -> list[Action]:
        known = self.linked.get(process)
        if known is not None and known.incarnation >= incarnation:
            return []
        actions = [] if known is None else self._strike(process)
        self.linked[process] = Client(incarnation)
        return [*actions, *self._tell(process)]

    def _enrolled(self, process: str, incarnation: int) -> list[Action]:
        client = self.linked.get(process)
        if client is None or client.incarnation != incarnation:
            return []  # its link has ended meanwhile
        client.enrolled = True
        self._seen.pop(process, None)  # so that the newest are last
        self._seen[process] = incarnation
        while len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        return []

    def _strike(self, process: str) -> list[Action]:
        client = self.linked.pop(process)
        struck: list[Action] = (
            [Forget(process=process, incarnation=client.incarnation)] if client.enrolled else []
        )
        return [*struck, *self._tell(process)]  # also if only its last stay was in the book

    def _tell(self, process: str) -> list[Action]:
        actions: list[Action] = []
        for ticket, (name, incarnation) in list(self._heeded.items()):
            if name == process and (reason := self.gone(process, incarnation)):
                del self._heeded[ticket]
                actions.append(SendNotice(ticket=ticket, reason=reason))
        return actions

    def _await_end(self, event: NoticeWanted) -> list[Action]:
        reason = self.gone(event.process, event.incarnation)
        if reason:
            return [SendNotice(ticket=event.ticket, reason=reason)]
        if len(self._heeded) >= HEEDED_MAX:
            refusal = f"the ends of {HEEDED_MAX} processes are waited for"
            return [RefuseNotice(ticket=event.ticket, reason=refusal)]
        self._heeded[event.ticket] = (event.process, event.incarnation)
        return []
