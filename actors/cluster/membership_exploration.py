"""Every single kill of a small cluster, while something else happens to it.

A **story** is what happens to a cluster that has formed: a node joins, dies, leaves, or orders a command.
It is told once undisturbed; then, in a run for each, once for every point of it, between any two effects of
any node, at which that node is killed. Safety is checked throughout (`membership_scenario`). Where those who
are left can decide, they must end up in one view of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zbmd.actors.cluster.jobs import JobSpec, Submit
from zbmd.actors.cluster.members import quorum
from zbmd.actors.cluster.membership_scenario import (
    LIVENESS_NS,
    SECOND_NS,
    Cluster,
    Packet,
    build,
    in_one_view,
    name_of,
)
from zbmd.transport import sim

World = tuple[sim.Simulation[Packet], Cluster]
Story = Callable[[sim.Simulation[Packet], int], None]
"""Takes the world and the number of its members; node `size` is one that has not been started."""

CALM_NS = SECOND_NS
UNDECIDED_NS = 3 * SECOND_NS


def _joins(simulation: sim.Simulation[Packet], size: int) -> None:
    simulation.start(name_of(size), delay_ns=0)


def _dies(simulation: sim.Simulation[Packet], size: int) -> None:
    simulation.crash(name_of(size - 1))


def _leaves(simulation: sim.Simulation[Packet], size: int) -> None:
    simulation.command(name_of(0), "leave")


def _orders(simulation: sim.Simulation[Packet], size: int) -> None:
    simulation.command(name_of(size - 1), Submit(spec=JobSpec(job=1, target="job.py")))


STORIES: Mapping[str, Story] = MappingProxyType(
    {"a node joins": _joins, "a node dies": _dies, "a node leaves": _leaves, "a node orders": _orders}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What came of a story. points: kills tried, of `points_all`; decided: runs whose rest had to go on."""

    story: str
    size: int
    points: int
    points_all: int
    decided: int
    events: int


def formed(seed: int | str, size: int) -> World:
    """A cluster of `size` members, and one more node that has not been started."""
    simulation, cluster = build(seed, size, spare=1)
    cluster.protected = frozenset()
    everybody = frozenset(map(name_of, range(size)))
    simulation.run(until=lambda: in_one_view(cluster, everybody), for_ns=LIVENESS_NS)
    assert in_one_view(cluster, everybody)
    return simulation, cluster


def explore(story: str, size: int, *, points_max: int | None = None) -> Explored:
    """Tell a story with each of its kills, or with `points_max` of them at even distances.

    Raises `SimulationFailure` or `AssertionError` for a kill that breaks something.
    """
    seed = f"{story}/{size}"
    begun, cluster = formed(seed, size)
    view = cluster.nodes[name_of(0)].acts_on
    assert view is not None
    before = {name_of(node_id): 0 for node_id in range(size + 1)}
    for point in begun.kill_points():
        before[point.process] = max(before[point.process], point.delivery)
    STORIES[story](begun, size)
    begun.run(for_ns=CALM_NS)
    points = [p for p in begun.kill_points() if p.delivery > before[p.process] and p.effects]
    chosen = points if points_max is None else points[:: max(1, len(points) // points_max)]
    decided = events = 0
    for point in chosen:
        simulation, cluster = formed(seed, size)
        simulation.crash_during(point)
        STORIES[story](simulation, size)
        simulation.run(for_ns=CALM_NS)
        left = [i for i in range(size + 1) if simulation.lives(name_of(i))]
        if quorum(view, left).holds:
            decided += 1
            _settle(simulation, cluster, frozenset(map(name_of, left)), f"{seed}: {point}")
        else:
            simulation.run(for_ns=UNDECIDED_NS)  # nobody may decide; nothing unsafe may happen
        events += simulation.events
    return Explored(
        story=story, size=size, points=len(chosen), points_all=len(points), decided=decided, events=events
    )


def _settle(simulation: sim.Simulation[Packet], cluster: Cluster, left: frozenset[str], what: str) -> None:
    simulation.run(until=lambda: in_one_view(cluster, left), for_ns=LIVENESS_NS)
    assert in_one_view(cluster, left), (
        f"{what}: {', '.join(sorted(left))} do not agree on a view of their own"
    )
