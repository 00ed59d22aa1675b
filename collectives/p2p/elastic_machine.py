"""Sans-I/O matching of tagged messages in an elastic group, while members die and join.

Two members have a *session* with each other, from the epoch in which both knew of the other to the loss of
either, or of the link between them. Within a session no message is lost or duplicated, whoever else dies:
views do not affect it. It ends at once with the notice of a loss: sends to that member fail, and so do
receives from it that no arrived message fits. Arrived messages may still be taken until the next view.

A member that enters a view greets all others in it, with the epoch since which it has greeted this one
without a loss. Two members that have greeted each other in one epoch continue their session, if neither has
had a loss since it began; otherwise they begin the session with the number of this epoch. Both see the same
greetings in the same order, so both decide alike. A receiver of a message knows the session, because links
keep the order: nothing is sent to a new member before it has greeted. A message's number begins with that of
its session, so leftovers of an earlier one are recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

from zbmd.actors.view import MemberId
from zbmd.collectives.p2p.tag_machine import (
    Arrived,
    Cause,
    From,
    GaveBack,
    MemberLeft,
    TagAction,
    TagEvent,
    TagMatcher,
    TakenThere,
    TellTaken,
    Took,
    Towards,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError

GREETINGS_MAX = 16
"""Greetings of one member to another whose answers are outstanding."""
SESSION_BITS = 32
"""The bits of a message's number that count within its session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """This member has entered the view of `epoch`, and knows that all `members`, itself included, have."""

    epoch: int
    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost:
    """The member has died, or the link to it has ended."""

    member: MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """A member's greeting in `epoch`. `since`: the epoch of its first one to this member after the last
    loss."""

    source: int
    epoch: int
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoilt:
    """A matched message cannot be read any more: it lay in the memory of a lost member."""

    source: int
    number: int


ElasticTagEvent: TypeAlias = TagEvent | Settled | MemberLost | MemberLeft | Greeted | Spoilt


@dataclass(frozen=True, slots=True, kw_only=True)
class Greet:
    """Send a member this greeting; see `Greeted`."""

    to: int
    epoch: int
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """This message, which no receive asked for, is discarded."""

    source: int
    number: int


ElasticTagAction: TypeAlias = TagAction | Greet | Dropped
Actions: TypeAlias = list[ElasticTagAction]


class Way(Enum):
    """Whether another member can be reached."""

    OPENING = auto()
    """It is present, and has not greeted: messages to it wait."""
    UP = auto()
    LOST = auto()
    LEFT = auto()


@dataclass(slots=True)
class _Peer:
    incarnation: int
    way: Way
    since: int
    """The epoch of the first greeting to it."""
    session: int = 0
    greeted: list[int] = field(default_factory=list[int])
    """The epochs of greetings to it that it has not answered by its own, which may be in transit."""


