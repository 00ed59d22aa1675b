"""Kills between two effects, as faults of a plan: what scenarios over machines add to the simulator's frame.

In a `Simulation` all that a process does at one stimulus happens at one moment. Here each effect is thought
to take a nanosecond: a crash `k` + 1 ns after a stimulus falls after its first `k` effects. So a plain
`Crash` can name every point at which a process can be killed, and a plan of them can be printed, parsed and
shrunk like any other. `draw_kills` picks such points: kills at random times rarely hit the few moments at
which rules meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from zbmd.transport import sim

MessageT = TypeVar("MessageT")

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


class KillableSimulation(sim.Simulation[MessageT]):
    """A simulation of machines in which a `Crash` can strike between two effects.

    `deliveries` tells of every stimulus taken: when, by whom, and how many effects it had. What a process
    takes at one moment is told as one after the other.
    """

    def __init__(self, seed: int | str, *, conditions: sim.Conditions = sim.CALM) -> None:
        super().__init__(seed, conditions=conditions)
        self.deliveries: list[tuple[int, str, int]] = []
        self._crashes_ns: dict[str, set[int]] = {}
        self._done_ns: dict[str, int] = {}

    def add(self, name: str, factory: Callable[[int], sim.Process[MessageT]], *, start: bool = True) -> None:
        """As `Simulation.add`."""

        def make(incarnation: int) -> sim.Process[MessageT]:
            return _Killable(self, name, incarnation, factory(incarnation))

        super().add(name, make, start=start)

    def apply(self, fault: sim.Fault) -> None:
        """As `Simulation.apply`; a crash between two effects strikes there."""
        super().apply(fault)
        if isinstance(fault, sim.Crash):
            self._crashes_ns.setdefault(fault.process, set()).add(sim.SIM_START_NS + fault.at_ns)

    def heal(self, core: frozenset[str], *, revive: bool) -> None:
        """As `Simulation.heal`."""
        super().heal(core, revive=revive)
        self._crashes_ns.clear()

    def took(self, name: str, incarnation: int, delivery: int, effects: int) -> None:
        """A process has taken a stimulus; kill it between the effects if a crash falls there."""
        # What it takes at the same moment comes after the effects of what it took before.
        begin_ns = max(self.now_ns, self._done_ns.get(name, 0))
        self._done_ns[name] = begin_ns + effects + 1
        self.deliveries.append((begin_ns, name, effects))
        for at_ns in self._crashes_ns.get(name, ()):
            done = at_ns - begin_ns - 1
            if 0 <= done <= effects:
                self.crash_during(sim.KillPoint(name, incarnation, delivery, done))
                return


class _Killable(sim.Process[MessageT]):
    """A process that says how many effects each of its stimuli has."""

    def __init__(
        self,
        simulation: KillableSimulation[MessageT],
        name: str,
        incarnation: int,
        process: sim.Process[MessageT],
    ) -> None:
        self._simulation, self._name, self._incarnation = simulation, name, incarnation
        self._process = process
        self._deliveries = 0

    def deliver(self, stimulus: sim.Stimulus[MessageT], *, now_ns: int) -> Sequence[sim.Effect[MessageT]]:
        self._deliveries += 1
        effects = self._process.deliver(stimulus, now_ns=now_ns)
        self._simulation.took(self._name, self._incarnation, self._deliveries, len(effects))
        return effects

    def check_invariants(self) -> None:
        self._process.check_invariants()


def draw_kills(
    rng: random.Random,
    victims: Sequence[str],
    count: int,
    build: Callable[[], KillableSimulation[MessageT]],
) -> sim.FaultPlan:
    """Draw `count` faults, most of them kills of `victims`: where, the runs of `build()` say.

    Each is drawn from a run under those before it, so that the second often falls into the recovery from the
    first. A run that fails ends the drawing: the faults so far are what is looked for. The scenario brings
    the dead back by itself.
    """
    plan: list[sim.Fault] = []
    points: list[tuple[int, str]] = []
    span_ns = 1
    for drawn in range(count):
        if drawn < REDRAWS_MAX:
            try:
                simulation = _rehearse(build(), plan)
            except sim.SimulationFailure:
                break
            points = [
                (at_ns - sim.SIM_START_NS + 1 + done, name)
                for at_ns, name, effects in simulation.deliveries
                if name in victims
                for done in range(effects + 1)
            ]
            span_ns = simulation.now_ns - sim.SIM_START_NS + 1
        plan.append(_draw_one(rng, victims, points, span_ns))
    return tuple(sorted(plan, key=lambda fault: fault.at_ns))


def _rehearse(
    simulation: KillableSimulation[MessageT], plan: Sequence[sim.Fault]
) -> KillableSimulation[MessageT]:
    for fault in plan:
        simulation.apply(fault)
    simulation.run(max_events=DRAW_EVENTS_MAX)
    return simulation


def _draw_one(
    rng: random.Random, victims: Sequence[str], points: Sequence[tuple[int, str]], span_ns: int
) -> sim.Fault:
    if len(victims) > 1 and rng.random() < DISTURBANCE_SHARE:
        return sim.draw_plan(rng, victims, span_ns, DISTURBANCES, 1)[0]
    if points and rng.random() < POINT_SHARE:
        at_ns, victim = points[-1 - int(len(points) * rng.random() ** END_POWER)]
    else:
        at_ns, victim = rng.randrange(span_ns), rng.choice(victims)
    return sim.Crash(process=victim, at_ns=at_ns, for_ns=0)
