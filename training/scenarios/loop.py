"""A simulated resilient loop: the scenarios behind the tests and seed hunts of its transactions.

Each rank is the production machine over a model of steps: all reduce gradients together, vote, update, and
end the step alone. What members do together is a *meeting*, which each ends in its own time, or is cut out of
by a notice of death, a member that has withdrawn, or a view that has come meanwhile. A node restarts the
dead.

Checked: a version has one content, whoever has made it, from whole gradients of its predecessor; the steps of
a living rank end once each, in order; a replacement has the state of a rank that was where a step begins. The
state is lost only with all ranks that had it. Once the kills stop, every rank must finish.

`ShardScenario` is the same with sharded state: a shard for each rank, a copy of it at its buddy, which
replays its ward's updates, and the delivery of gradients before each vote, which may end at some ranks and
fail at others. Checked besides: a shard and a copy are always of their version, made of whole gradients of
their own rank; a vote is cast by a rank that holds its ward's gradients; shards move between steps only; the
state is lost only where no living rank has a shard or its copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar, assert_never

from zbmd.actors.view import RANKS_MAX, MemberId
from zbmd.collectives.scenarios.hosted_job import (
    JobOptions,
    JobScenario,
    MemberProcess,
    Message,
    add_processes,
)
from zbmd.collectives.scenarios.node import NodeProcess
from zbmd.collectives.scenarios.repair import CALL_NS_MAX, GO_ON_SHARE, TICK_NS_MAX, Meeting, conditions_of
from zbmd.training.torch import transaction as tx
from zbmd.training.torch.fsdp.division import Move, Report
from zbmd.transport import sim

TAIL_NS_MAX = 100_000
"""The longest that a rank takes to update and to end a step: short, since no rule depends on it."""
VOTE_NS_MAX = CALL_NS_MAX
"""The longest until a rank sees that all have voted: long, since most rules meet there."""

Key: TypeAlias = tuple[tuple[int, int], str, int]
Content: TypeAlias = tuple[int, ...]
"""Of a state: the versions whose gradients it has taken in."""


@dataclass(slots=True)
class LoopWorld:
    """The state that outlives a process."""

    options: JobOptions
    state_lost: bool = False
    meetings: dict[Key, Meeting] = field(default_factory=dict[Key, Meeting])
    left: dict[MemberId, tuple[int, int]] = field(default_factory=dict[MemberId, tuple[int, int]])
    """The last group that a member has given up."""
    finished: set[int] = field(default_factory=set[int])
    in_loop: set[MemberId] = field(default_factory=set[MemberId])
    """Those that have, or have had, the state."""
    ended: dict[MemberId, int] = field(default_factory=dict[MemberId, int])
    """The last version whose step a member has ended."""
    lives: Callable[[MemberId], bool] = lambda member: True
    ways: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True)
class Stage:
    """A meeting that a rank is to take part in."""

    name: str
    ranks: tuple[int, ...]
    source: int = -1
    number: int = -1
    """Among the meetings of that name in a group; -1: what the name implies."""


@dataclass(frozen=True, slots=True)
class Given:
    """A state, as a replacement gets it."""

    version: int
    content: Content


WorldT = TypeVar("WorldT", bound=LoopWorld)


class LoopRank(MemberProcess):
    """The driver of one rank: performs the machine's actions on the world, decides nothing."""

    def __init__(self, world: LoopWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(rank, incarnation, rng)
        self.world = world
        self.machine = self._made(fresh=False)
        self.begun = False
        self.round = 1
        """Of the groups that are made of one view."""
        self.content: Content = ()
        self.gradients: Content | None = None
        """The state from which this rank's gradients were computed; None: they are not whole."""
        self.members: tuple[MemberId, ...] = ()
        self.stages: list[Stage] = []
        self.actions: list[tx.Action] = []
        self.waits = True

    def _made(self, *, fresh: bool) -> tx.Transactions:
        return tx.Transactions(fresh=fresh)

    @property
    def group(self) -> tuple[int, int]:
        """The process group under way, by its epoch and round."""
        return self.entered, self.round

    def check_invariants(self) -> None:
        """The machine's own, and that the state is of its version."""
        self.machine.check_invariants()

    def _fired(self, name: str, now_ns: int) -> list[sim.Effect[Message]]:
        return self._end_step(now_ns) if name == "tail" else self._meet(now_ns)

    # ---- views

    def _waits_for_view(self) -> bool:
        return self.waits

    def _enter(self, now_ns: int) -> list[sim.Effect[Message]]:
        if not self._may_enter():
            return []
        if self.known.finished:
            self.world.finished.add(self.member.rank)  # the run has ended; who is replaced now learns it
            return [sim.Exit()]
        self.entered, self.members, self.round = self.known.epoch, self.known.ids, 1
        self.parted.clear()
        self.waits = False
        return self._begin("standings", now_ns)

    def _begin(self, name: str, now_ns: int) -> list[sim.Effect[Message]]:
        ranks = tuple(member.rank for member in self.members)
        self.stages = [Stage(name, ranks)]
        return self._tick(now_ns)

    def _tick(self, now_ns: int, longest_ns: int = TICK_NS_MAX) -> list[sim.Effect[Message]]:
        return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, longest_ns))]

    # ---- meetings

    def _meet(self, now_ns: int) -> list[sim.Effect[Message]]:
        """One look at the meeting under way: enter it, end it, or be cut out of it."""
        if not self.stages:
            return []
        stage, me = self.stages[0], self.member
        meeting = self._meeting(stage)
        if me not in meeting.entered:
            meeting.entered[me] = self._brings(stage)
            return self._tick(now_ns, VOTE_NS_MAX if stage.name == "vote" else TICK_NS_MAX)
        doomed = self._is_doomed(meeting)
        if not meeting.complete:
            return self._cut(now_ns) if doomed else self._tick(now_ns)
        if doomed and self.rng.random() > GO_ON_SHARE:
            return self._cut(now_ns)
        self.stages.pop(0)
        return self._ends(stage, [meeting.entered[member] for member in meeting.members], now_ns)

    def _is_doomed(self, meeting: Meeting) -> bool:
        gave_up = any(self.world.left.get(m, (0, 0)) >= self.group for m in meeting.members)
        return meeting.withdrawn or gave_up or not (self.lost | self.parted).isdisjoint(meeting.members)

    def _meeting(self, stage: Stage) -> Meeting:
        members = tuple(member for member in self.members if member.rank in stage.ranks)
        fixed = stage.name in ("standings", "reports", "share", "give")
        number = stage.ranks[-1] if stage.name == "give" else 0 if fixed else self.machine.version
        number = number if stage.number < 0 else stage.number
        key = (self.group, stage.name, number)
        found = self.world.meetings.setdefault(key, Meeting(members))
        assert found.members == members, f"{self.member} meets {members} in {stage}, others {found.members}"
        return found

    def _brings(self, stage: Stage) -> object:
        match stage.name:
            case "standings":
                return "in loop" if self.member in self.world.in_loop else "joining" if self.begun else "new"
            case "reports":
                return self.machine.report
            case "gradients":
                return self.content
            case "vote":
                (vote,) = self._handle(tx.Prepared())
                assert isinstance(vote, tx.Vote)
                return vote.ballot
            case "give":
                ended = self.world.ended.get(self.member, 0)
                gives = stage.source == self.member.rank
                assert not gives or ended == self.machine.version, (
                    f"{self.member} gives in the midst of a step"
                )
                return Given(self.machine.version, self.content)
            case _:
                return None

    def _ends(self, stage: Stage, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        match stage.name:
            case "standings":
                return self._standings(brought, now_ns)
            case "reports":
                reports = tuple(report for report in brought if isinstance(report, Report))
                place = self.members.index(self.member)
                return self._perform(self._handle(tx.Met(place=place, reports=reports)), now_ns)
            case "share":
                return self._perform(self._handle(tx.Shared()), now_ns)
            case "give":
                if stage.source != self.member.rank:
                    source = next(i for i, rank in enumerate(stage.ranks) if rank == stage.source)
                    given = brought[source]
                    assert isinstance(given, Given)
                    version, self.content = given.version, given.content
                    self.world.in_loop.add(self.member)
                    self.world.ended[self.member] = version
                    self.world.ways.add("takes")
                    self.actions += self._handle(tx.Taken(version=version))
                return self._perform([], now_ns)
            case "gradients":
                assert set(brought) == {self.content}, f"{self.member} reduces gradients of {set(brought)}"
                self.gradients = self.content
                return self._begin("vote", now_ns)
            case _:
                ballots = tuple(ballot for ballot in brought if isinstance(ballot, tx.Ballot))
                return self._perform(self._handle(tx.AllVoted(ballots=ballots)), now_ns)

    def _standings(self, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        if "in loop" not in brought:
            if "joining" in brought:
                self.world.ways.add("is lost")
                self.world.state_lost = True
                return [sim.Exit()]
            self.world.in_loop.add(self.member)
            self.begun = True
            return self._begin("gradients", now_ns)
        if not self.begun:
            self.begun, self.machine = True, self._made(fresh=True)
        return self._begin("reports", now_ns)

    def _cut(self, now_ns: int) -> list[sim.Effect[Message]]:
        self._meeting(self.stages[0]).withdrawn = True
        self.world.left[self.member] = self.group
        self.stages.clear()
        self.actions.clear()
        self.waits = True
        if self.begun:
            self._handle(tx.Cut())
        return [*self._link(), *self._enter(now_ns)]

    # ---- actions

    def _handle(self, event: tx.Event) -> list[tx.Action]:
        return self.machine.handle(event, now_ns=0)

    def _perform(self, actions: list[tx.Action], now_ns: int) -> list[sim.Effect[Message]]:
        self.actions += actions
        while self.actions:
            action = self.actions.pop(0)
            match action:
                case tx.Commit() | tx.Promote():
                    return self._update(promoted=isinstance(action, tx.Promote), now_ns=now_ns)
                case tx.Repeat():
                    self.world.ways.add("repeats")
                    self.gradients = None
                case tx.Share():
                    return self._begin("share", now_ns)
                case tx.Give(to=places):
                    me = self.member.rank
                    to = [self.members[place].rank for place in places]
                    self.stages = [Stage("give", (*sorted((me, rank)), rank), me) for rank in to]
                    return self._tick(now_ns)
                case tx.Take(source=place):
                    rank, me = self.members[place].rank, self.member.rank
                    self.stages = [Stage("give", (*sorted((me, rank)), me), rank)]
                    return self._tick(now_ns)
                case tx.Fail():
                    raise AssertionError(f"{self.member} fails: {action.reason}")
                case tx.Vote() | tx.Meet() | tx.Deliver() | Move():
                    raise AssertionError(f"{action} is performed where it is asked for")
                case tx.Divide() | tx.Agree() | tx.Adopt():
                    raise AssertionError(f"{action}, and each rank is replaced in its place")
                case _:
                    assert_never(action)
        if self.stages:  # another replacement waits for the state
            return self._tick(now_ns)
        return self._begin("gradients", now_ns)

    def _update(self, *, promoted: bool, now_ns: int) -> list[sim.Effect[Message]]:
        self.world.ways.add("promotes" if promoted else "commits")
        version = self.machine.version
        assert self.gradients == self.content, f"{self.member} updates with gradients of {self.gradients}"
        assert len(self.content) == version - 1, f"{self.member} makes {version} of {self.content}"
        self.content, self.gradients = (*self.content, version), None
        return [sim.SetTimer(name="tail", at_ns=now_ns + self.rng.randint(1, TAIL_NS_MAX))]

    def _end_step(self, now_ns: int) -> list[sim.Effect[Message]]:
        version, before = self.machine.version, self.world.ended.get(self.member, 0)
        assert version == before + 1, f"{self.member} ends step {version} after {before}"
        self.world.ended[self.member] = version
        if version >= self.world.options.steps:
            self.world.finished.add(self.member.rank)
            return [sim.Exit()]
        return self._begin("gradients", now_ns)


def build(
    seed: int | str, world: WorldT, rank: Callable[[WorldT, int, int, random.Random], LoopRank]
) -> tuple[sim.Simulation[Message], WorldT]:
    """Return the simulation of one loop, without its kills. rank: makes the driver of one."""
    simulation = sim.Simulation[Message](seed, conditions=conditions_of(seed))
    world.lives = add_processes(
        simulation,
        world.options.world_size,
        lambda _: NodeProcess(world, simulation.rng("regroups")),
        partial(rank, world),
    )
    return simulation, world


@dataclass(frozen=True)
class LoopScenario(JobScenario[JobOptions, LoopWorld]):
    """The machine of a resilient loop and a node's, over meetings. `length` counts steps."""

    name: str = "loop"
    description: str = "steps of a PyTorch loop: kills before, in and after votes, and in recoveries"

    def options_of(self, seed: int | str, options: sim.Options) -> JobOptions:
        """See `JobScenario`."""
        return JobOptions(world_size=min(options.ranks, RANKS_MAX), steps=options.length)

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], LoopWorld]:
        """See `JobScenario`."""
        return build(seed, LoopWorld(job), LoopRank)

    def is_over(self, simulation: sim.Simulation[Message], world: LoopWorld) -> bool:
        """Return whether all have finished, or the state was lost with all who had it."""
        size = world.options.world_size
        everyone = not any(simulation.lives(f"rank{rank}") for rank in range(size))
        return everyone and (world.state_lost or len(world.finished) == size)


