"""Try the membership of a cluster: every kill of small ones, and random schedules of larger ones.

    python -m zbmd.tools.lab.proofs.membership_states kills [--sizes 2,3,4,5] [--variants N] [--pairs]
    python -m zbmd.tools.lab.proofs.membership_states schedules [--runs N] [--seconds S] [--first SEED]

`kills`: see `zbmd.actors.simulated.membership_exploration`; one line a story, size and variant. With
`--pairs`, two nodes are killed one after the other, at every pair of points; that takes a minute or two for 2
nodes, and an hour for 3. `schedules`: runs of the
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
from collections.abc import Sequence

from zbmd.actors.simulated.membership_exploration import STORIES, explore, explore_pairs
from zbmd.actors.simulated.membership_scenario import MembershipScenario
from zbmd.tools.cli.options import script_parser
from zbmd.transport.sim import Options, RunOutcome, SimulationFailure, run_scenario

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
