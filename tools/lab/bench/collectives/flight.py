"""Measure an upper bound of what the flight recorder adds to an operation.

    python -m zbmd.tools.lab.bench.collectives.flight [--rounds N]

Natively a record is two readings of the clock and some forty bytes written. Here all of it is called from
Python, which costs more: so each figure is a bound. `fast path` is the whole of a 4-byte all-reduce that a
group of one rank makes: arguments, record, announcement, fingerprints, and the end of it, with nobody to
wait for. Without the recorder there is nothing to compare with, for it cannot be switched off.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

import zbmd
from zbmd.collectives.flight._flight import COMPLETE, FlightRing
from zbmd.collectives.flight.recorder import FLIGHT_RECORDS_MAX
from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.bench.stats import median
from zbmd.tools.cli.options import script_parser
from zbmd.transport.native._native import now_ns

CALLS: Final = 20_000
ROUNDS_DEFAULT: Final = 15
GOAL_NS: Final = 200.0


def recorded() -> Callable[[], None]:
    """One operation's record, as the data plane makes it, in a ring as long as a group's."""
    ring = FlightRing(FLIGHT_RECORDS_MAX)
    number = ring.number("all_reduce", "eager")
    begin, end = ring.begin, ring.end

    def record() -> None:
        begin(number, 1, 4, now_ns())
        end(COMPLETE, 0, now_ns())

    return record


def each_ns(call: Callable[[], object], rounds: int) -> float:
    """The median time of a call, ns."""
    return median([timeit.timeit(call, number=CALLS) / CALLS * 1e9 for _ in range(rounds)])


async def _fast_path_ns(rounds: int) -> float:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        x = worker.segment.arena.empty((1,), np.float32)
        x[:] = 0
        found = each_ns(lambda: group.blocking.all_reduce(x), rounds)
        await group.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = script_parser("lab.bench.collectives.flight", __doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS_DEFAULT)
    rounds = parser.parse_args(argv).rounds
    record_ns, fast_path_ns = each_ns(recorded(), rounds), zbmd.run(_fast_path_ns(rounds))
    print(f"# {now_utc()}  {this_machine()}")
    print(f"record  {record_ns:7.0f} ns at most   (goal {GOAL_NS:.0f} ns with the fingerprints)")
    print(f"fast path {fast_path_ns:7.0f} ns, the record and the fingerprints in it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
