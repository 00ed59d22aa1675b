"""A simulated group whose members repair their operations: the scenario behind its tests and seed hunts.

Each rank is the production machine over a model of the data plane. What members do together is a *meeting*:
nobody goes on before all have entered; then each ends it in its own time, or is cut short by a notice of
death, by a member that has withdrawn, or by a view that has come meanwhile. Memory outlives its process, as
shared segments do, and a caller scribbles over input and result as soon as its operation is over.

Checked at every end of an operation: its result holds each contributor's input exactly once and nothing else;
all who return it have the same contributors, the dead too; and no living member has seen it fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, assert_never

from zbmd.actors.view import RANKS_MAX, MemberId
from zbmd.collectives.repair import events as rm
from zbmd.collectives.repair.events import Inputs, OnLoss, Outcome, Phase
from zbmd.collectives.repair.machine import RepairMachine, RepairState
from zbmd.collectives.scenarios.hosted_job import (
    JobOptions,
    JobScenario,
    MemberProcess,
    Message,
    add_processes,
    group_of,
)
from zbmd.collectives.scenarios.node import NodeProcess, draw_conditions
from zbmd.transport import sim

TICK_NS_MAX = 300_000
"""The slowest step of the data plane."""
CALL_NS_MAX = 3_000_000
"""The longest that a caller computes between two operations."""
OWN_SHARE = 0.5
"""The share of operations with a different result per member, where inputs stay."""
ROOT_SHARE = 0.2
"""The share of operations with a root."""
GO_ON_SHARE = 0.5
"""The share of meetings that a member ends when it could also be cut short."""

Token: TypeAlias = "tuple[MemberId, int]"
"""One input: whose, and of which operation."""
Value: TypeAlias = "tuple[Token, ...] | None"
"""The content of an array; None: torn, or not written."""


@dataclass(slots=True)
class Memory:
    """A rank's arrays of its current operation, as its peers can read them, also after its death."""

    given: Value = None
    out: Value = None
    published: int = 0


@dataclass(slots=True)
class Meeting:
    """One data-plane operation of some members."""

    members: tuple[MemberId, ...]
    entered: dict[MemberId, object] = field(default_factory=dict[MemberId, object])
    withdrawn: bool = False

    @property
    def complete(self) -> bool:
        """Whether all have entered."""
        return len(self.entered) == len(self.members)


Key: TypeAlias = tuple[int, str, int]


