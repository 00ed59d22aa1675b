"""Parts of simulated jobs: kill plans, runs, messages, memory, and the state that outlives a process.

What a step computes is the scenario's choice (`Contents`): here a hash chain, in
`zbmd.training.replicated.scenario` the training itself.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.view import MemberId, View
from zbmd.collectives.commit import events as cm
from zbmd.collectives.commit.machine import StepCommit
from zbmd.transport import sim

# ---- kill plans
#
# Kills at random times rarely hit the few moments at which rules meet. Most plans therefore name a point
# between two effects (`sim.CrashWithin`), out of all that a run with the same seed passes.

MessageT = TypeVar("MessageT")
WorldT = TypeVar("WorldT", bound="HostedJob")

NODE = "node"
JOB = 1
"""The id of a scenario's job."""

REDRAWS_MAX = 6
"""Repetitions of the run with the kills drawn so far, so that the next can fall into a recovery."""
DRAW_EVENTS_MAX = 50_000
POINT_SHARE = 0.75
"""The share of kills that fall between two effects; the others strike at any moment."""
END_POWER = 3
"""Draws them to the end of a run, where its rules meet: 46 % fall into the last tenth."""
DISTURBANCE_SHARE = 0.15
"""The share of faults that stop a process or hold up its messages for a while, and kill nobody."""
DISTURBANCES: tuple[type[sim.Fault], ...] = (sim.Pause, sim.Clog, sim.Cut, sim.Partition)
SLOW_NS = 30_000_000
"""The slowest that anything is, but for its jitter."""
ROUND_NS_MAX = 20 * SLOW_NS
"""The longest step, or recovery: a dozen messages one after the other, and their work."""
SHRINK_SHARE = 0.4


class HostedJob(Protocol):
    """The part of a job that its node knows."""

    options: CommitOptions
    state_lost: bool


class JobScenario(ABC, Generic[WorldT]):
    """See `zbmd.transport.sim.Scenario`: ranks of one job, which a simulated node starts, again and again."""

    kinds: tuple[type[sim.Fault], ...] = (sim.Crash, *DISTURBANCES)

    @abstractmethod
    def options_of(self, seed: int | str, options: sim.Options) -> CommitOptions:
        """The job that a run of the frame stands for; what `options` leaves open is the seed's choice."""

    @abstractmethod
    def made(self, seed: int | str, job: CommitOptions) -> tuple[sim.Simulation[Message], WorldT]:
        """The simulation of one job, without its kills, and what outlives its processes."""

    @abstractmethod
    def is_over(self, simulation: sim.Simulation[Message], world: WorldT) -> bool:
        """Whether the run has ended as it may."""

    def rehearsed(self, seed: int | str, job: CommitOptions) -> sim.Simulation[Message]:
        """Return a run, as long as that of `made`, from which kills are drawn."""
        return self.made(seed, job)[0]

    def run(self, seed: int | str, job: CommitOptions) -> WorldT:
        """Run one seed to its end, under the kills that it draws.

        Raises `zbmd.transport.sim.SimulationFailure` with the story of the run if safety or liveness is
        broken.
        """
        names = names_of(job.world_size)
        kills = draw_kills(
            random.Random(f"{seed}/kills"), names, job.kills, lambda: self.rehearsed(seed, job)
        )
        simulation, world = self.made(seed, job)
        for fault in kills:
            simulation.apply(fault)
        simulation.run(until=lambda: world.state_lost)

        def liveness() -> None:
            left = [name for name in names if simulation.lives(name)]
            assert self.is_over(simulation, world), f"nothing is under way, {left} have not finished"

        simulation.add_checker("liveness", liveness)
        simulation.command(NODE, "look")
        simulation.run()
        return world

    def build(self, seed: int | str, options: sim.Options) -> sim.ScenarioStage:
        """See `zbmd.transport.sim.Scenario`."""
        job = self.options_of(seed, options)
        simulation, world = self.made(seed, job)
        span_ns = (job.steps + options.faults + 1) * ROUND_NS_MAX
        return sim.ScenarioStage(
            world=simulation,
            victims=names_of(job.world_size),
            converged=lambda core: self.is_over(simulation, world),
            span_ns=span_ns,
            liveness_ns=span_ns,
            restarts_itself=True,
        )

    def draw_plan(self, seed: int | str, options: sim.Options) -> sim.FaultPlan:
        """Kills between two effects, from runs of the same seed; see `draw_kills`."""
        job = self.options_of(seed, options)
        victims, rng = names_of(job.world_size), random.Random(f"{seed}/kills")
        return draw_kills(rng, victims, options.faults, lambda: self.rehearsed(seed, job))