Shard: TypeAlias = tuple[int, Content]
"""A rank, and the versions whose gradients its shard has taken in."""


@dataclass(slots=True)
class ShardWorld(LoopWorld):
    """The state that outlives a process."""

    copies: dict[MemberId, Shard] = field(default_factory=dict[MemberId, Shard])
    """The copies that members keep of shards of their wards."""


class ShardRank(LoopRank):
    """The driver of one rank."""

    def __init__(self, world: ShardWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(world, rank, incarnation, rng)
        self.shards = world
        self.size = world.options.world_size
        self.shard: Shard = (rank, ())
        self.held: Shard | None = None
        """The shard of the ward from which the gradients were computed that this rank holds."""
        self.ballot: tx.Ballot | None = None

    def _made(self, *, fresh: bool) -> tx.Transactions:
        size = self.world.options.world_size
        return tx.Transactions(fresh=fresh, sharded=True, place=self.member.rank, size=size)

    @property
    def ward(self) -> int:
        """The rank of which this one keeps a copy."""
        return (self.member.rank - 1) % self.size

    def check_invariants(self) -> None:
        """See `LoopRank`; and that shard and copy are of this version."""
        super().check_invariants()
        copy = self.shards.copies.get(self.member)
        if not self.machine.fresh:
            assert self.shard == (self.member.rank, self.content), f"{self.member} has {self.shard}"
        if self.machine.keeps:
            assert copy == (self.ward, self.content), f"{self.member} keeps {copy} at {self.content}"

    # ---- meetings

    def _standings(self, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        effects = super()._standings(brought, now_ns)
        if self.stages and self.stages[0].name == "gradients":  # the first ranks: each gets its copy
            return self._begin("reports", now_ns)
        return effects

    def _brings(self, stage: Stage) -> object:
        match stage.name:
            case "deliver":
                assert self.gradients is not None, f"{self.member} delivers no whole gradients"
                return (self.member.rank, self.gradients)
            case "vote":
                return self.ballot
            case "rest":
                return super()._brings(Stage("give", stage.ranks, stage.source))
            case "shard":
                return self.shards.copies.get(self.member)
            case "copy":
                return self.shard
            case _:
                return super()._brings(stage)

    def _ends(self, stage: Stage, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        match stage.name:
            case "gradients":
                assert set(brought) == {self.content}, f"{self.member} reduces gradients of {set(brought)}"
                self.gradients = self.content
                return self._perform(self._handle(tx.Prepared()), now_ns)
            case "deliver":
                place = next(i for i, member in enumerate(self.members) if member.rank == self.ward)
                held = brought[place]
                assert isinstance(held, tuple)
                self.held = held
                return self._perform(self._handle(tx.Delivered()), now_ns)
            case "rest" | "shard" | "copy":
                if stage.source != self.member.rank:
                    self._take(stage, brought[stage.ranks.index(stage.source)])
                return self._perform([], now_ns)
            case _:
                return super()._ends(stage, brought, now_ns)

    def _take(self, stage: Stage, given: object) -> None:
        match stage.name:
            case "rest":
                assert isinstance(given, Given)
                self.content = given.content
            case "shard":
                assert given == (self.member.rank, self.content), f"{self.member} gets {given} for its shard"
                self.shard = (self.member.rank, self.content)
            case _:
                assert given == (self.ward, self.content), f"{self.member} gets {given} to keep"
                self.shards.copies[self.member] = (self.ward, self.content)
                if not self.machine.fresh:
                    self.actions += self._handle(tx.Kept())
        if self.machine.fresh and not any(isinstance(action, Move) for action in self.actions):
            version = len(self.content)
            self.world.in_loop.add(self.member)
            self.world.ended[self.member] = version
            self.world.ways.add("takes")
            self.actions += self._handle(tx.Taken(version=version))

    def _cut(self, now_ns: int) -> list[sim.Effect[Message]]:
        effects = super()._cut(now_ns)
        if self.waits and self.known.epoch == self.entered and self._lives_on():
            return self._again(now_ns)
        return effects

    def _is_doomed(self, meeting: Meeting) -> bool:
        # Others may have gone to a newer view before this rank has made further groups of the old one.
        return super()._is_doomed(meeting) or (self.round > 1 and self.known.epoch > self.entered)

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
                self.held = None
                self.gradients = None
                self.world.ways.add("repeats")
                self.actions.pop(0)
                return self._perform([], now_ns)
            case Move(what=what, source=source, target=target):
                self.actions.pop(0)
                ranks = tuple(sorted((source, target)))  # of all ranks, whose places are their numbers
                self.stages = [Stage(what.value, ranks, source, source * self.size + target)]
                return self._tick(now_ns)
            case tx.Fail(lost=True):
                return self._lose()
            case _:
                return super()._perform([], now_ns)

    def _lose(self) -> list[sim.Effect[Message]]:
        fresh = {member.rank for member in self.members if member not in self.world.in_loop}
        copies = {copy[0] for member, copy in self.shards.copies.items() if member in self.members}
        assert not fresh <= copies, f"{self.member} gives up shards {fresh}, of which copies are kept"
        self.world.ways.add("is lost")
        self.world.state_lost = True
        return [sim.Exit()]

    def _update(self, *, promoted: bool, now_ns: int) -> list[sim.Effect[Message]]:
        before = self.content
        effects = super()._update(promoted=promoted, now_ns=now_ns)
        self.shard = (self.member.rank, self.content)
        if self.size > 1:
            assert self.held == (self.ward, before), f"{self.member} replays {self.held} upon {before}"
            self.shards.copies[self.member] = (self.ward, self.content)
        self.held = None
        return effects


@dataclass(frozen=True)
class ShardScenario(LoopScenario):
    """As `LoopScenario`, with a sharded state."""

    name: str = "shards"
    description: str = (
        "a PyTorch loop with shards, whose copies replay updates: kills before, in and after votes"
    )

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], ShardWorld]:
        """See `JobScenario`."""
        return build(seed, ShardWorld(job), ShardRank)
