"""Sans-I/O matching of tagged messages with posted receives.

Messages from one member to another are numbered and stay in order; a receive takes the first message that has
arrived and fits, and receives are served in the order in which they were posted (MPI's non-overtaking rule).
A sender has at most `UNTAKEN_MAX` untaken messages with one member, so what a member must buffer is bounded
whatever the receiver does.

If a member becomes unreachable, sends to it fail, and so do receives from it that no message fits; messages
that have arrived can still be taken. A receive from any source could wait for an absent member. Each such end
is therefore reported to the receives from any source that wait, otherwise to the next one that finds nothing;
a repeated call waits for the remaining members. (As in MPI's ULFM: Bland et al., "Post-failure recovery of
MPI communication capability", IJHPCA 2013.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

UNTAKEN_MAX = 64
"""Untaken messages of one member to another."""
WAITING_MAX = 16_384
"""Waiting sends, or receives, of one member."""


class Cause(Enum):
    """Why a send or a receive fails."""

    LOST = "lost"
    """The member, or the link to it, was lost."""
    LEFT = "left"
    """The member has closed the group."""
    ABSENT = "absent"
    """There is no such member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPosted:
    """A send is posted; `key` belongs to the driver."""

    key: int
    to: int
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivePosted:
    """A receive is posted; `source` or `tag` None: any."""

    key: int
    source: int | None
    tag: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveWithdrawn:
    """A receive is cancelled; ignored if it has been served."""

    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A member's message arrived, its `number`-th to this member."""

    source: int
    number: int
    tag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """A matched message was received completely."""

    source: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveBack:
    """A matched message was not taken: it goes to the next receive that fits."""

    source: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenThere:
    """A member has received all of our `number`-th message to it."""

    by: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft:
    """The member has closed the group, and everything that it sent has arrived."""

    source: int