def group_of(seed: int | str, options: sim.Options, ranks_max: int) -> CommitOptions:
    """A job in which nothing but whether it shrinks is the seed's choice."""
    shrink = random.Random(f"{seed}/options").random() < SHRINK_SHARE
    return CommitOptions(world_size=min(options.ranks, ranks_max), steps=options.length, shrink=shrink)


def names_of(world_size: int) -> tuple[str, ...]:
    """The processes of the ranks."""
    return tuple(f"rank{rank}" for rank in range(world_size))


def draw_kills(
    rng: random.Random,
    victims: Sequence[str],
    count: int,
    build: Callable[[], sim.Simulation[MessageT]],
) -> sim.FaultPlan:
    """Draw `count` faults, most of them kills of `victims`: where, the runs of `build()` say.

    Each is drawn from a run under those before it, so that the second often falls into the recovery from the
    first. A run that fails ends the drawing: the faults so far are what is looked for. The scenario brings
    the dead back by itself.
    """
    plan: list[sim.Fault] = []
    points: list[sim.CrashWithin] = []
    span_ns = 1
    for drawn in range(count):
        if drawn < REDRAWS_MAX:
            try:
                simulation = _rehearse(build(), plan)
            except sim.SimulationFailure:
                break
            points = simulation.kill_faults(victims)
            span_ns = simulation.now_ns - sim.SIM_START_NS + 1
        plan.append(_draw_one(rng, victims, points, span_ns))
    return tuple(sorted(plan, key=lambda fault: fault.at_ns))


def _rehearse(simulation: sim.Simulation[MessageT], plan: Sequence[sim.Fault]) -> sim.Simulation[MessageT]:
    for fault in plan:
        simulation.apply(fault)
    simulation.run(max_events=DRAW_EVENTS_MAX)
    return simulation


