"""Plans of kills for scenarios over machines, drawn from runs of the same seed.

Kills at random times rarely hit the few moments at which rules meet. So most of these name a point between
two effects (`sim.CrashWithin`), out of all that a run under the same seed passes.
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
