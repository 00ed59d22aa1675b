"""Try the membership of a cluster: every kill of small ones, and random schedules of larger ones.

    python -m zbmd.tools.lab.proofs.membership_states kills [--sizes 2,3,4,5] [--variants N] [--pairs]
    python -m zbmd.tools.lab.proofs.membership_states schedules [--runs N] [--seconds S] [--first SEED]

`kills`: one line a story, size and variant. With `--pairs`, two nodes are killed one after the other, at
every pair of points; that takes a minute or two for 2 nodes, and an hour for 3. `schedules`: runs of the
scenario `membership` under the seeds FIRST, FIRST + 1, …, of 2 to 32 nodes, small ones more often, each with
up to 8 faults. Either ends with 1 at the first failure, and tells how to see it again.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zbmd.actors.cluster.state.job_table import JobSpec, Submit
from zbmd.actors.cluster.state.view import quorum
from zbmd.actors.simulated.membership_scenario import (
    LIVENESS_NS,
    SECOND_NS,
    Cluster,
    MembershipScenario,
    Packet,
    agreement,
    build,
    in_one_view,
    name_of,
)
from zbmd.tools.cli.options import script_parser
from zbmd.transport import sim
from zbmd.transport.sim import Options, RunOutcome, SimulationFailure, run_scenario

# --- every single kill of a small cluster, while something else happens to it ---------------------------
#
# A **story** is what happens to a cluster that has formed: a node joins, dies, leaves, or orders a command.
# It runs once undisturbed; then, in a run for each, once for every point of it, between any two effects
# of any node, at which that node is killed. Safety is checked throughout (`scenario`). Where those who are
# left can decide, they must end up in one view of their own.


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
    """One story of one seed, to run with different kills; up to the first of these it stays the same."""

    def __init__(self, story: str, size: int, variant: int) -> None:
        self.story, self.size = story, size
        self.seed = f"{story}/{size}/{variant}" if variant else f"{story}/{size}"
        begun, _ = formed(self.seed, size)
        self._before = len(begun.kill_points())

    def kill_points(self, *, after: sim.KillPoint | None = None) -> list[sim.KillPoint]:
        """The points of a kill from the story's beginning on; with `after`: once that has struck."""
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


SIZES_DEFAULT = "2,3,4,5"
RUNS_DEFAULT = 100_000
NODES_MAX = 32
FAULTS_MAX = 8
SECONDS_MAX = 3
TOLD_EVERY = 1_000
COLLECTED_EVERY = 50
"""Runs between two looks for what has no reference from outside and yet is not free."""


def options_of(seed: int) -> Options:
    """The size of the run with this seed: as many of 2 to 4 nodes as of 8 to 16."""
    rng = random.Random(f"{seed}/size")
    ranks = min(NODES_MAX, int(2 ** rng.uniform(1, 5.05)))
    return Options(ranks=ranks, length=rng.randint(1, SECONDS_MAX), faults=rng.randint(0, FAULTS_MAX))


def explore_kills(sizes: Sequence[int], variants: int, *, pairs: bool) -> int:
    """All kills, or pairs of them, of all stories of these sizes; the exit code."""
    print(f"{'story':<16} {'nodes':>5} {'variant':>7} {'kills':>7} {'decided':>8} {'events':>11} {'s':>7}")
    kills = 0
    for size, variant, story in itertools.product(sizes, range(variants), STORIES):
        began_s = time.perf_counter()
        try:
            found = (explore_pairs if pairs else explore)(story, size, variant=variant)
        except (SimulationFailure, AssertionError) as failure:
            print(f"{story}, {size} nodes, variant {variant}: {failure}")
            return 1
        took_s = time.perf_counter() - began_s
        row = f"{story:<16} {size:>5} {variant:>7} {found.points:>7} {found.decided:>8} {found.events:>11}"
        print(f"{row} {took_s:>7.1f}", flush=True)
        kills += found.points
    print(f"{kills:,} {'pairs of kills' if pairs else 'kills'}, nothing broke")
    return 0


def run_schedules(runs: int, seconds: float, first: int) -> int:
    """Random schedules until either bound is reached; the exit code."""
    # Nearly all of a run ends with its last reference; what is left is looked for once in many runs.
    gc.freeze()
    gc.disable()
    try:
        return _run_schedules(runs, seconds, first)
    finally:
        gc.enable()


def _run_schedules(runs: int, seconds: float, first: int) -> int:
    scenario, sizes = MembershipScenario(), Counter[int]()
    began_s, events = time.perf_counter(), 0
    done = 0
    while done < runs and time.perf_counter() - began_s < seconds:
        seed = first + done
        options = options_of(seed)
        plan = scenario.draw_plan(seed, options)
        report = run_scenario(scenario, seed, options, plan, tell=None, digested=False)
        if report.outcome is not RunOutcome.OK:
            print(report)
            return 1
        done += 1
        events += report.events
        sizes[options.ranks.bit_length()] += 1
        if done % COLLECTED_EVERY == 0:
            gc.collect()
        if done % TOLD_EVERY == 0:
            print(f"{done:,} schedules, {events:,} events, {time.perf_counter() - began_s:.0f} s", flush=True)
    spread = ", ".join(
        f"{1 << bits - 1} to {min(NODES_MAX, (1 << bits) - 1)} nodes: {count:,}"
        for bits, count in sorted(sizes.items())
    )
    print(f"{done:,} schedules from seed {first}, {events:,} events, nothing broke ({spread})")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = script_parser("lab.proofs.membership_states", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    kills = commands.add_parser("kills", help="every kill of small clusters")
    kills.add_argument("--sizes", default=SIZES_DEFAULT, help="numbers of nodes (default: %(default)s)")
    kills.add_argument("--variants", type=int, default=1, help="seeds of each story (default: %(default)s)")
    kills.add_argument("--pairs", action="store_true", help="two kills a run")
    schedules = commands.add_parser("schedules", help="random schedules")
    schedules.add_argument("--runs", type=int, default=RUNS_DEFAULT)
    schedules.add_argument("--seconds", type=float, default=float("inf"))
    schedules.add_argument("--first", type=int, default=1)
    given = parser.parse_args(argv)
    if given.command == "kills":
        sizes = [int(size) for size in given.sizes.split(",")]
        return explore_kills(sizes, given.variants, pairs=given.pairs)
    return run_schedules(given.runs, given.seconds, given.first)


if __name__ == "__main__":
    sys.exit(main())
