"""Measure what a joining host costs the members of a running job: the longest gap between steps, by cause.

    python -m zbmd.tools.lab.bench.actors.host_join [--hosts N] [--joins K] [--json] [-- ARGUMENT ...]

The nodes of all hosts run on this machine, with one rank each, linked by TCP as between hosts. The last
host's node is killed with its rank; the others go on. Then it is started again and joins the running job.
That is done `--joins` times. The times are those of the commit log: one monotonic clock for all. Arguments
behind `--` are those of `zbmd train`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from zbmd.tools.bench.stats import median
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.lab.hosts.job import MODEL, JobDemo, Layout
from zbmd.training.run.ledger import LOG_NAME, CommitRecord, read_log
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT
from zbmd.transport.errors import UserError

HOSTS_MAX: Final = 8
JOINS_MAX: Final = 100
STEPS_AROUND: Final = 15
"""Steps before and behind a join in which its gap is looked for, and which say what an ordinary one takes."""
STEPS_JOINING: Final = 2
"""Of these, the newcomer's first without and with a part of the work."""


@dataclass(frozen=True, slots=True)
class LoopbackHost:
    """A host that is none: its processes run on this machine, and reach the others by TCP."""

    name: str
    address: str
    home: Path

    def popen(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """See `zbmd.tools.lab.hosts.netns.LabHost`."""
        own = {
            "ZBMD_COOKIE_FILE": str(self.home / "cookie"),
            "XDG_RUNTIME_DIR": str(self.home),
            "ZBMD_LINKS": "tcp",
        }
        return subprocess.Popen(command, env={**os.environ, **own, **(environment or {})}, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One join.

    gap_ms: the longest between two steps from the join on; calm_gap_ms: of as many before, so that what a
    busy machine does is seen beside it; step_ms, step_after_ms: an ordinary step before and afterwards.
    """

    gap_ms: float
    calm_gap_ms: float
    step_ms: float
    step_after_ms: float

    @property
    def steps(self) -> float:
        """The longest gap, in ordinary steps."""
        return self.gap_ms / self.step_ms

    @property
    def calm_steps(self) -> float:
        """The longest gap before it, in ordinary steps."""
        return self.calm_gap_ms / self.step_ms


def join_at(records: Sequence[CommitRecord], place: int) -> Joined:
    """Return what the join cost whose first step is `records[place]`."""
    before = _gaps_ms(records[max(0, place - 1 - STEPS_AROUND) : place])
    behind = _gaps_ms(records[place - 1 : place + STEPS_AROUND])
    return Joined(
        gap_ms=max(behind),
        calm_gap_ms=max(before),
        step_ms=median(before),
        step_after_ms=median(behind[STEPS_JOINING:]),
    )


def _gaps_ms(records: Sequence[CommitRecord]) -> list[float]:
    return [(b.at_ns - a.at_ns) / 1e6 for a, b in pairwise(records)]


def joins_of(log: Path) -> list[Joined]:
    """All joins into the job that was running, from its commit log."""
    _, records = read_log(log)
    grown = [
        place
        for place in range(2, len(records))
        if len(records[place].members) > len(records[place - 1].members)
    ]
    return [join_at(records, place) for place in grown if place + STEPS_JOINING < len(records)]


def run(hosts: int, joins: int, arguments: Sequence[str]) -> list[Joined]:
    """Form a cluster, have its last host join `joins` times. Raises `ZbmdError`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-bench-")))
        places: list[LoopbackHost] = []
        for number in range(hosts):
            home = folder / f"host{number}"
            home.mkdir(mode=0o700)
            places.append(LoopbackHost(f"host{number}", _address(number), home))
        layout = Layout(ranks_per_node=1, nodes_min=hosts - 1, nodes_max=hosts)
        demo = JobDemo(places, layout, RECOVERY_BUDGET_NS_DEFAULT, arguments)
        stack.callback(demo.close)
        demo.start(folder / "run")
        for _ in range(joins):
            demo.kill_and_start()
        demo.close()
        return joins_of(folder / "run" / LOG_NAME)


def _address(number: int) -> str:
    """A loopback address at which the demo's port is free."""
    return f"127.77.{os.getpid() % 250 + 1}.{number + 1}"


def table(found: Sequence[Joined]) -> str:
    """As a person reads it."""
    columns: dict[str, tuple[int, Callable[[Joined], float]]] = {
        "step ms": (1, lambda one: one.step_ms),
        "afterwards": (1, lambda one: one.step_after_ms),
        "longest gap ms": (1, lambda one: one.gap_ms),
        "steps": (2, lambda one: one.steps),
        "steps, before it": (2, lambda one: one.calm_steps),
    }

    def row(name: str, values: Iterable[float]) -> str:
        cells = zip(columns.items(), values, strict=True)
        return f"{name:>6}" + "".join(f"{v:>{len(n) + 3}.{digits}f}" for (n, (digits, _)), v in cells)

    lines = [f"{'join':>6}" + "".join(f"   {name}" for name in columns)]
    lines += [row(str(i), [of(one) for _, of in columns.values()]) for i, one in enumerate(found, 1)]
    lines.append(row("median", [median([of(one) for one in found]) for _, of in columns.values()]))
    return "\n".join(lines)


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.bench.actors.host_join", __doc__)
    parser.add_argument("--hosts", type=int, default=3, help="default: 3")
    parser.add_argument("--joins", type=int, default=5, help="default: 5")
    add_json(parser)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of the training job")
    given = parser.parse_args(argv)
    if not 2 <= given.hosts <= HOSTS_MAX or not 1 <= given.joins <= JOINS_MAX:
        raise UserError(f"--hosts is 2..{HOSTS_MAX}, --joins 1..{JOINS_MAX}.")
    found = run(given.hosts, given.joins, given.arguments or MODEL)
    if given.json:
        for one in found:
            print(
                json.dumps(
                    {
                        "gap_ms": one.gap_ms,
                        "step_ms": one.step_ms,
                        "steps": one.steps,
                        "step_after_ms": one.step_after_ms,
                        "calm_steps": one.calm_steps,
                    }
                )
            )
    else:
        print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, host {socket.gethostname()}")
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
