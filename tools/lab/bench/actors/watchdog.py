"""Measure the watchdog: CPU time of a check, and asks per second with and without it, in turn.

    python -m zbmd.tools.lab.bench.actors.watchdog [--seconds S] [--actors N] [--json]

The first figure is the watchdog thread's own processor time by the kernel's clock for threads, as a share of
one core, at the default deadline, in a process with N actors of which one is always busy. The second compares
asks a second within one process with the watchdog on and off, in turn; off against off is the noise floor.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence

import uvloop

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Ref
from zbmd.actors.hangs.progress import PROGRESS_DEADLINE_NS_DEFAULT
from zbmd.actors.hangs.watchdog import Watchdog
from zbmd.actors.system import ActorSystem
from zbmd.tools.cli.options import add_json, script_parser

ROUNDS = 12
TIMEOUT_S = 30.0
SLICE_S = 0.5
THREAD_NAME = "zbmd-watchdog"


class Ping(Contract, id="bench.watchdog.ping"):
    """The smallest question."""


class Echo(Actor):
    """Answers."""

    @on(Ping)
    async def ping(self, message: Ping) -> Ping:
        """Answer."""
        return message


def watchdog_ns() -> int:
    """Processor time that the watchdog's thread has used."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == THREAD_NAME]
    return sum(
        time.clock_gettime_ns(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None
    )


async def asks_per_s(ref: Ref, seconds: float) -> float:
    """Asks a second, one after the other."""
    count, begin_s = 0, time.perf_counter()
    while time.perf_counter() - begin_s < seconds:
        await ref.ask(Ping(), reply=Ping, timeout=TIMEOUT_S)
        count += 1
    return count / (time.perf_counter() - begin_s)


async def measure(seconds: float, actors: int) -> dict[str, float]:
    """All figures, in percent."""
    system = ActorSystem("bench")
    refs = [await system.spawn(Echo) for _ in range(actors)]
    watchdog = Watchdog("bench", system, deadline_ns=PROGRESS_DEADLINE_NS_DEFAULT, address=None)
    watchdog.start(0, 1)
    begin_ns, used_ns = time.monotonic_ns(), watchdog_ns()
    await asks_per_s(refs[0], seconds)
    share = 100 * (watchdog_ns() - used_ns) / (time.monotonic_ns() - begin_ns)
    watchdog.close()
    with_it: list[float] = []
    noise: list[float] = []
    for _ in range(ROUNDS):
        before = await asks_per_s(refs[0], SLICE_S)
        watchdog = Watchdog("bench", system, deadline_ns=PROGRESS_DEADLINE_NS_DEFAULT, address=None)
        watchdog.start(0, 1)
        during = await asks_per_s(refs[0], SLICE_S)
        watchdog.close()
        after = await asks_per_s(refs[0], SLICE_S)
        with_it.append(100 * (1 - during / ((before + after) / 2)))
        noise.append(100 * (1 - after / before))
    await system.stop()
    return {
        "actors": float(actors),
        "watchdog_core_percent": share,
        "asks_lost_percent": statistics.median(with_it),
        "noise_percent": statistics.median(noise),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.bench.actors.watchdog", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the first measurement")
    parser.add_argument("--actors", type=int, default=1000)
    add_json(parser)
    arguments = parser.parse_args(argv)
    figures = uvloop.run(measure(arguments.seconds, arguments.actors))
    if arguments.json:
        print(json.dumps(figures))
        return 0
    print(f"watchdog thread, {arguments.actors} actors: {figures['watchdog_core_percent']:.4f} % of a core")
    print(f"asks a second lost to it: {figures['asks_lost_percent']:+.2f} % (median of {ROUNDS} pairs)")
    print(f"the same, off against off: {figures['noise_percent']:+.2f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
