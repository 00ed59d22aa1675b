"""Every single kill of a small cluster, while something else happens to it.

A **story** is what happens to a cluster that has formed: a node joins, dies, leaves, or orders a command.
It is told once undisturbed; then, in a run for each, once for every point of it, between any two effects of
any node, at which that node is killed. Safety is checked throughout (`scenario`). Where those who
are left can decide, they must end up in one view of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zbmd.actors.cluster.state.job_table import JobSpec, Submit
from zbmd.actors.cluster.state.view import quorum
from zbmd.actors.simulated.membership_scenario import (
    LIVENESS_NS,
    SECOND_NS,
    Cluster,
    Packet,
    agreement,
    build,
    in_one_view,
    name_of,
)
from zbmd.transport import sim

World = tuple[sim.Simulation[Packet], Cluster]
Story = Callable[[sim.Simulation[Packet], int], None]
"""Takes the world and the number of its members; node `size` is one that has not been started."""

CALM_NS = 2 * SECOND_NS
"""A story is over by then, also that of a death, which is noticed after four slow beats."""
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
    """What came of a story. points: kills, or pairs of them, tried, of `points_all`; decided: runs whose rest
    had to go on."""

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
    simulation.run(until=agreement(cluster, everybody), for_ns=LIVENESS_NS)
    assert in_one_view(cluster, everybody)
    return simulation, cluster


def explore(story: str, size: int, *, points_max: int | None = None, variant: int = 0) -> Explored:
    """Tell a story with each of its kills, or with `points_max` of them at even distances.

    variant: another one is under another seed. Raises `SimulationFailure` or `AssertionError` for a kill that
    breaks something.
    """
    tale = _Tale(story, size, variant)
    points = tale.kill_points()
    return tale.try_all([(point,) for point in _some(points, points_max)], of=len(points))


def explore_pairs(story: str, size: int, *, firsts_max: int | None = None, variant: int = 0) -> Explored:
    """Tell a story with each of its kills, and with each kill after that in a run of its own.

    firsts_max: of the first kills, no more than so many, at even distances; then `points_all` counts the
    pairs that begin with these. Otherwise as `explore`.
    """
    tale = _Tale(story, size, variant)
    pairs = [
        (first, second)
        for first in _some(tale.kill_points(), firsts_max)
        for second in tale.kill_points(after=first)
    ]
    return tale.try_all(pairs, of=len(pairs))


def _some(points: Sequence[sim.KillPoint], most: int | None) -> Sequence[sim.KillPoint]:
    return points if most is None else points[:: max(1, len(points) // most)]


class _Tale:
    """One story of one seed, to be told with different kills; up to the first of these it stays the same."""

    def __init__(self, story: str, size: int, variant: int) -> None:
        self.story, self.size = story, size
        self.seed = f"{story}/{size}/{variant}" if variant else f"{story}/{size}"
        begun, _ = formed(self.seed, size)
        self._before = len(begun.kill_points())

    def kill_points(self, *, after: sim.KillPoint | None = None) -> list[sim.KillPoint]:
        """Where a node could be killed from the story's beginning on; with `after`: once that has struck."""
        simulation, _ = self._tell(() if after is None else (after,))
        points = list(simulation.kill_points())[self._before :]
        if after is not None:
            begin = max(i for i, p in enumerate(points) if _delivery(p) == _delivery(after))
            points = points[begin + 1 :]
        return [point for point in points if point.effects]

    def try_all(self, kills: Collection[tuple[sim.KillPoint, ...]], *, of: int) -> Explored:
        """Each of these in a run of its own."""
        decided = events = 0
        for chosen in kills:
            simulation, cluster = self._tell(chosen)
            decided += self._settles(simulation, cluster, chosen)
            events += simulation.events
        return Explored(
            story=self.story,
            size=self.size,
            points=len(kills),
            points_all=of,
            decided=decided,
            events=events,
        )

    def _tell(self, kills: Iterable[sim.KillPoint]) -> World:
        simulation, cluster = formed(self.seed, self.size)
        for point in kills:
            simulation.crash_during(point)
        STORIES[self.story](simulation, self.size)
        simulation.run(for_ns=CALM_NS)
        return simulation, cluster

    def _settles(
        self, simulation: sim.Simulation[Packet], cluster: Cluster, kills: tuple[sim.KillPoint, ...]
    ) -> bool:
        """Whether those who are left could decide: then they must act on a view of their own.

        They could if they are a quorum of the newest view that one of them knows, since that decides on the
        next, and of every newer one that only dead have known: its members may have to be asked of it.
        """
        names = frozenset(name_of(i) for i in range(self.size + 1) if simulation.lives(name_of(i)))

        def can_decide() -> bool:
            lives = [cluster.nodes[name].me.key for name in names]
            newest = max((cluster.knows.get(life, 0) for life in lives), default=0)
            views = (view for epoch, view in cluster.known.items() if epoch >= newest)
            return newest > 0 and all(
                quorum(view, [life.id for life in lives if view.holds(life)]).holds for view in views
            )

        if can_decide():
            simulation.run(until=agreement(cluster, names), for_ns=LIVENESS_NS)
            told = "; ".join(map(str, kills))
            agreed = in_one_view(cluster, names)
            assert agreed or not can_decide(), (
                f"{self.seed}: {told}: {', '.join(sorted(names))} do not agree on a view of their own"
            )
            return agreed
        simulation.run(for_ns=UNDECIDED_NS)  # nobody may decide; nothing unsafe may happen
        return False


def _delivery(point: sim.KillPoint) -> tuple[str, int, int]:
    return point.process, point.incarnation, point.delivery
