"""Scenarios over the machines of a job, and their plans of kills, drawn from runs of the same seed.

Kills at random times rarely hit the few moments at which rules meet. So most of these name a point between
two effects (`sim.CrashWithin`), out of all that a run under the same seed passes.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from zbmd.collectives.scenarios.commit_world import CommitOptions, Message
from zbmd.transport import sim

MessageT = TypeVar("MessageT")
WorldT = TypeVar("WorldT")

REDRAWS_MAX = 6
"""How often the run is repeated with the kills drawn so far, so that the next can fall into a recovery."""
DRAW_EVENTS_MAX = 50_000
POINT_SHARE = 0.75
"""The share of kills that fall between two effects; the others strike at any moment."""
END_POWER = 3
"""How much those are drawn to the end of a run, where its rules meet: 46 % fall into the last tenth."""
DISTURBANCE_SHARE = 0.15
"""The share of faults that stop a process or hold up its messages for a while, and kill nobody."""
DISTURBANCES: tuple[type[sim.Fault], ...] = (sim.Pause, sim.Clog, sim.Cut, sim.Partition)
SLOW_NS = 30_000_000
"""The slowest that anything is, but for its jitter."""
ROUND_NS_MAX = 20 * SLOW_NS
"""What a step, or a recovery, takes at most: a dozen messages one after the other, and their work."""
SHRINK_SHARE = 0.4


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
        """What kills are drawn from: a run that takes as long as that of `made`."""
        return self.made(seed, job)[0]

    def build(self, seed: int | str, options: sim.Options) -> sim.Stage:
        """See `zbmd.transport.sim.Scenario`."""
        job = self.options_of(seed, options)
        simulation, world = self.made(seed, job)
        span_ns = (job.steps + options.faults + 1) * ROUND_NS_MAX
        return sim.Stage(
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
