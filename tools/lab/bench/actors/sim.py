"""Time the simulator: machine events a second, and callbacks of asyncio programs a second, on one core.

    python -m zbmd.tools.lab.bench.actors.sim [--events N] [--ranks N] [--runs N] [--json]

`machines`: a ring of trivial machines, each passing a number on: one event is one message that arrives, is
handled, and is answered by one that is sent. Invariants are checked, the history is kept, and its digest is
part of the time. `programs`: the same ring of asyncio programs over datagrams; one event is one callback.
CPU time, so that a busy machine disturbs it little; the median of the runs counts, `spread_percent` is how
far the runs differ (A against A).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from zbmd.tools.cli.options import add_json, script_parser
from zbmd.tools.lab.bench.actors.sim_ring import RingMachine
from zbmd.transport.sim import (
    Arrived,
    MachineProcess,
    Process,
    Send,
    SimProcess,
    Simulation,
    Started,
    Stimulus,
    World,
)

RUNS_DEFAULT = 7


def _to_events(stimulus: Stimulus[int]) -> tuple[int, ...]:
    match stimulus:
        case Arrived(message=number):
            return (number,)
        case Started():
            return (0,)
        case _:
            return ()


def _to_effects(send: Send[int]) -> tuple[Send[int], ...]:
    return (send,)


def run_machines(ranks: int, events: int) -> str:
    """Run a ring of machines for so many events; returns the history's digest."""
    names = [f"rank{rank}" for rank in range(ranks)]
    simulation = Simulation[int](1)

    def factory(after: str) -> Callable[[int], Process[int]]:
        return lambda incarnation: MachineProcess(
            RingMachine(after), to_events=_to_events, to_effects=_to_effects
        )

    for rank, name in enumerate(names):
        simulation.add(name, factory(names[(rank + 1) % ranks]))
    simulation.run(until=lambda: simulation.events >= events, max_events=events + 1)
    return simulation.digest()


def run_programs(ranks: int, events: int) -> str:
    """Run a ring of programs for so many callbacks; returns the history's digest."""
    names = [f"rank{rank}" for rank in range(ranks)]

    async def program(process: SimProcess) -> None:
        after = names[(int(process.name.removeprefix("rank")) + 1) % ranks]
        process.send_datagram(after, bytes(8))
        while True:
            datagram = await process.receive_datagram()
            process.send_datagram(after, datagram.data)

    with World(1) as world:
        for name in names:
            world.add(name, program)
        world.run(until=lambda: world.events >= events, max_events=events + 1)
        return world.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """One line of the table."""

    what: str
    ranks: int
    events: int
    events_per_s: int
    """Median of the runs."""
    spread_percent: float
    """From the slowest to the fastest run, of the median."""


def measure(what: str, run: Callable[[int, int], str], ranks: int, events: int, runs: int) -> RateRow:
    """Time `run(ranks, events)`, once to warm up and `runs` times to count."""
    digests: set[str] = set()
    rates: list[float] = []
    run(ranks, events // 10)
    for _ in range(runs):
        start_ns = time.process_time_ns()
        digests.add(run(ranks, events))
        rates.append(events * 1e9 / (time.process_time_ns() - start_ns))
    if len(digests) != 1:
        raise SystemExit(f"{what}: one seed gave {len(digests)} histories")
    median = statistics.median(rates)
    return RateRow(
        what=what,
        ranks=ranks,
        events=events,
        events_per_s=round(median),
        spread_percent=round(100 * (max(rates) - min(rates)) / median, 1),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = script_parser("lab.bench.actors.sim", __doc__)
    parser.add_argument("--events", type=int, default=200_000, help="machine events a run (%(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="size of the ring (%(default)s)")
    parser.add_argument("--runs", type=int, default=RUNS_DEFAULT, help="runs that count (%(default)s)")
    add_json(parser)
    options = parser.parse_args(argv)
    if options.events < 1000 or options.ranks < 2 or options.runs < 1:
        parser.error("give at least 1000 events, 2 ranks and 1 run")
    rows = [
        measure("machines", run_machines, options.ranks, options.events, options.runs),
        measure("programs", run_programs, options.ranks, options.events // 5, options.runs),
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(f"{'what':10} {'ranks':>6} {'events':>9} {'events/s':>12} {'spread %':>9}")
    for row in rows:
        print(f"{row.what:10} {row.ranks:6} {row.events:9,} {row.events_per_s:12,} {row.spread_percent:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
