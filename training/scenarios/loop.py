"""A simulated resilient loop: the scenarios behind the tests and seed hunts of its transactions.

Each rank is the production machine over a model of steps: all reduce gradients together, vote, update, and
end the step alone. What members do together is a *meeting*, which each ends in its own time, or is cut out of
by a notice of death, a member that has withdrawn, or a view that has come meanwhile. A node restarts the
dead.

In some runs the dead stay away, and the loop goes on with the others (`--on-loss shrink`); in some of those a
rank comes late, and is taken in between two steps, once a vote has asked for it. The shares of a batch are
divided among those that take part.

A rank that is lost in the last vote may leave survivors that have not seen it, and meet nobody again.

Checked: a version has one content, whoever has made it, from whole gradients of its predecessor, which have
each share of the batch once; the steps of a living rank end once each, in order; a replacement or newcomer
has the state of a rank that was where a step begins. The state is lost only with all ranks that had it. Once
the kills stop, every rank must finish.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar, assert_never

from zbmd.actors.view import RANKS_MAX, MemberId
from zbmd.collectives.algorithms.shard_tree import whole_of
from zbmd.collectives.scenarios.hosted_job import (
    LATE_SHARE,
    SHRINK_SHARE,
    JobOptions,
    JobScenario,
    MemberProcess,
    Message,
    add_processes,
)
from zbmd.collectives.scenarios.node import NodeProcess
from zbmd.collectives.scenarios.repair import CALL_NS_MAX, GO_ON_SHARE, TICK_NS_MAX, Meeting, conditions_of
from zbmd.training.torch import transaction as tx
from zbmd.training.torch.ballots import Ballot
from zbmd.training.torch.fsdp.division import Move, Report
from zbmd.training.torch.shares import Shares
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
    ended_well: set[MemberId] = field(default_factory=set[MemberId])
    """Those that have finished their scripts."""
    in_loop: set[MemberId] = field(default_factory=set[MemberId])
    """Those that have, or have had, the state."""
    ended: dict[MemberId, int] = field(default_factory=dict[MemberId, int])
    """The last version whose step a member has ended."""
    lives: Callable[[MemberId], bool] = lambda member: True
    size: int = 0
    """The number of ranks that made the last step."""
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


class Gradients(NamedTuple):
    """The gradients of a rank: of the state that they were computed from, and of these shares of a batch."""

    content: Content
    shares: tuple[int, ...]


class Told(NamedTuple):
    """The report of a rank to a meeting, and whether it divides shares."""

    report: Report
    divides: bool


class Voted(NamedTuple):
    """The vote of a rank, and whether it asks all to take others in."""

    ballot: Ballot
    asks: bool


class NumberedShares(Shares):
    """The shares of a batch of numbers: nothing has to be done for them."""

    def check(self) -> None:
        """See `Shares`."""

    def begin(self) -> None:
        """See `Shares`."""


class LoopRank(MemberProcess):
    """The driver of one rank: performs the machine's actions on the world, decides nothing."""

    machine_type: type[tx.Transactions] = tx.Transactions
    shares_type: type[Shares] = NumberedShares
    distinct: ClassVar[int] = 0
    """The number of parts of the state after which they repeat; 0: they do not."""

    def __init__(self, world: LoopWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(rank, incarnation, rng)
        self.world = world
        self.machine = self.machine_type()
        self.shares: Shares = self.shares_type(world.options.world_size, "--on-loss shrink")
        self.divides = False
        self.grows = False
        """Whether a vote of this group has asked all to take others in."""
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
        return self.machine_type(fresh=fresh)

    @property
    def place(self) -> int:
        """Its number in the view."""
        return self.members.index(self.member)

    @property
    def size(self) -> int:
        """The number of those that compute; the others of a view have no part."""
        return whole_of(len(self.members), self.distinct)

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
        if self.known.finished and self.begun and not self.world.state_lost:
            if self.machine.phase is tx.Phase.WAITING:
                self.world.ways.add("waits to the end")
                return [sim.Exit()]
            left, self.waits = {*self.known.ids, *self.world.ended_well}, False
            self.world.ways.add("ends without votes")
            ended = tx.Ended(lost=not left.issuperset(self.members), reason="others have finished")
            return self._perform(self._handle(ended), now_ns)
        if self.known.finished:
            self.world.finished.add(self.member.rank)  # the run has ended; who is replaced now learns it
            return [sim.Exit()]
        if self.machine.phase is tx.Phase.WAITING:
            self._handle(tx.Cut())
        others = [member.rank for member in self.members] != list(self.known.ranks)
        self.divides = self.divides or (others and bool(self.members) and not self.machine.fresh)
        self.entered, self.members, self.round = self.known.epoch, self.known.ids, 1
        self.parted.clear()
        self.waits = False
        return self._begin("standings", now_ns)

    def _begin(self, name: str, now_ns: int) -> list[sim.Effect[Message]]:
        computes = name in ("gradients", "deliver", "vote", "grow")
        ranks = tuple(member.rank for member in self.members)
        self.stages = [Stage(name, ranks[: self.size] if computes else ranks)]
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
        # A rank that finishes its script has ended its meetings, and so completes them on the others.
        gone = {m for m in self.lost | self.parted if not (meeting.complete and m in self.world.ended_well)}
        return meeting.withdrawn or gave_up or not gone.isdisjoint(meeting.members)

    def _meeting(self, stage: Stage) -> Meeting:
        members = tuple(member for member in self.members if member.rank in stage.ranks)
        fixed = stage.name in ("standings", "reports", "share", "give", "divide", "agree")
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
                return Told(self.machine.report, self.divides)
            case "gradients":
                return Gradients(self.content, self.shares.own(self.place))
            case "vote":
                return Voted(self._ballot(), self._is_offered_more)
            case "give":
                ended = self.world.ended.get(self.member, 0)
                gives = stage.source == self.member.rank
                assert not gives or ended == self.machine.version, (
                    f"{self.member} gives in the midst of a step"
                )
                return Given(self.machine.version, self.content)
            case _:
                return None

    def _ballot(self) -> Ballot:
        (vote,) = self._handle(tx.Prepared())
        assert isinstance(vote, tx.Vote)
        return vote.ballot

    @property
    def _is_offered_more(self) -> bool:
        return (
            self.known.epoch > self.entered and whole_of(len(self.known.members), self.distinct) > self.size
        )

    def _ends(self, stage: Stage, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        match stage.name:
            case "standings":
                return self._standings(brought, now_ns)
            case "reports":
                told = [one for one in brought if isinstance(one, Told)]
                self.divides = any(one.divides for one in told)
                reports = tuple(one.report for one in told)
                return self._perform(self._handle(tx.Met(place=self.place, reports=reports)), now_ns)
            case "share":
                return self._perform(self._handle(tx.Shared()), now_ns)
            case "give":
                if stage.source != self.member.rank:
                    source = next(i for i, rank in enumerate(stage.ranks) if rank == stage.source)
                    given = brought[source]
                    assert isinstance(given, Given)
                    version, self.content = given.version, given.content
                    self.world.ways.add("takes")
                    self.actions += self._handle(tx.Taken(version=version))
                return self._perform([], now_ns)
            case "gradients":
                self._reduced([one for one in brought if isinstance(one, Gradients)])
                return self._begin("vote", now_ns)
            case "grow":
                return self._cut(now_ns, withdraws=False)
            case _:
                votes = [vote for vote in brought if isinstance(vote, Voted)]
                self.grows = any(vote.asks for vote in votes)
                ballots = tuple(vote.ballot for vote in votes)
                return self._perform(self._handle(tx.AllVoted(ballots=ballots)), now_ns)

    def _reduced(self, brought: list[Gradients]) -> None:
        of = {one.content for one in brought}
        assert of == {self.content}, f"{self.member} reduces gradients of {of}"
        shares = sorted(share for one in brought for share in one.shares)
        assert shares == list(range(self.shares.shares)), (
            f"{self.member} reduces gradients of shares {shares}"
        )
        self.gradients = self.content

    def _standings(self, brought: list[object], now_ns: int) -> list[sim.Effect[Message]]:
        if "in loop" not in brought:
            if "joining" in brought:
                self.world.ways.add("is lost")
                self.world.state_lost = True
                return [sim.Exit()]
            self.world.in_loop.add(self.member)
            self.begun, self.machine = True, self._made(fresh=False)
            if self.size < self.shares.shares:
                self.shares.assign(self.place, self.size)
            return self._found(now_ns)
        if not self.begun:
            self.begun, self.machine = True, self._made(fresh=True)
        return self._begin("reports", now_ns)

    def _found(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Begin, as one of the first ranks of the loop."""
        return self._begin("gradients", now_ns)

    def _cut(self, now_ns: int, *, withdraws: bool = True) -> list[sim.Effect[Message]]:
        """Give up the groups, and wait for the next view. withdraws: from the meeting under way."""
        if withdraws:
            self._meeting(self.stages[0]).withdrawn = True
        self.world.left[self.member] = self.group
        self.stages.clear()
        self.actions.clear()
        self.waits, self.grows = True, False
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
                case tx.Divide() | tx.Agree() | tx.Adopt() | tx.Recall() | tx.Wait():
                    raise AssertionError(f"{action}, and each rank is replaced in its place by a survivor's")
                case _:
                    assert_never(action)
        if self.stages:  # another replacement waits for the state
            return self._tick(now_ns)
        self._recovered()
        return self._begin("gradients", now_ns)

    def _recovered(self) -> None:
        """A meeting is over: this rank has the state, and its part of each batch."""
        if self.member not in self.world.in_loop:
            self.world.in_loop.add(self.member)
            self.world.ended[self.member] = self.machine.version
        if self.divides and self.place < self.size:
            self.shares.assign(self.place, self.size)

    def _update(self, *, promoted: bool, now_ns: int) -> list[sim.Effect[Message]]:
        if promoted:
            self._recovered()
        self.world.ways.add("promotes" if promoted else "commits")
        self._note_size()
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
            self.world.ended_well.add(self.member)
            return [sim.Exit()]
        if self.machine.meets_again:
            return self._cut(now_ns, withdraws=False)
        return self._begin("grow" if self.grows else "gradients", now_ns)

    def _note_size(self) -> None:
        before, size = self.world.size, self.size
        if before and size != before:
            self.world.ways.add("grows" if size > before else "shrinks")
        self.world.size = size


def build(
    seed: int | str, world: WorldT, rank: Callable[[WorldT, int, int, random.Random], LoopRank]
) -> tuple[sim.Simulation[Message], WorldT]:
    """Return the simulation of one loop, without its kills. rank: makes the driver of one."""
    simulation = sim.Simulation[Message](seed, conditions=conditions_of(seed))
    world.lives = add_processes(
        simulation,
        world.options.world_size,
        lambda _: NodeProcess(world, simulation.rng("regroups"), simulation.rng("late")),
        partial(rank, world),
    )
    return simulation, world


@dataclass(frozen=True)
class LoopScenario(JobScenario[JobOptions, LoopWorld]):
    """The machine of a resilient loop and a node's, over meetings. `length` counts steps."""

    rank: ClassVar[type[LoopRank]] = LoopRank
    name: str = "loop"
    description: str = "steps of a PyTorch loop: kills in and about votes and recoveries, replace or shrink"

    def options_of(self, seed: int | str, options: sim.Options) -> JobOptions:
        """See `JobScenario`."""
        rng = random.Random(f"{seed}/options")
        shrink = rng.random() < SHRINK_SHARE
        late = shrink and rng.random() < LATE_SHARE
        size = min(options.ranks, RANKS_MAX)
        return JobOptions(world_size=size, steps=options.length, shrink=shrink, late=late)

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], LoopWorld]:
        """See `JobScenario`."""
        return build(seed, LoopWorld(job), self.rank)

    def is_over(self, simulation: sim.Simulation[Message], world: LoopWorld) -> bool:
        """Return whether all have finished, or the state was lost with all who had it.

        With a loop that shrinks, those that were lost stay away.
        """
        size = world.options.world_size
        everyone = not any(simulation.lives(f"rank{rank}") for rank in range(size))
        finished = bool(world.finished) if world.options.shrink else len(world.finished) == size
        return everyone and (world.state_lost or finished)
