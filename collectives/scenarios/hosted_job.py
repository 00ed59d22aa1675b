"""Parts of simulated jobs: kill plans, runs, and the messages between a node and its ranks.

What the ranks do is a scenario's choice: here groups that repair their operations, in
`zbmd.training.scenarios` the training job.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.view import MemberId, View
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

# ---- kill plans
#
# Kills at random times rarely hit the few moments at which rules meet. Most plans therefore name a point
# between two effects (`sim.CrashWithin`), out of all that a run with the same seed passes.

MessageT = TypeVar("MessageT")
WorldT = TypeVar("WorldT", bound="HostedJob")
OptionsT = TypeVar("OptionsT", bound="JobOptions")

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
LATE_SHARE = 0.4
"""The share of runs in which a rank joins the others at their work."""


class HostedJob(Protocol):
    """The part of a job that its node knows."""

    state_lost: bool

    @property
    def options(self) -> JobOptions:
        """Its size, and what becomes of a lost rank."""
        ...


class JobScenario(ABC, Generic[OptionsT, WorldT]):
    """See `zbmd.transport.sim.Scenario`: ranks of one job, which a simulated node starts, again and again."""

    kinds: tuple[type[sim.Fault], ...] = (sim.Crash, *DISTURBANCES)

    @abstractmethod
    def options_of(self, seed: int | str, options: sim.Options) -> OptionsT:
        """The job that a run of the frame stands for; what `options` leaves open is the seed's choice."""

    @abstractmethod
    def made(self, seed: int | str, job: OptionsT) -> tuple[sim.Simulation[Message], WorldT]:
        """The simulation of one job, without its kills, and what outlives its processes."""

    @abstractmethod
    def is_over(self, simulation: sim.Simulation[Message], world: WorldT) -> bool:
        """Whether the run has ended as it may."""

    def rehearsed(self, seed: int | str, job: OptionsT) -> sim.Simulation[Message]:
        """Return a run, as long as that of `made`, from which kills are drawn."""
        return self.made(seed, job)[0]

    def run(self, seed: int | str, job: OptionsT) -> WorldT:
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


def group_of(seed: int | str, options: sim.Options, ranks_max: int) -> JobOptions:
    """A job in which nothing but whether it shrinks is the seed's choice."""
    shrink = random.Random(f"{seed}/options").random() < SHRINK_SHARE
    return JobOptions(world_size=min(options.ranks, ranks_max), steps=options.length, shrink=shrink)


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


Message: TypeAlias = Parted | jobs.Joined | jobs.InstallView | jobs.Linked | Enter


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """One run: `world_size` ranks, `steps` steps, `kills` SIGKILLs at random moments, then calm."""

    world_size: int = 4
    steps: int = 12
    kills: int = 3
    shrink: bool = False
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


class MemberProcess(ABC):
    """A rank as a driver of the views of its job: it links for each, and enters it once all are linked."""

    def __init__(self, rank: int, incarnation: int, rng: random.Random) -> None:
        self.member = MemberId(rank=rank, incarnation=incarnation)
        self.rng = rng
        self.known = View(epoch=0, members=())
        self.entered = 0
        self.may_enter = 0
        self.lost: set[MemberId] = set()
        self.parted: set[MemberId] = set()

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Take note of a view or of a member's end, or do what is due."""
        match stimulus:
            case sim.Started():
                return [joined(self.member)]
            case sim.Arrived(message=jobs.InstallView(view=view)):
                self.known = max(self.known, view, key=lambda known: known.epoch)
                return self._link()
            case sim.Arrived(message=Enter(epoch=epoch)):
                self.may_enter = max(epoch, self.may_enter)
                return self._enter(now_ns)
            case sim.Arrived(message=Parted(member=member)):
                self.parted.add(member)
                return []
            case sim.PeerEnded(peer=peer, incarnation=incarnation):
                if peer != NODE:
                    self.lost.add(member_of(peer, incarnation))
                return []
            case sim.TimerFired(name=name):
                return self._fired(name, now_ns)
            case _:
                raise LocalProtocolError(f"a rank does not expect {stimulus}")

    def _link(self) -> list[sim.Effect[Message]]:
        if not self._waits_for_view() or self.known.epoch <= self.entered:
            return []
        return [linked(self.member, self.known.epoch)]

    def _may_enter(self) -> bool:
        """Whether the view known last is to be entered now."""
        return self._waits_for_view() and self.entered < self.known.epoch <= self.may_enter

    @abstractmethod
    def _waits_for_view(self) -> bool:
        """Whether nothing of the view before is under way."""

    @abstractmethod
    def _enter(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Enter the view known last, if it may be entered."""

    @abstractmethod
    def _fired(self, name: str, now_ns: int) -> list[sim.Effect[Message]]:
        """Do what a timer was set for."""
