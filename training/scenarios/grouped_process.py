"""A simulated rank among others: it links up for views, makes one move after the other, and calls its groups.

An operation of the group ends only once every member has entered it; when a member dies inside it, or gives
up, it ends on some of the others.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeAlias, assert_never

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.view import MemberId, View
from zbmd.collectives.scenarios.hosted_job import NODE, Enter, Message, Parted, joined, linked, member_of
from zbmd.training.redundancy.interface import Wish
from zbmd.training.scenarios.world import Asked, CommitWorld
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

MOVE_NS_MAX = 3_000_000

WAIT = True
"""Yielded by a rank that waits for a view; other moves yield False."""
Moves: TypeAlias = Generator[bool, None, None]


class MovedProcess(ABC):
    """One incarnation of a rank, whose program is a subclass's; see `zbmd.transport.sim.Process`."""

    def __init__(self, world: CommitWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.member = MemberId(rank=rank, incarnation=incarnation)
        self.view = self.installed = View(epoch=0, members=())
        self.coming: View | None = None
        # The view of the last question for the members, and the answer: it is asked at each move.
        self._members_of: tuple[View | None, tuple[MemberId, ...]] = (None, ())
        self.lost: set[MemberId] = set()
        self.wishes = Wish.NOTHING
        self.effects: list[sim.Effect[Message]] = []
        self.waits = True
        self.program = self._run()

    @abstractmethod
    def _run(self) -> Moves:
        """Yield after each move, to the end of the process."""

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Take a stimulus, and make the next move if it is due."""
        match stimulus:
            case sim.Started():
                return [joined(self.member), *self._signals(now_ns), *self._go_on(now_ns)]
            case sim.Arrived(message=message):
                return self._take(message, now_ns)
            case sim.PeerEnded(peer=peer, incarnation=incarnation):
                if peer != NODE:
                    self.lost.add(member_of(peer, incarnation))
                return []
            case sim.TimerFired(name="move"):
                return self._go_on(now_ns)
            case sim.TimerFired(name=name):
                self.wishes |= self._asked()[int(name)].wish
                return []
            case sim.Commanded():
                raise LocalProtocolError("a rank is not a node")
            case _:
                assert_never(stimulus)

    def _asked(self) -> list[Asked]:
        return [asked for asked in self.world.options.asked if asked.rank == self.member.rank]

    def _signals(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Arm the signals of the rank's first process; a replacement gets none."""
        if self.member.incarnation > 1:
            return []
        every = enumerate(self._asked())
        return [sim.SetTimer(name=str(at), at_ns=now_ns + asked.after_ns) for at, asked in every]

    def _take(self, message: Message, now_ns: int) -> Sequence[sim.Effect[Message]]:
        match message:
            case jobs.InstallView(view=view):
                if view.epoch <= self.installed.epoch:
                    return []  # overtaken by the next
                self.installed = view
                return self._link()
            case Enter(epoch=epoch):
                if epoch != self.installed.epoch or epoch <= self.view.epoch or self.coming is not None:
                    return []
                self.coming = self.installed
                return self._go_on(now_ns) if self.waits else []
            case Parted(member=member):
                self.lost.add(member)
                return []
            case jobs.Joined() | jobs.Linked():
                raise LocalProtocolError("a rank is not a node")
            case _:
                assert_never(message)

    def _link(self) -> list[sim.Effect[Message]]:
        """Link up for the newest view, unless another is to be entered first."""
        if self.coming is not None or self.installed.epoch <= self.view.epoch:
            return []
        return [linked(self.member, self.installed.epoch)]

    def _go_on(self, now_ns: int) -> list[sim.Effect[Message]]:
        self.effects = []
        try:
            self.waits = next(self.program)
        except StopIteration:
            return [*self.effects, sim.Exit()]
        if self.waits:
            return self.effects
        at_ns = now_ns + self.rng.randint(1, MOVE_NS_MAX)
        return [*self.effects, sim.SetTimer(name="move", at_ns=at_ns)]


CUT_SHARE = 0.5
"""The share of operations that are cut for a member, of those that could also end for it."""
STUCK_SHARE = 0.5
"""The share of operations that do not end for a member, if another died after it had entered them."""


class Cut(Exception):
    """The epoch is over: a member is lost, or has given up."""


class GroupedProcess(MovedProcess):
    """The part of a simulated rank that knows its groups."""

    @property
    def _members(self) -> tuple[MemberId, ...]:
        if self._members_of[0] is not self.view:
            active = self.world.options.active(self.view.ranks)
            members = tuple(member for member in self.view.ids if member.rank in active)
            self._members_of = (self.view, members)
        return self._members_of[1]

    @property
    def _everyone(self) -> tuple[MemberId, ...]:
        """The members, and then those that wait beside, if these take part as the members meet."""
        members = self._members
        beside = (one for one in self.view.ids if one not in members)
        return (*members, *beside) if self.world.options.resizes else members

    @property
    def _place(self) -> int:
        return self._members.index(self.member)

    @property
    def _keys(self) -> tuple[int, ...]:
        """The keys of the members' shards; see `Task.state_keys`."""
        options = self.world.options
        return options.keys(len(self._members)) if options.resizes or not options.sharded else ()

    @property
    def _key(self) -> int:
        """The key of this rank's shard."""
        return self.world.keys(self._members)[self.member]

    @property
    def _is_lowest(self) -> bool:
        return self._place == 0

    def _is_cut(self, *, meeting: bool = False) -> bool:
        """Whether this rank may see an operation of the epoch end."""
        given_up = self.world.unattended if meeting else self.world.abandoned
        return self.view.epoch in given_up or not self.lost.isdisjoint(
            self._everyone if meeting else self._members
        )

    def _together(
        self, name: str, value: object = None, *, meeting: bool = False
    ) -> Generator[bool, None, list[object]]:
        """Enter an operation of all members, and wait for its end. Raises `Cut`.

        meeting: an operation of those that wait, too.
        """
        operation = self.world.operations.setdefault((self.view.epoch, name), {})
        operation[self.member] = value
        yield False
        members, stuck = self._everyone if meeting else self._members, False
        while stuck or len(operation) < len(members):
            if self._is_cut(meeting=meeting):
                raise Cut
            yield False
            stuck = stuck or (
                len(operation) == len(members)
                and not all(map(self.world.lives, members))
                and self.rng.random() < STUCK_SHARE
            )
        if self._is_cut(meeting=meeting) and self.rng.random() < CUT_SHARE:
            raise Cut
        return [operation[member] for member in members]
