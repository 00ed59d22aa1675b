"""Measure every goal of the transport in one run, and print the table of goals.

    python -m zbmd.tools.lab.bench.transport [--out DIR] [--rounds N] [--trials N]

Runs `zbmd bench p2p`, `put --transport tcp` and `detect` with the peers that the goals name, and
`idle`; keeps their JSON in DIR, and prints the table as Markdown. Leave the machine alone meanwhile: it
has to be quiet.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from zbmd.tools.bench.result import BenchResult, Measurement
from zbmd.tools.bench.stats import OURS, size_in_words
from zbmd.tools.cli.options import script_parser
from zbmd.tools.lab.bench.transport.idle import Idle
from zbmd.transport.host.files import write_atomically

OUT_DEFAULT: Final = Path("zbmd-runs/bench-transport")
ROUNDS_DEFAULT: Final = 15
TRIALS_DEFAULT: Final = 50
TABLE_NAME: Final = "table.md"
LARGE: Final = (1 << 20, 16 << 20, 64 << 20)
VICTIMS: Final = (0, 256 << 20, 1 << 30)
TCP_BYTES: Final = 16 << 20
LINK_BYTES_MAX: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class GoalRow:
    """One line of the table; `met` is None for a figure without a goal."""

    what: str
    goal: str
    measured: str
    met: bool | None

    def __str__(self) -> str:
        verdict = "–" if self.met is None else "met" if self.met else "**missed**"
        return f"| {self.what} | {self.goal} | {self.measured} | {verdict} |"


class Rows:
    """The rows of a result, by what they are of."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        self._rows = {(row.case, row.who, row.size_bytes): row for row in rows}

    def of(self, case: str, who: str, nbytes: int) -> Measurement:
        """Raises KeyError if it was not measured."""
        return self._rows[case, who, nbytes]

    def ratio(self, case: str, who: str, nbytes: int) -> float:
        """Our time over that of `who`."""
        found = self.of(case, who, nbytes).time_ratio
        assert found is not None
        return found.value


def p2p_lines(rows: Rows) -> Iterator[GoalRow]:
    """Small messages, large ones from both kinds of memory, and frames."""
    small = rows.of("p2p-arena", OURS, 8)
    peers = ", ".join(
        f"{name} {rows.of('p2p-arena', who, 8).time_us_p50:.2f}"
        for name, who in (("Open MPI from Python", "openmpi"), ("from C", "openmpi-c"))
    )
    met = rows.ratio("p2p-arena", "openmpi", 8) <= 1
    measured = f"{small.time_us_p50:.2f} µs ({peers})"
    yield GoalRow("shm p2p, 8 B one way, native wait, from Python", "≤ Open MPI", measured, met)
    for nbytes in LARGE:
        of = f"shm p2p, {size_in_words(nbytes)}iB"
        parts = 1 / rows.ratio("p2p-arena", "memcpy-shared", nbytes)
        of_numpy = 1 / rows.ratio("p2p-arena", "memcpy", nbytes)
        ours = _bandwidth(rows.of("p2p-arena", OURS, nbytes))
        measured = f"{parts:.2f} × memcpy in such memory ({of_numpy:.2f} × in numpy's), {ours}"
        yield GoalRow(f"{of}, arena to inbox", "≥ 0.9 × memcpy", measured, parts >= 0.9)
        times = 1 / rows.ratio("p2p-foreign", "openmpi", nbytes)
        measured = f"{times:.2f} × Open MPI, {_bandwidth(rows.of('p2p-foreign', OURS, nbytes))}"
        yield GoalRow(f"{of}, foreign buffers", "≥ Open MPI", measured, times >= 1)
    quiet, training = rows.of("frame", OURS, 8), rows.of("frame-training", OURS, 8)
    met = quiet.time_us_p50 <= 12 and quiet.time_us_p99 <= 30
    measured = f"{quiet.time_us_p50:.1f} µs, p99 {quiet.time_us_p99:.1f}"
    yield GoalRow("shm frame round trip through asyncio", "≤ 12 µs median, ≤ 30 µs p99", measured, met)
    measured = f"{training.time_us_p50:.1f} µs, p99 {training.time_us_p99:.0f}"
    yield GoalRow("the same, both ranks inside a training step", "reported", measured, None)


