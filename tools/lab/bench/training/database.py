"""Measure the database of a long run: how fast it takes lines in, how large it gets, how long pages wait.

    python -m zbmd.tools.lab.bench.training.database                  a million steps of three ranks
    python -m zbmd.tools.lab.bench.training.database --steps 100000

The lines are drawn, and are like those of ranks. They are read as a page or a query reads them: what is new
since the last time, in parts of `PART_STEPS` steps of each rank. Old rows are added up meanwhile, as in any
run. Then every query of the dashboard is made twice.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.dashboard import queries
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.schema import DATABASE_NAME
from zbmd.training.profiler.lines import VERSION, RunLine, StepLine, lines_path
from zbmd.training.profiler.peak import MachineDescription
from zbmd.transport.errors import UserError

GOAL_ROWS_PER_S: Final = 10_000
PART_STEPS: Final = 20_000
STEP_NS: Final = 100_000_000
PHASES: Final = {"forward": 0.3, "backward": 0.5, "optimizer": 0.1, "comm": 0.08, "data_load": 0.02}
"""Parts of a step."""
QUERIES: Final[tuple[Callable[[sqlite3.Connection], Any], ...]] = (
    queries.summary,
    queries.waterfall,
    queries.utilisation,
    queries.by_rank,
    queries.slowest_ops,
    queries.memory,
    queries.curves,
    queries.events,
    queries.cluster,
)


class DatabaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """rows_per_s: lines read, parsed and written a second of processor time; slowest_s: of all queries."""

    rows: int
    rows_per_s: float
    mebibytes: float
    query_s: dict[str, float]

    @property
    def slowest_s(self) -> float:
        """Return the time of the slowest query."""
        return max(self.query_s.values())


def life_of(rank: int, ranks: int) -> bytes:
    """Return the first line of a rank."""
    machine = MachineDescription(processor="drawn", processors=ranks, blas="none")
    line = RunLine(
        version=VERSION,
        rank=rank,
        incarnation=1,
        world_size=ranks,
        host="host",
        boot_id="boot",
        pid=1 + rank,
        monotonic_ns=1,
        unix_ns=1_700_000_000_000_000_000,
        ranks_on_host=ranks,
        machine=machine,
        peak=1e12,
        units=(),
    )
    return msgspec.json.encode(line) + b"\n"


def steps_of(first: int, last: int, draw: np.random.Generator) -> bytes:
    """Return the lines of the steps from `first` to below `last` of one rank."""
    lengths = (STEP_NS * (1 + 0.05 * draw.random((last - first, len(PHASES))))).astype(np.int64)
    lengths = (lengths * np.array([*PHASES.values()])).astype(np.int64)
    parts, encoder = list[bytes](), msgspec.json.Encoder()
    for step, row in zip(range(first, last), lengths.tolist(), strict=True):
        line = StepLine(
            step=step,
            begin_ns=step * 2 * STEP_NS,
            end_ns=step * 2 * STEP_NS + sum(row),
            ns=dict(zip(PHASES, row, strict=True)),
            unit_ns={},
            passes={},
            flops=10**10,
            hardware_flops=10**10,
            overlap=None,
        )
        parts.append(encoder.encode(line))
    return b"\n".join(parts) + b"\n"


def measured(directory: Path, steps: int, ranks: int) -> DatabaseFigures:
    """Take a run of so many steps in, and ask the dashboard's questions."""
    draw, took_s = np.random.default_rng(0), 0.0
    paths = [lines_path(directory, rank, 1) for rank in range(ranks)]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for rank, path in enumerate(paths):
        path.write_bytes(life_of(rank, ranks))
    with RunDatabase(directory) as database:
        for first in range(1, steps + 1, PART_STEPS):
            for path in paths:
                with path.open("ab") as file:
                    file.write(steps_of(first, min(steps + 1, first + PART_STEPS), draw))
            began_s = time.process_time()
            database.update()
            took_s += time.process_time() - began_s
        kept = database.connection.execute("SELECT sum(steps) FROM step_sums").fetchone()[0]
        if kept != steps * ranks:
            raise UserError(f"the database has {kept} steps of ranks of {steps * ranks}")
        query_s = {query.__name__: _least_s(query, database.connection) for query in QUERIES}
    size = sum(each.stat().st_size for each in directory.glob(f"{DATABASE_NAME}*"))
    return DatabaseFigures(
        rows=steps * ranks,
        rows_per_s=round(steps * ranks / took_s),
        mebibytes=round(size / (1 << 20), 1),
        query_s={name: round(each, 3) for name, each in query_s.items()},
    )


def _least_s(query: Callable[[sqlite3.Connection], Any], connection: sqlite3.Connection) -> float:
    best_s = float("inf")
    for _ in range(2):
        began_s = time.perf_counter()
        query(connection)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if the goal is missed."""
    parser = script_parser("lab.bench.training.database", __doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the run; default: 1,000,000")
    parser.add_argument("--ranks", type=int, default=3, help="whose lines are read; default: 3")
    add_json(parser)
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.ranks < 1:
        raise UserError("--steps and --ranks: expected 1 or more")
    with tempfile.TemporaryDirectory(prefix="zbmd-database-") as directory:
        found = measured(Path(directory), arguments.steps, arguments.ranks)
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(f"{found.rows:,} rows of {arguments.steps:,} steps, {found.mebibytes} MiB")
        print(f"{found.rows_per_s:,.0f} rows a second of one core (goal: {GOAL_ROWS_PER_S:,})")
        for name, seconds in sorted(found.query_s.items(), key=lambda each: -each[1]):
            print(f"{seconds:8.3f} s  {name}")
    return 0 if found.rows_per_s >= GOAL_ROWS_PER_S else 1


if __name__ == "__main__":
    sys.exit(main())