class ElasticTagMachine(TagMatcher):
    """The matching of one member, over all epochs of the group. Raises as `tag_machine.TagMachine` does."""

    def __init__(self, rank: int) -> None:
        super().__init__(())
        self.rank = rank
        self.epoch = 0
        self._peers: dict[int, _Peer] = {}
        self._greetings: dict[int, Greeted] = {}
        """For each rank, the greeting of a view that this member has not entered yet. There is at most one:
        nobody knows that all are in a view before this member has left the previous one.
        """

    @property
    def reachable(self) -> tuple[int, ...]:
        """Return the other members with which there is, or will be, a session."""
        return tuple(
            rank
            for rank, peer in self._peers.items()
            if peer.way in (Way.OPENING, Way.UP) and rank != self.rank
        )

    def way(self, rank: int) -> Way | None:
        """Return how `rank` can be reached; None: it is absent."""
        peer = self._peers.get(rank)
        return peer.way if peer else None

    def is_open(self, source: int, number: int) -> bool:
        """Return whether the session that this message belongs to goes on, so that its sender can answer."""
        return self.way(source) is Way.UP and self._is_current(source, number)

    def handle(self, event: ElasticTagEvent, *, now_ns: int) -> list[ElasticTagAction]:
        """Take an event; return the actions to perform, in order."""
        del now_ns
        match event:
            case Settled():
                return self._settle(event)
            case MemberLost(member=member):
                peer = self._peers.get(member.rank)
                if peer is None or peer.incarnation != member.incarnation:
                    return []
                return self._lose(member.rank, Cause.LOST)
            case MemberLeft(source=source):
                return self._lose(source, Cause.LEFT)
            case Greeted(source=source):
                if event.epoch > self.epoch:
                    self._greetings[source] = event
                    return []
                return self._answer(event)
            case Spoilt(source=source, number=number):
                self._forget(source, number)
                return []
            case Arrived(source=source, number=number):
                if not self._is_current(source, number):
                    return [Dropped(source=source, number=number)]
                return [*self.take(event)]
            case TakenThere(by=by, number=number):
                if self.way(by) is not Way.UP or not self._is_current(by, number):
                    return []
                return [*self.take(event)]
            case Took(source=source, number=number):
                self._forget(source, number)
                is_up = self.way(source) is Way.UP and self._is_current(source, number)
                return [TellTaken(to=source, number=number)] if is_up else []
            case GaveBack(source=source, number=number):
                if source not in self._from or number not in self._from[source].matched:
                    return [Dropped(source=source, number=number)]
                return [*self.take(event)]
            case _:
                return [*self.take(event)]

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        super().check_invariants()
        assert set(self._peers) == set(self._towards) == set(self._from)
        assert all(greeting.epoch > self.epoch for greeting in self._greetings.values())
        for rank, peer in self._peers.items():
            assert peer.session <= self.epoch, f"a session with rank {rank} that is to come"
            ended = peer.way in (Way.LOST, Way.LEFT)
            assert not ended or not any((self._towards[rank].untaken, self._towards[rank].waiting))
            waits = [r.key for r in self._receives if r.source == rank]
            assert not ended or not waits, f"{waits} wait for rank {rank}, which is {peer.way}"

    # ---- sessions

    def _settle(self, event: Settled) -> Actions:
        if event.epoch <= self.epoch or all(member.rank != self.rank for member in event.members):
            raise LocalProtocolError(f"epoch {event.epoch} of {event.members} cannot follow {self.epoch}")
        self.epoch = event.epoch
        actions: Actions = []
        present = {member.rank: member.incarnation for member in event.members}
        for rank, peer in list(self._peers.items()):
            if present.get(rank) == peer.incarnation and peer.way in (Way.OPENING, Way.UP):
                continue
            actions += self._lose(rank, Cause.LOST)
            actions += self._drop(rank)
            del self._peers[rank], self._towards[rank], self._from[rank]
        for rank, incarnation in present.items():
            if rank not in self._peers:
                way = Way.UP if rank == self.rank else Way.OPENING
                self._peers[rank] = _Peer(incarnation, way, since=self.epoch)
                self._towards[rank], self._from[rank] = Towards(), From()
        for rank in self.reachable:
            peer = self._peers[rank]
            peer.greeted = [*peer.greeted, self.epoch][-GREETINGS_MAX:]
            actions.append(Greet(to=rank, epoch=self.epoch, since=peer.since))
        for rank, greeting in list(self._greetings.items()):
            if greeting.epoch <= self.epoch:
                actions += self._answer(self._greetings.pop(rank))
        return actions

    def _answer(self, greeting: Greeted) -> Actions:
        """Continue a session, or begin one, if both have greeted in the epoch of this greeting."""
        rank = greeting.source
        peer = self._peers.get(rank)
        if peer is None or peer.way in (Way.LOST, Way.LEFT) or greeting.epoch not in peer.greeted:
            return []
        peer.greeted = [epoch for epoch in peer.greeted if epoch > greeting.epoch]
        if peer.way is Way.UP and greeting.since <= peer.session:
            return []
        actions: Actions = []
        if peer.way is Way.UP:  # it has heard of a loss, and this member has not
            actions += self._lose(rank, Cause.LOST)
            actions += self._drop(rank)
        peer.way, peer.session = Way.UP, greeting.epoch
        first = greeting.epoch << SESSION_BITS
        self._towards[rank].numbered = first
        self._from[rank] = From(numbered=first)
        return [*actions, *self._transmit(rank)]

    def _lose(self, rank: int, cause: Cause) -> Actions:
        """Note that a member has become unreachable."""
        peer = self._peers.get(rank)
        if peer is None or peer.way in (Way.LOST, Way.LEFT):
            return []
        peer.way = Way.LOST if cause is Cause.LOST else Way.LEFT
        return [*self._fail_waits(rank, cause)]

    def _drop(self, rank: int) -> Actions:
        """Discard messages of a member from a session that has ended, after a view."""
        mine = [message for message in self._unexpected if message.source == rank]
        self._unexpected = [message for message in self._unexpected if message.source != rank]
        for message in (*mine, *self._from[rank].matched.values()):
            self._order.pop((rank, message.number), None)
        self._from[rank] = From()
        return [Dropped(source=rank, number=message.number) for message in mine]

    def _is_current(self, rank: int, number: int) -> bool:
        """Return whether a message's number belongs to the current, or latest, session with this member."""
        peer = self._peers.get(rank)
        begun = peer is not None and peer.way is not Way.OPENING
        return peer is not None and begun and number >> SESSION_BITS == peer.session

    # ---- messages

    def _is_open(self, to: int) -> bool:
        return self._peers[to].way is Way.UP

    def _cause(self, rank: int) -> Cause | None:
        match self.way(rank):
            case Way.OPENING | Way.UP:
                return None
            case Way.LOST:
                return Cause.LOST
            case Way.LEFT:
                return Cause.LEFT
            case None:
                return Cause.ABSENT


# ---- capture


def tags_config(machine: ElasticTagMachine) -> dict[str, Any]:
    """Return the configuration from which a new `ElasticTagMachine` like this one is built."""
    return {"rank": machine.rank}


def _build_tags(config: Mapping[str, Any]) -> ElasticTagMachine:
    return ElasticTagMachine(**config)


ELASTIC_TAGS: MachineKind[ElasticTagEvent, ElasticTagAction] = register(
    "elastic-tags",
    1,
    _build_tags,
    events=ElasticTagEvent,
    actions=ElasticTagAction,
    states=(ElasticTagMachine,),
)
