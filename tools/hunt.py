"""Hunt for protocol bugs: run the simulated scenarios under fresh seeds until time is up or one fails.

python -m zbmd.tools.hunt --seconds 120            all scenarios, fresh seeds
python -m zbmd.tools.hunt --scenario commit --seed 1234 --runs 1     see a failure again
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

from zbmd.collectives import commit_scenario
from zbmd.transport.errors import ZbmdError

RUNS_MAX = 10_000_000


def _commit(seed: int) -> None:
    rng = random.Random(f"{seed}/options")
    options = commit_scenario.CommitOptions(
        world_size=rng.randint(1, 6),
        steps=rng.choice((1, 1, 2, 3, 20)),  # most rules meet where a run ends
        kills=rng.choice((0, 1, 1, 2, 3, 6)),
        shrink=rng.random() < 0.4,
    )
    commit_scenario.run(seed, options)


SCENARIOS: dict[str, Callable[[int], None]] = {"commit": _commit}
"""Each takes a seed and raises if safety or liveness is broken."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hunt. Exit code 0: nothing found, 1: a scenario failed."""
    parser = argparse.ArgumentParser(prog="python -m zbmd.tools.hunt", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to hunt (default 120)")
    parser.add_argument("--runs", type=int, default=RUNS_MAX, help="stop after this many runs")
    parser.add_argument("--seed", type=int, help="first seed (default: fresh)")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append", help="default: all")
    options = parser.parse_args(argv)
    first = random.SystemRandom().randrange(2**48) if options.seed is None else options.seed
    names = options.scenario or sorted(SCENARIOS)
    print(f"hunting {', '.join(names)} from seed {first}", flush=True)
    end = time.monotonic() + options.seconds
    runs = 0
    while runs < options.runs and time.monotonic() < end:
        name, seed = names[runs % len(names)], first + runs // len(names)
        try:
            SCENARIOS[name](seed)
        except (AssertionError, ZbmdError) as error:
            print(f"{name} failed after {runs} runs: {error}", flush=True)
            print(f"again: python -m zbmd.tools.hunt --scenario {name} --seed {seed} --runs 1", flush=True)
            return 1
        runs += 1
    print(f"{runs} runs, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