def _draw_one(
    rng: random.Random, victims: Sequence[str], points: Sequence[sim.CrashWithin], span_ns: int
) -> sim.Fault:
    if len(victims) > 1 and rng.random() < DISTURBANCE_SHARE:
        return sim.draw_plan(rng, victims, span_ns, DISTURBANCES, 1)[0]
    if points and rng.random() < POINT_SHARE:
        return points[-1 - int(len(points) * rng.random() ** END_POWER)]
    return sim.Crash(process=rng.choice(victims), at_ns=rng.randrange(span_ns), for_ns=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """The node tells a rank that all members of the view of `epoch` are linked."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A rank has lost its links to another, which lives."""

    member: MemberId


Message: TypeAlias = (
    Parted
    | jobs.Joined
    | jobs.InstallView
    | jobs.Linked
    | Enter
    | cm.ReportReceived
    | cm.VoteReceived
    | cm.FinishReceived
    | cm.GaveUpReceived
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """One run: `world_size` ranks, `steps` steps, `kills` SIGKILLs at random moments, then calm."""

    world_size: int = 4
    steps: int = 12
    kills: int = 3
    shrink: bool = False
    corrupting: bool = False
    """A pull now and then brings other bits than it read, as bad memory does: it must be noticed."""
    late: bool = False
    """One rank joins the others at their work."""


def joined(member: MemberId) -> sim.Send[Message]:
    """Return what a rank tells the node as it starts."""
    address = f"{member.rank}#{member.incarnation}"
    return sim.Send(to=NODE, message=jobs.Joined(key=key_of(member), address=address))


def linked(member: MemberId, epoch: int) -> sim.Send[Message]:
    """Return what a rank tells the node when it is linked for a view."""
    return sim.Send(to=NODE, message=jobs.Linked(key=key_of(member), epoch=epoch))


def install(view: View) -> jobs.InstallView:
    """Return what the node tells the members of a view."""
    return jobs.InstallView(job=JOB, view=view, to=view.ranks)


def key_of(member: MemberId) -> RankKey:
    """Return the process of the job that a member is."""
    return RankKey(JOB, member.rank, member.incarnation)


def member_of(process: str, incarnation: int) -> MemberId:
    """Return the member that a rank's process is."""
    return MemberId(rank=int(process.removeprefix("rank")), incarnation=incarnation)


def add_processes(
    simulation: sim.Simulation[Message],
    world_size: int,
    node: Callable[[int], sim.Process[Message]],
    rank_process: Callable[[int, int, random.Random], sim.Process[Message]],
) -> Callable[[MemberId], bool]:
    """Add the node, and the ranks, which it starts. Return whether a member lives.

    rank_process: makes a rank's process of rank, incarnation and random source.
    """
    incarnations: dict[int, int] = {}

    def make(rank: int, incarnation: int) -> sim.Process[Message]:
        incarnations[rank] = incarnation
        return rank_process(rank, incarnation, simulation.rng(f"rank{rank}#{incarnation}"))

    simulation.add(NODE, node)
    for rank in range(world_size):
        simulation.add(f"rank{rank}", partial(make, rank), start=False)
    return lambda m: simulation.lives(f"rank{m.rank}") and incarnations.get(m.rank) == m.incarnation


class Slots(Protocol):
    """The two slots of one incarnation of a rank: peers can read them, also after its death."""

    def digest(self, slot: int) -> bytes:
        """Of what the slot holds now."""
        ...

    def tear(self, slot: int) -> None:
        """Write something into it that is no version, as work under way does."""
        ...

    def enter(self, work: cm.RunStep) -> None:
        """Begin a step: do what needs no other rank. Its target is torn from here on."""
        ...

    def step(self, work: cm.RunStep) -> bool:
        """End the step, which all members have entered. False if a lost member cuts it short."""
        ...

    def copy(self, source: Slots, source_slot: int, slot: int) -> None:
        """Pull what a slot of a member holds into one of ours."""
        ...

    def recall(self, version: int, slot: int) -> None:
        """Read the preserved `version` back."""
        ...


class Contents(Protocol):
    """The contents of versions, and the step from one to the next."""

    def digest_of(self, version: int) -> bytes:
        """Of the one content that `version` may have."""
        ...

    def open(self, member: MemberId) -> Slots:
        """The slots of a new incarnation: 0 holds version 0."""
        ...


ContentsOf: TypeAlias = "Callable[[sim.Simulation[Message]], Contents]"
"""Makes the contents of a job in a simulation."""


def oracle(version: int) -> bytes:
    """The one content that `version` may have: a hash chain, as a step is a function of the one before."""
    content = b"initial"
    for step in range(1, version + 1):
        content = _advance(content, step)
    return content


def _advance(content: bytes, version: int) -> bytes:
    return hashlib.blake2b(content + version.to_bytes(4, "little"), digest_size=16).digest()


class HashSlots(Slots):
    """Slots of a hash chain; a content is its own digest."""

    def __init__(self) -> None:
        self.held = [oracle(0), b"unwritten"]

    def digest(self, slot: int) -> bytes:
        """See `Slots`."""
        return self.held[slot]

    def tear(self, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = b"torn"

    def enter(self, work: cm.RunStep) -> None:
        """See `Slots`."""
        self.tear(work.slot)

    def step(self, work: cm.RunStep) -> bool:
        """See `Slots`."""
        self.held[work.slot] = _advance(self.held[1 - work.slot], work.version)
        return True

    def copy(self, source: Slots, source_slot: int, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = source.digest(source_slot)

    def recall(self, version: int, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = oracle(version)


class HashChain(Contents):
    """The simplest job whose versions can be distinguished."""

    def __init__(self, simulation: sim.Simulation[Message]) -> None:
        """It needs nothing of the simulation."""

    def digest_of(self, version: int) -> bytes:
        """See `Contents`."""
        return oracle(version)

    def open(self, member: MemberId) -> Slots:
        """See `Contents`."""
        return HashSlots()


@dataclass(slots=True)
class CommitWorld:
    """The state that outlives a process: its memory, the commit log, and the ranks in each step."""

    options: CommitOptions
    contents: Contents
    slots: dict[MemberId, Slots] = field(default_factory=dict[MemberId, Slots])
    entered: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])
    workers: dict[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[int, ...]]
    )
    """By epoch and version, who computes: all members must say the same."""
    abandoned: set[int] = field(default_factory=set[int])
    """Epochs in which a member goes along no more: its peers' operations end."""
    committed_max: int = 0
    finished: set[int] = field(default_factory=set[int])
    preserved: bool = False
    state_lost: bool = False
    corrupted: bool = False
    corruption_noticed: bool = False
    machines: dict[MemberId, StepCommit] = field(default_factory=dict[MemberId, StepCommit])
