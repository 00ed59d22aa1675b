"""A simulated resilient loop with sharded state: parts of it and their copies, over `loop`.

Each rank has a part of the state, and a copy of its ward's, for which it replays the updates; gradients are
delivered before each vote, which may end at some ranks and fail at others. A loop that goes on with another
number of ranks divides the state again. In a hybrid mesh the ranks of a view that complete no replica have no
part, and wait for another view.

Checked besides what `loop` checks: a part and a copy have the rows of their division, all of their version,
made of whole gradients; a vote is cast by a rank that holds its ward's gradients; parts move between steps
only; a rank adopts no part but the one that all have agreed upon; the state is lost only where no living rank
has a part or its copy.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

from zbmd.actors.view import MemberId
from zbmd.collectives.algorithms.shard_tree import whole_of
from zbmd.collectives.scenarios.hosted_job import JobOptions, Message
from zbmd.collectives.scenarios.repair import Meeting
from zbmd.training.scenarios.loop import (
    Content,
    Given,
    Gradients,
    LoopRank,
    LoopScenario,
    LoopWorld,
    Stage,
    Told,
    build,
)
from zbmd.training.torch import transaction as tx
from zbmd.training.torch.ballots import Ballot
from zbmd.training.torch.fsdp.division import (
    Division,
    Move,
    Report,
    pieces_of,
    rows_of,
    ward_of,
    windows_of,
)
from zbmd.transport import sim

ROWS = 7
"""Of the state, which most numbers of ranks do not divide; the last of five ranks has none of them."""

Rows: TypeAlias = dict[int, Content]
"""By their numbers: the versions whose gradients they have taken in."""


class Received(NamedTuple):
    """The rows of the next division that a rank has received, and not adopted yet."""

    division: Division
    own: Rows
    copy: Rows


class Held(NamedTuple):
    """The rows that a rank has: of its own part, and of its ward's."""

    own: Rows
    copy: Rows


class Delivery(NamedTuple):
    """The gradients of the rank of a place, computed from this state."""

    place: int
    content: Content


@dataclass(slots=True)
class ShardWorld(LoopWorld):
    """The state that outlives a process."""

    held: dict[MemberId, Held] = field(default_factory=dict[MemberId, Held])