TagEvent: TypeAlias = SendPosted | ReceivePosted | ReceiveWithdrawn | Arrived | Took | GaveBack | TakenThere


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmit:
    """Send this message now."""

    key: int
    to: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """This message goes to the receive under `key`."""

    key: int
    source: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellTaken:
    """Tell a member that its message was received."""

    to: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The member has received the message."""

    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailSend:
    """The send under `key` fails, because of rank `to`."""

    key: int
    to: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class FailReceive:
    """The receive under `key` fails, because of these ranks."""

    key: int
    ranks: tuple[int, ...]
    cause: Cause


TagAction: TypeAlias = Transmit | Match | TellTaken | Sent | FailSend | FailReceive


@dataclass(slots=True)
class Towards:
    """The state of messages to one member."""

    numbered: int = 0
    untaken: dict[int, int] = field(default_factory=dict[int, int])
    waiting: deque[int] = field(default_factory=deque[int])


@dataclass(slots=True)
class From:
    """The state of messages from one member."""

    numbered: int = 0
    matched: dict[int, Arrived] = field(default_factory=dict[int, Arrived])


class TagMatcher(ABC):
    """The matching of one member; see `TagMachine`, and `elastic_machine` for several epochs."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self._towards = {member: Towards() for member in members}
        self._from = {member: From() for member in members}
        self._order: dict[tuple[int, int], int] = {}
        """For each message that is here and untaken: how many had arrived before it."""
        self._arrivals = 0
        self._unexpected: list[Arrived] = []
        self._receives: list[ReceivePosted] = []
        self._untold: dict[int, Cause] = {}
        """Ends that no receive from any source has reported."""

    @abstractmethod
    def _cause(self, rank: int) -> Cause | None:
        """Return why this rank is unreachable; None if it is reachable, or may become so."""

    @property
    def unexpected(self) -> int:
        """Return the number of messages that no receive has asked for."""
        return len(self._unexpected)

    def take(self, event: TagEvent) -> list[TagAction]:
        """Take an event; return the actions to perform, in order."""
        match event:
            case SendPosted():
                return self._send(event)
            case ReceivePosted():
                return self._receive(event)
            case ReceiveWithdrawn(key=key):
                self._receives = [posted for posted in self._receives if posted.key != key]
                return []
            case Arrived():
                return self._arrived(event)
            case Took(source=source, number=number):
                del self._from[source].matched[number], self._order[source, number]
                return [TellTaken(to=source, number=number)]
            case GaveBack(source=source, number=number):
                return self._offer(self._from[source].matched.pop(number))
            case TakenThere():
                return self._taken(event)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        held = dict.fromkeys(self._from, 0)
        for message in self._unexpected:
            held[message.source] += 1
        for member, source in self._from.items():
            assert held[member] + len(source.matched) <= UNTAKEN_MAX, f"too much of {member} is here"
        for member, towards in self._towards.items():
            assert len(towards.untaken) <= UNTAKEN_MAX, f"too much is on its way to {member}"
            full = len(towards.untaken) == UNTAKEN_MAX
            assert not towards.waiting or full or not self._is_open(member), f"{member} could get more"
        assert not any(_fits(r, m) for r in self._receives for m in self._unexpected), "a match is missed"

    def _send(self, event: SendPosted) -> list[TagAction]:
        cause = self._cause(event.to)
        if cause is not None:
            return [FailSend(key=event.key, to=event.to, cause=cause)]
        towards = self._towards[event.to]
        if len(towards.waiting) >= WAITING_MAX:
            raise LocalProtocolError(f"{WAITING_MAX} messages to rank {event.to} wait: it takes none")
        towards.waiting.append(event.key)
        return self._transmit(event.to)

    def _is_open(self, to: int) -> bool:
        """Return whether messages may be sent to this member now."""
        return True

    def _transmit(self, to: int) -> list[TagAction]:
        towards, actions = self._towards[to], list[TagAction]()
        while self._is_open(to) and towards.waiting and len(towards.untaken) < UNTAKEN_MAX:
            towards.numbered += 1
            towards.untaken[towards.numbered] = key = towards.waiting.popleft()
            actions.append(Transmit(key=key, to=to, number=towards.numbered))
        return actions

    def _taken(self, event: TakenThere) -> list[TagAction]:
        towards = self._towards.get(event.by)
        if towards is None or event.number not in towards.untaken:
            raise RemoteProtocolError(f"rank {event.by} took message {event.number}, which it never had")
        done = Sent(key=towards.untaken.pop(event.number))
        return [done, *self._transmit(event.by)]

    def _receive(self, event: ReceivePosted) -> list[TagAction]:
        cause = None if event.source is None else self._cause(event.source)
        found = self._find(event)
        if found is not None:
            return [found]
        if event.source is None and self._untold:
            untold, self._untold = self._untold, {}
            worst = Cause.LOST if Cause.LOST in untold.values() else Cause.LEFT
            return [FailReceive(key=event.key, ranks=tuple(sorted(untold)), cause=worst)]
        if event.source is not None and cause is not None:
            return [FailReceive(key=event.key, ranks=(event.source,), cause=cause)]
        if len(self._receives) >= WAITING_MAX:
            raise LocalProtocolError(f"{WAITING_MAX} receives wait already")
        self._receives.append(event)
        return []

    def _fail_waits(self, rank: int, cause: Cause) -> list[TagAction]:
        """Fail what waits for an unreachable member. Messages of it that have arrived can still be taken."""
        towards, self._towards[rank] = self._towards[rank], Towards()
        keys = [*towards.untaken.values(), *towards.waiting]
        actions: list[TagAction] = [FailSend(key=key, to=rank, cause=cause) for key in keys]
        failing = [posted for posted in self._receives if posted.source in (None, rank)]
        self._receives = [posted for posted in self._receives if posted.source not in (None, rank)]
        actions += [FailReceive(key=posted.key, ranks=(rank,), cause=cause) for posted in failing]
        if all(posted.source is not None for posted in failing):
            self._untold[rank] = cause
        return actions

    def _forget(self, source: int, number: int) -> None:
        """Forget a matched message that is no longer here."""
        if source in self._from and self._from[source].matched.pop(number, None) is not None:
            del self._order[source, number]

    def _find(self, event: ReceivePosted) -> Match | None:
        """Match it with the first message that is here and fits."""
        for place, message in enumerate(self._unexpected):
            if _fits(event, message):
                del self._unexpected[place]
                return self._match(event, message)
        return None

    def _arrived(self, event: Arrived) -> list[TagAction]:
        source = self._from.get(event.source)
        if source is None or event.number != source.numbered + 1:
            raise RemoteProtocolError(f"rank {event.source} sent message {event.number} out of order")
        untaken = len(source.matched) + sum(m.source == event.source for m in self._unexpected)
        if untaken >= UNTAKEN_MAX:
            raise RemoteProtocolError(f"rank {event.source} sent more than {UNTAKEN_MAX} untaken messages")
        source.numbered += 1
        self._order[event.source, event.number] = self._arrivals
        self._arrivals += 1
        return self._offer(event)

    def _offer(self, message: Arrived) -> list[TagAction]:
        for place, posted in enumerate(self._receives):
            if _fits(posted, message):
                del self._receives[place]
                return [self._match(posted, message)]
        self._unexpected.append(message)
        self._unexpected.sort(key=lambda held: self._order[held.source, held.number])
        return []

    def _match(self, posted: ReceivePosted, message: Arrived) -> Match:
        self._from[message.source].matched[message.number] = message
        return Match(key=posted.key, source=message.source, number=message.number)


class TagMachine(TagMatcher):
    """The matching of one member in a group of one epoch, which continues without members that have closed
    it.

    Raises `LocalProtocolError` if too much waits here, and `RemoteProtocolError` if a member violates the
    protocol; the group must be abandoned then.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        super().__init__(members)
        self._left: set[int] = set()

    def handle(self, event: TagEvent | MemberLeft, *, now_ns: int) -> list[TagAction]:
        """Take an event; return the actions to perform, in order."""
        del now_ns
        match event:
            case MemberLeft(source=source):
                return self._leave(source)
            case Took(source=source, number=number) if source in self._left:
                self._forget(source, number)
                return []
            case Arrived(source=source) if source in self._left:
                raise RemoteProtocolError(f"rank {source} sent a message behind its close")
            case _:
                return self.take(event)

    def has_left(self, member: int) -> bool:
        """Return whether the member has closed the group."""
        return member in self._left

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        super().check_invariants()
        for member in self._left:
            assert not self._towards[member].untaken and not self._towards[member].waiting
            assert all(posted.source != member for posted in self._receives), f"{member} has left"

    def _leave(self, source: int) -> list[TagAction]:
        if source not in self._towards:
            raise RemoteProtocolError(f"rank {source} closes a group that it is not in")
        if source in self._left:
            return []
        self._left.add(source)
        return self._fail_waits(source, Cause.LEFT)

    def _cause(self, rank: int) -> Cause | None:
        if rank not in self._towards:
            raise LocalProtocolError(f"rank {rank} is not a member of the group")
        return Cause.LEFT if rank in self._left else None


def _fits(posted: ReceivePosted, message: Arrived) -> bool:
    return posted.source in (None, message.source) and posted.tag in (None, message.tag)