def tcp_lines(rows: Rows) -> Iterator[GoalRow]:
    """16 MiB puts over loopback with the MAC, beside iperf3; what the other protections make of them."""
    stream = rows.of("put-arena", "iperf3", TCP_BYTES)
    for who, protection in ((OURS, "MAC"), ("zbmd-none", "no protection"), ("zbmd-tls", "TLS")):
        ours = rows.of("put-arena", who, TCP_BYTES)
        part = stream.time_us_p50 / ours.time_us_p50
        goal, met = ("reported", None) if who == "zbmd-tls" else ("≥ 0.9 × iperf3 -l 1M", part >= 0.9)
        measured = f"{part:.2f} × iperf3, {_bandwidth(ours)} (iperf3 {_bandwidth(stream)})"
        yield GoalRow(f"tcp loopback, 16 MiB puts, {protection}", goal, measured, met)


def detect_lines(rows: Rows) -> Iterator[GoalRow]:
    """Notices inside a training step, the floor beside them."""
    for nbytes in VICTIMS:
        ours = rows.of("detect-training", OURS, nbytes)
        floors = ", ".join(
            f"{name} {rows.of('detect-training', who, nbytes).time_us_p50 / 1e3:.2f}"
            for name, who in (("futex", "floor-futex"), ("pidfd", "floor-pidfd"), ("EOF", "floor-eof"))
        )
        what = f"death notice inside a training step, victim of {size_in_words(nbytes)}"
        measured = f"{ours.time_us_p50 / 1e3:.2f} ms, p99 {ours.time_us_p99 / 1e3:.2f} ({floors})"
        yield GoalRow(what, "< 1 ms median, or the floor", measured, ours.time_us_p50 < 1000)


def idle_line(idle: Idle) -> GoalRow:
    """Return the row of an idle link's memory."""
    measured = f"{idle.total_bytes / 1024:.0f} KiB, both ends; {idle.frames} frames went through"
    met = idle.total_bytes <= LINK_BYTES_MAX and idle.frames == 2 * idle.links
    what = f"an idle shm link, of {idle.links} in one process"
    return GoalRow(what, "≤ 256 KiB, and all work", measured, met)


def _bandwidth(row: Measurement) -> str:
    assert row.algbw_gbytes_per_s is not None
    return f"{row.algbw_gbytes_per_s:.1f} GB/s"


def main(argv: list[str] | None = None) -> int:
    """Run everything, keep it, and print the table; the exit code is that of the first part that fails."""
    parser = script_parser("lab.bench.transport", __doc__)
    parser.add_argument("--out", type=Path, default=OUT_DEFAULT, metavar="DIR", help="(%(default)s)")
    parser.add_argument("--rounds", default=str(ROUNDS_DEFAULT), metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--trials", default=str(TRIALS_DEFAULT), metavar="N", help="kills a size (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = ",".join(str(size) for size in (8, 4096, *LARGE))
    transfers = ["--sizes", sizes, "--rounds", arguments.rounds, "--vs", "openmpi", "--vs", "openmpi-c"]
    over_tcp = ["--sizes", str(TCP_BYTES), "--rounds", arguments.rounds]
    over_tcp += ["--vs", "iperf3", "--vs", "zbmd-none", "--vs", "zbmd-tls"]
    parts = {
        "p2p": ["entry.zbmd", "bench", "p2p", *transfers, "--vs", "memcpy", "--vs", "memcpy-shared"],
        "tcp": ["entry.zbmd", "bench", "put", "--transport", "tcp", "--cases", "put-arena", *over_tcp],
        "detect": ["entry.zbmd", "bench", "detect", "--trials", arguments.trials],
        "idle": ["lab.bench.transport.idle"],
    }
    texts: dict[str, bytes] = {}
    for name, (module, *rest) in parts.items():
        command = [sys.executable, "-m", f"zbmd.tools.{module}", *rest, "--json"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            return done.returncode
        texts[name] = done.stdout
        _keep(arguments.out / f"{name}.json", done.stdout)
    table = table_of(texts)
    _keep(arguments.out / TABLE_NAME, table.encode())
    print(table)
    return 0


def table_of(texts: dict[str, bytes]) -> str:
    """The table, from the JSON of each part."""
    results = {name: msgspec.json.decode(texts[name], type=BenchResult) for name in ("p2p", "tcp", "detect")}
    p2p, detected = results["p2p"], results["detect"]
    idle = msgspec.json.decode(texts["idle"], type=Idle)
    lines = [
        *p2p_lines(Rows(p2p.rows)),
        *tcp_lines(Rows(results["tcp"].rows)),
        *detect_lines(Rows(detected.rows)),
        idle_line(idle),
    ]
    return "\n".join(
        [
            f"{p2p.date}, {p2p.machine}; {p2p.rounds} rounds, {detected.rounds} kills a size.",
            "",
            "| what | goal | measured | |",
            "|---|---|---|---|",
            *map(str, lines),
        ]
    )


def _keep(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


if __name__ == "__main__":
    raise SystemExit(main())