class ShardRank(LoopRank):
    """The driver of one rank."""

    def __init__(self, world: ShardWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(world, rank, incarnation, rng)
        self.shards = world
        self.ward: Delivery | None = None
        """The gradients of the ward that this rank holds."""
        self.ballot: Ballot | None = None
        self.received: Received | None = None
        self.reports: tuple[Report, ...] = ()
        """Those of the last meeting."""

    def _made(self, *, fresh: bool) -> tx.Transactions:
        return self.machine_type(
            fresh=fresh, sharded=True, place=self.place, size=self.size, distinct=self.distinct
        )

    @property
    def is_left(self) -> bool:
        """Whether the gradients of the update were left in memory that outlives this rank."""
        return False

    @property
    def held(self) -> Held:
        """The rows that this rank has."""
        return self.shards.held.setdefault(self.member, Held({}, {}))

    def check_invariants(self) -> None:
        """See `LoopRank`; and that part and copy have the rows of the division, of this version."""
        super().check_invariants()
        part = self.machine.division
        if part is None or not self.begun:
            return
        self._check_rows(self.held.own, part.place, "has")
        if self.machine.keeps and part.size > 1:
            self._check_rows(self.held.copy, ward_of(part.place, part.size), "keeps")

    def _check_rows(self, rows: Rows, place: int, what: str) -> None:
        assert self.machine.division is not None
        wanted = rows_at(self.machine.division.size, place, self.content, self.distinct)
        assert rows == wanted, f"{self.member} {what} {rows} of {self.machine.division}, at {self.content}"

    # ---- meetings

    def _standings(self, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        if {*brought} == {"new"} and self.size < len(self.members):
            return self._end_lost()  # a mesh has all of the first ranks
        return super()._standings(brought, now_ns)

    def _found(self, now_ns: int) -> list[sim.Effect[Message]]:
        """The first ranks: each has its part, and gets its copy."""
        self.held.own.update(rows_at(self.size, self.place, self.content, self.distinct))
        return self._begin("reports", now_ns)

    def _ballot(self) -> Ballot:
        assert self.ballot is not None
        return self.ballot

    def _brings(self, stage: Stage) -> object:
        match stage.name:
            case "deliver":
                assert self.gradients is not None, f"{self.member} delivers no whole gradients"
                return Delivery(self.place, self.gradients)
            case "rest":
                return super()._brings(Stage("give", stage.ranks, stage.source))
            case "shard" | "replica" | "copy" | "divide":
                return Held(dict(self.held.own), dict(self.held.copy))
            case _:
                return super()._brings(stage)

    def _ends(self, stage: Stage, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        match stage.name:
            case "reports":
                self.reports = tuple(one.report for one in brought if isinstance(one, Told))
                return super()._ends(stage, brought, now_ns)
            case "gradients":
                self._reduced([one for one in brought if isinstance(one, Gradients)])
                return self._perform(self._handle(tx.Prepared()), now_ns)
            case "deliver":
                delivered = brought[ward_of(self.place, self.size)]
                assert isinstance(delivered, Delivery)
                self.ward = delivered
                return self._perform(self._handle(tx.Delivered()), now_ns)
            case "rest" | "shard" | "replica" | "copy":
                if stage.source != self.member.rank:
                    self._take(stage, brought[stage.ranks.index(stage.source)])
                if self.machine.fresh and not any(isinstance(one, Move | tx.Divide) for one in self.actions):
                    self.world.ways.add("takes")
                    self.actions += self._handle(tx.Taken(version=len(self.content)))
                return self._perform([], now_ns)
            case "divide":
                self._divided([one for one in brought if isinstance(one, Held)])
                return self._perform(self._handle(tx.Divided()), now_ns)
            case "agree":
                return self._perform(self._handle(tx.Agreed()), now_ns)
            case _:
                return super()._ends(stage, brought, now_ns)

    def _take(self, stage: Stage, given: object) -> None:
        own, copy = self.held
        match given:
            case Given():
                self.content = given.content
            case Held() if stage.name in ("shard", "replica"):
                own.clear()
                own.update(given.copy if stage.name == "shard" else given.own)
            case Held():
                copy.clear()
                copy.update(given.own)
                if not self.machine.fresh:
                    self.actions += self._handle(tx.Kept())
            case _:
                raise AssertionError(f"{self.member} gets {given}")

    def _divided(self, brought: Sequence[Held]) -> None:
        """Have the rows of the next division, from those who hold the ones of the last."""
        action = self.actions.pop(0)
        assert isinstance(action, tx.Divide)
        division, holders = action.division, action.holders
        windows = windows_of(ROWS, division.size, division.place, division.distinct)
        found: list[Rows] = [{}, {}]
        for piece in pieces_of(ROWS, len(holders), windows):
            held = brought[holders[piece.part].rank]
            there = held.copy if holders[piece.part].copy else held.own
            found[piece.window].update({row: there[row] for row in range(piece.begin, piece.stop)})
        self.received = Received(division, *found)

    def _cut(self, now_ns: int, *, withdraws: bool = True) -> list[sim.Effect[Message]]:
        effects = super()._cut(now_ns, withdraws=withdraws)
        if self.waits and self.known.epoch == self.entered and self._lives_on():
            return self._again(now_ns)
        return effects

    def _is_doomed(self, meeting: Meeting) -> bool:
        # Others may have gone to a newer view before this rank has made further groups of the old one.
        makes = self.stages[0].name == "standings" and self.round > 1
        return super()._is_doomed(meeting) or (makes and self.known.epoch > self.entered)

    def _lives_on(self) -> bool:
        return (self.lost | self.parted).isdisjoint(self.members)

    def _again(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Give up the groups, and make others of the same view."""
        self.world.left[self.member] = self.group
        self.round, self.waits = self.round + 1, False
        return self._begin("standings", now_ns)

    # ---- actions

    def _perform(self, actions: list[tx.Action], now_ns: int) -> list[sim.Effect[Message]]:
        self.actions += actions
        match self.actions[0] if self.actions else None:
            case tx.Deliver():
                self.actions.clear()
                return self._begin("deliver", now_ns)
            case tx.Vote(ballot=ballot):
                self.actions.clear()
                self.ballot = ballot
                return self._begin("vote", now_ns)
            case tx.Meet():
                self.world.ways.add("waits")
                self.actions.clear()
                return self._again(now_ns)
            case tx.Repeat():
                self.ward = None
                self.gradients = None
                self.world.ways.add("repeats")
                self.actions.pop(0)
                return self._perform([], now_ns)
            case Move(what=what, source=source, target=target):
                self.actions.pop(0)
                first, second = (self.members[place].rank for place in (source, target))
                ranks = (min(first, second), max(first, second))
                self.stages = [Stage(what.value, ranks, first, source * self.size + target)]
                return self._tick(now_ns)
            case tx.Divide():
                return self._begin("divide", now_ns)
            case tx.Agree():
                self.actions.pop(0)
                return self._begin("agree", now_ns)
            case tx.Adopt():
                self.actions.pop(0)
                self._adopt()
                return self._perform([], now_ns)
            case tx.Wait():
                return self._wait(now_ns)
            case tx.Fail(lost=True):
                return self._lose()
            case _:
                return super()._perform([], now_ns)

    def _adopt(self) -> None:
        assert self.received is not None, f"{self.member} adopts what it has not received"
        division, own, copy = self.received
        assert division == self.machine.division, f"{self.member} adopts {division}"
        self.shards.held[self.member] = Held(own, copy)
        self.received = self.ward = self.gradients = None
        self.world.ways.add("divides")

    def _lose(self) -> list[sim.Effect[Message]]:
        too_few = len(self.reports) < self.distinct
        assert too_few or not is_whole(self.reports), f"{self.member} gives up, and has {self.reports}"
        return self._end_lost()

    def _wait(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Give all up, and be as one that comes late, once there is another view."""
        self.world.ways.add("has no part")
        self.world.in_loop.discard(self.member)
        self.shards.held[self.member] = Held({}, {})
        self.content, self.received = (), None
        self.actions.clear()
        self.ward = self.gradients = None
        self.waits = True
        return [*self._link(), *self._enter(now_ns)]

    def _end_lost(self) -> list[sim.Effect[Message]]:
        self.world.ways.add("is lost")
        self.world.state_lost = True
        return [sim.Exit()]

    def _update(self, *, promoted: bool, now_ns: int) -> list[sim.Effect[Message]]:
        before, part, replays = self.content, self.machine.division, self.ward is not None
        effects = super()._update(promoted=promoted, now_ns=now_ns)
        assert part is not None
        own, copy = self.held
        own.update({row: (*content, self.machine.version) for row, content in own.items()})
        if part.size > 1 and (replays or not self.is_left):
            ward = Delivery(ward_of(part.place, part.size), before)
            assert self.ward == ward, f"{self.member} replays {self.ward}, and not {ward}"
            copy.update({row: (*content, self.machine.version) for row, content in copy.items()})
        self.ward = None
        return effects


def rows_at(size: int, place: int, content: Content, distinct: int = 0) -> Rows:
    """Return the rows of part `place` of `size`, with this content. distinct: see `Division`."""
    parts = distinct or size
    return dict.fromkeys(range(*rows_of(ROWS, parts, place % parts)), content)


def is_whole(reports: Sequence[Report]) -> bool:
    """Return whether a division that all who hold something have is whole, part by part."""
    held = [
        {
            part.number: (part, keeps)
            for part, keeps in ((each.division, each.keeps), (each.ready, True))
            if part
        }
        for each in reports
    ]
    common = set[int].intersection(*(set(each) for each in held if each)) if any(held) else set[int]()
    for number in common:
        having = [each[number] for each in held if number in each]
        size, parts = having[0][0].size, having[0][0].distinct or having[0][0].size
        with_part = [(part.place, keeps) for part, keeps in having if not part.is_left_over]
        places = {place % parts for place, _ in with_part}
        places |= {ward_of(place, size) % parts for place, keeps in with_part if keeps}
        if places == set(range(parts)):
            return True
    return False


@dataclass(frozen=True)
class ShardScenario(LoopScenario):
    """As `LoopScenario`, with a sharded state."""

    rank: ClassVar[type[ShardRank]] = ShardRank
    name: str = "shards"
    description: str = (
        "a PyTorch loop with shards, whose copies replay updates: kills in and about votes, replace or shrink"
    )

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], ShardWorld]:
        """See `JobScenario`."""
        return build(seed, ShardWorld(job), self.rank)


class HybridRank(ShardRank):
    """The driver of one rank of a hybrid mesh, each replica of which is divided among two."""

    distinct: ClassVar[int] = 2


@dataclass(frozen=True)
class HybridScenario(ShardScenario):
    """As `ShardScenario`, over a hybrid mesh, which loses and gets whole replicas."""

    rank: ClassVar[type[ShardRank]] = HybridRank
    name: str = "hybrid"
    description: str = (
        "a PyTorch loop over replicas of shards: those that complete no replica wait, replace or shrink"
    )

    def options_of(self, seed: int | str, options: sim.Options) -> JobOptions:
        """See `JobScenario`: whole replicas begin."""
        job = super().options_of(seed, options)
        return dataclasses.replace(job, world_size=max(2, whole_of(job.world_size, HybridRank.distinct)))