@dataclass(slots=True)
class RepairWorld:
    """The state that outlives a process."""

    options: JobOptions
    seed: int | str
    state_lost: bool = False
    memory: dict[MemberId, Memory] = field(default_factory=dict[MemberId, Memory])
    meetings: dict[Key, Meeting] = field(default_factory=dict[Key, Meeting])
    left: dict[MemberId, int] = field(default_factory=dict[MemberId, int])
    """The last epoch that a member has given up: it takes part in nothing more of it."""
    finished: set[int] = field(default_factory=set[int])
    returned: dict[tuple[int, int], dict[MemberId, tuple[MemberId, ...]]] = field(
        default_factory=dict[tuple[int, int], dict[MemberId, tuple[MemberId, ...]]]
    )
    raised: dict[tuple[int, int], dict[MemberId, rm.Failed]] = field(
        default_factory=dict[tuple[int, int], dict[MemberId, rm.Failed]]
    )
    lives: Callable[[MemberId], bool] = lambda member: True
    ways: set[str] = field(default_factory=set[str])
    """The repairs that were made."""

    def call(self, sequence: int) -> rm.Call:
        """Operation `sequence`, the same on all ranks."""
        rng = random.Random(f"{self.seed}/call {sequence}")
        on_loss, inputs = rng.choice(list(OnLoss)), rng.choice(list(Inputs))
        own = inputs is not Inputs.RECOMPUTE and rng.random() < OWN_SHARE
        needs = rng.randrange(self.options.world_size) if rng.random() < ROOT_SHARE else -1
        return rm.Call(text=f"sum {sequence}", on_loss=on_loss, inputs=inputs, needs=needs, own=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A meeting that a rank is to take part in. `adopted`: whose contribution it brings in."""

    name: str
    sequence: int
    ranks: tuple[int, ...]
    adopted: tuple[MemberId, ...] = ()
    source: int = -1


class RankProcess(MemberProcess):
    """The driver of one rank: performs the machine's actions on the world, decides nothing."""

    def __init__(self, world: RepairWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(rank, incarnation, rng)
        self.world = world
        self.memory = world.memory[self.member] = Memory()
        self.machine = RepairMachine(rank=rank)
        self.stages: list[Stage] = []
        self.report: rm.Report | None = None
        self.moved = 0

    def check_invariants(self) -> None:
        """The machine's own."""
        self.machine.check_invariants()

    def _fired(self, name: str, now_ns: int) -> list[sim.Effect[Message]]:
        return self._call(now_ns) if name == "call" else self._meet(now_ns)

    # ---- views

    def _waits_for_view(self) -> bool:
        return self.machine.state in (
            RepairState.NEW,
            RepairState.AWAITING_VIEW,
            RepairState.EXCHANGING,
        )

    def _enter(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Enter the view known last if all are linked; an exchange of an earlier epoch ends with that."""
        if not self._may_enter():
            return []
        if self.machine.state is RepairState.EXCHANGING:
            return self._cut(now_ns)
        self.entered = self.known.epoch
        members = self.known.ids
        self.parted.clear()  # links that had ended stand again
        event = rm.EpochEntered(
            epoch=self.known.epoch,
            members=members,
            gone=(*self.known.finished, *self.known.lost),
            readable=self.readable(members) if self.machine.call else (),
        )
        return self._feed(event, now_ns)

    def readable(self, members: tuple[MemberId, ...]) -> tuple[MemberId, ...]:
        """Those not among `members` who have published something for the operation under way."""
        memories = sorted(self.world.memory.items(), key=lambda item: _key(item[0]))
        return tuple(
            member
            for member, memory in memories
            if member not in members and memory.published == self.machine.sequence
        )

    # ---- calls

    def _call(self, now_ns: int) -> list[sim.Effect[Message]]:
        sequence = self.machine.sequence
        if sequence > self.world.options.steps:
            self.world.finished.add(self.member.rank)
            return [sim.Exit()]
        call = self.world.call(sequence)
        self.memory.given = ((self.member, sequence),)
        self.memory.out = None
        if call.inputs is Inputs.ADOPT:
            self.memory.published = sequence
        return self._feed(rm.Called(call=call), now_ns)

    def _feed(self, event: rm.RepairEvent, now_ns: int) -> list[sim.Effect[Message]]:
        effects: list[sim.Effect[Message]] = []
        for action in self.machine.handle(event, now_ns=now_ns):
            effects += self._perform(action, now_ns)
        return effects

    def _perform(self, action: rm.RepairAction, now_ns: int) -> list[sim.Effect[Message]]:
        everyone = tuple(member.rank for member in self.machine.members)
        match action:
            case rm.AwaitView():
                return [*self._link(), *self._enter(now_ns)]
            case rm.Exchange(report=report):
                self.report = report
                return self._begin([Stage(name="exchange", sequence=0, ranks=everyone)], now_ns)
            case rm.Run(sequence=sequence):
                return self._begin([Stage(name="run", sequence=sequence, ranks=everyone)], now_ns)
            case rm.Rerun(sequence=sequence, runners=runners, adopted=adopted):
                self.world.ways.add("adopt" if adopted else "rerun")
                if self.machine.call is not None and self.memory.out is not None:
                    self.world.ways.add("anew")
                mine = tuple(a.member for a in adopted if a.carrier == self.member.rank)
                stage = Stage(name="rerun", sequence=sequence, ranks=runners, adopted=mine)
                return self._begin([stage], now_ns)
            case rm.CopyResult(sequence=sequence, source=source, to=to):
                self.world.ways.add("copy")
                assert not self.world.call(sequence).own, f"{self.member} copies the result of another"
                ranks = tuple(sorted((source, *to)))
                return self._begin(
                    [Stage(name="copy", sequence=sequence, ranks=ranks, source=source)], now_ns
                )
            case rm.Confirm(sequence=sequence):
                return self._begin([], now_ns, sequence)
            case rm.Return(sequence=sequence, contributors=contributors):
                return self._returned(sequence, contributors, now_ns)
            case rm.Raise(failed=failed):
                return self._raised(failed, now_ns)
            case rm.Settled():
                return self._calm(now_ns)
            case rm.GaveUp():
                raise AssertionError("nothing here gives up")
            case _:
                assert_never(action)

    def _returned(
        self, sequence: int, contributors: tuple[MemberId, ...], now_ns: int
    ) -> list[sim.Effect[Message]]:
        world, value = self.world, self.memory.out
        where = f"{self.member} returns {sequence} of {contributors}"
        assert value is not None, f"{where}, and holds nothing"
        assert sorted(_key(m) for m, _ in value) == [_key(m) for m in contributors], f"{where}: {value}"
        assert {s for _, s in value} == {sequence}, f"{where}: {value}"
        assert self.member in contributors, where
        needs = world.call(sequence).needs
        assert needs < 0 or needs in {m.rank for m in contributors}, (
            f"{where}, and its root is not among them"
        )
        key = (self.machine.born, sequence)
        others = world.returned.setdefault(key, {})
        assert set(others.values()) <= {contributors}, f"{where}; others: {others}"
        assert not any(world.lives(m) for m in world.raised.get(key, {})), f"{where}; it failed elsewhere"
        others[self.member] = contributors
        return self._calm(now_ns)

    def _raised(self, failed: rm.Failed, now_ns: int) -> list[sim.Effect[Message]]:
        world, key = self.world, (self.machine.born, failed.sequence)
        where = f"{self.member} sees {failed} "
        living = {m: f for m, f in world.raised.setdefault(key, {}).items() if world.lives(m)}
        assert all(f.failure is failed.failure for f in living.values()), f"{where}; others: {living}"
        assert not any(world.lives(m) for m in world.returned.get(key, {})), f"{where}; it returned elsewhere"
        assert failed.failure is not rm.Failure.DESYNCHRONISED, where
        world.raised[key][self.member] = failed
        world.ways.add(failed.failure.value)
        return self._calm(now_ns)

    def _calm(self, now_ns: int) -> list[sim.Effect[Message]]:
        """The operation is over: the memory is the caller's, who uses it for something else."""
        self.memory.published = 0
        self.memory.given = self.memory.out = None
        self.stages.clear()
        return [sim.SetTimer(name="call", at_ns=now_ns + self.rng.randint(1, CALL_NS_MAX))]

    # ---- the data plane

    def _begin(
        self, stages: list[Stage], now_ns: int, sequence: int | None = None
    ) -> list[sim.Effect[Message]]:
        everyone = tuple(member.rank for member in self.machine.members)
        self.stages, self.moved = stages, 0
        if not stages or stages[0].name != "exchange":
            number = self.machine.sequence if sequence is None else sequence
            self.stages = [*stages, Stage(name="commit", sequence=number, ranks=everyone)]
        return self._tick(now_ns)

    def _tick(self, now_ns: int) -> list[sim.Effect[Message]]:
        return [sim.SetTimer(name="work", at_ns=now_ns + self.rng.randint(1, TICK_NS_MAX))]

    def _meet(self, now_ns: int) -> list[sim.Effect[Message]]:
        """One look at the meeting under way: enter it, move data, end it, or be cut short."""
        if not self.stages:
            return []
        stage, me = self.stages[0], self.member
        meeting = self._meeting(stage)
        if me not in meeting.entered:
            meeting.entered[me] = self._brings(stage)
            return self._tick(now_ns)
        gave_up = any(self.world.left.get(m, 0) >= self.machine.epoch for m in meeting.members)
        doomed = meeting.withdrawn or gave_up or not (self.lost | self.parted).isdisjoint(meeting.members)
        if not meeting.complete:
            return self._cut(now_ns) if doomed else self._tick(now_ns)
        if doomed and (meeting.withdrawn or self.rng.random() > GO_ON_SHARE):
            return self._cut(now_ns)
        if stage.name in ("run", "rerun", "copy") and not self.moved:
            self._move(stage)
            return self._tick(now_ns)
        return self._ends(stage, meeting, now_ns)

    def _meeting(self, stage: Stage) -> Meeting:
        epoch = self.machine.epoch
        members = tuple(m for m in self.machine.members if m.rank in stage.ranks)
        found = self.world.meetings.setdefault((epoch, stage.name, stage.sequence), Meeting(members))
        assert found.members == members, f"{self.member} meets {members} in {stage}, others {found.members}"
        return found

    def _brings(self, stage: Stage) -> object:
        match stage.name:
            case "exchange":
                return self.report
            case "run" | "rerun":
                inputs = [self.memory.given, *(self.world.memory[m].given for m in stage.adopted)]
                return tuple(token for given in inputs for token in (given or ()))
            case "copy":
                return self.memory.out
            case _:
                return None

    def _move(self, stage: Stage) -> None:
        """Data moves: what is written is torn until the end, and in place the input is gone."""
        self.moved = 1
        if stage.name == "copy" and stage.source == self.member.rank:
            return
        self.memory.out = None
        call = self.machine.call
        assert call is not None
        if call.inputs is Inputs.RECOMPUTE:
            self.memory.given = None

    def _cut(self, now_ns: int) -> list[sim.Effect[Message]]:
        stage = self.stages[0]
        self._meeting(stage).withdrawn = True
        self.world.left[self.member] = self.machine.epoch
        self.stages.clear()
        if stage.name == "exchange":
            return self._feed(rm.ExchangeCut(epoch=self.machine.epoch), now_ns)
        holds = stage.name == "commit" or (stage.name == "copy" and stage.source == self.member.rank)
        call = self.machine.call
        in_place = call is not None and call.inputs is Inputs.RECOMPUTE
        if holds and call is not None:
            outcome = Outcome.HELD
        else:
            spoiled = in_place and (self.moved or self.machine.phase is Phase.SPOILED)
            outcome = Outcome.SPOILED if spoiled else Outcome.INTACT
        return self._feed(rm.Ended(epoch=self.machine.epoch, outcome=outcome), now_ns)

    def _ends(self, stage: Stage, meeting: Meeting, now_ns: int) -> list[sim.Effect[Message]]:
        self.stages.pop(0)
        epoch = self.machine.epoch
        match stage.name:
            case "exchange":
                brought = [meeting.entered[member] for member in meeting.members]
                reports = tuple(report for report in brought if isinstance(report, rm.Report))
                return self._feed(rm.Exchanged(epoch=epoch, reports=reports), now_ns)
            case "commit":
                return self._feed(rm.Ended(epoch=epoch, outcome=Outcome.COMMITTED), now_ns)
            case "copy":
                source = next(m for m in meeting.members if m.rank == stage.source)
                self.memory.out = _value(meeting.entered[source])
            case _:
                total = [t for brought in meeting.entered.values() for t in _value(brought) or ()]
                self.memory.out = tuple(sorted(total, key=lambda token: _key(token[0])))
        return self._tick(now_ns)


def _value(brought: object) -> Value:
    return brought if isinstance(brought, tuple) else None


def _key(member: MemberId) -> tuple[int, int]:
    return member.rank, member.incarnation


def conditions_of(seed: int | str) -> sim.Conditions:
    """The network of a run."""
    return draw_conditions(random.Random(f"{seed}/conditions"))


def build(seed: int | str, options: JobOptions) -> tuple[sim.Simulation[Message], RepairWorld]:
    """The simulation of one group, without its kills. `options.steps` counts operations."""
    simulation = sim.Simulation[Message](seed, conditions=conditions_of(seed))
    world = RepairWorld(options, seed)
    world.lives = add_processes(
        simulation,
        options.world_size,
        lambda _: NodeProcess(world, simulation.rng("regroups")),
        partial(RankProcess, world),
    )
    return simulation, world


@dataclass(frozen=True)
class RepairScenario(JobScenario[JobOptions, RepairWorld]):
    """The repair machine and a node's, over meetings. `length` counts operations."""

    name: str = "repair"
    description: str = "operations that members finish together when some die in them, in every mode"

    def options_of(self, seed: int | str, options: sim.Options) -> JobOptions:
        """See `JobScenario`."""
        return group_of(seed, options, RANKS_MAX)

    def made(self, seed: int | str, job: JobOptions) -> tuple[sim.Simulation[Message], RepairWorld]:
        """See `JobScenario`."""
        return build(seed, job)

    def is_over(self, simulation: sim.Simulation[Message], world: RepairWorld) -> bool:
        """Return whether all have finished; with a group that shrinks, those that were lost stay away."""
        gone = [rank for rank in range(world.options.world_size) if not simulation.lives(f"rank{rank}")]
        everyone = len(gone) == world.options.world_size
        if world.options.shrink:
            return everyone and (bool(world.finished) or world.state_lost)
        return everyone and len(world.finished) == world.options.world_size
