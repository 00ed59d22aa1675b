"""`zbmd sim collectives`: operations on up to 10,000 simulated ranks, beside what each algorithm can reach.

The ranks walk the programs that real groups run, by the same compiled stepper, on a model of a network: see
`zbmd.collectives.scale`. With --deaths, ranks die in the middle of each operation, and the table tells how
long after that the survivors have the result. What does not fit has a line that says why.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import rich.box
import rich.console
import rich.table
import rich.text

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.scale.bounds import Fabric
from zbmd.collectives.scale.roles import AT_SCALE
from zbmd.collectives.scale.scaling import (
    Recovery,
    RepairMeasurement,
    ScaleMeasurement,
    refusal,
    repeat_after_deaths,
    simulate,
)
from zbmd.tools.bench.result import HEIGHT_IN, PNG_DPI, WIDTH_IN, check_plot
from zbmd.tools.bench.stats import parse_sizes, size_in_words
from zbmd.tools.cli.options import add_json, add_plot, add_ranks
from zbmd.transport.clock.deadlines import parse_duration
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically
from zbmd.transport.host.topology.cpus import usable_cpus

# Draw how operations scale: bus bandwidth over ranks, a line an algorithm, a picture an operation and size.
#
# Of a barrier, which moves nothing: barriers a millisecond.


def draw(found: Sequence[ScaleMeasurement], out: Path) -> None:
    """Write the picture; dashed: the bound. Raises `UserError` as `check_plot` does, or if that fails."""
    check_plot(out)
    from matplotlib.figure import Figure

    pictures = list(dict.fromkeys((one.operation, one.nbytes) for one in found))
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * len(pictures)), layout="constrained")
    for number, (operation, nbytes) in enumerate(pictures, 1):
        axes = figure.add_subplot(len(pictures), 1, number)
        shown = [one for one in found if (one.operation, one.nbytes) == (operation, nbytes)]
        for algorithm in dict.fromkeys(one.algorithm for one in shown):
            line = [one for one in shown if one.algorithm == algorithm]
            ranks = [one.n for one in line]
            (drawn,) = axes.plot(ranks, [_height(one) for one in line], marker="o", label=algorithm)
            reachable = [_height(one) * one.time_ns / one.bound_ns for one in line]
            axes.plot(ranks, reachable, linestyle="--", linewidth=0.8, color=drawn.get_color())
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(
            sorted({one.n for one in shown}), [f"{n:,}" for n in sorted({one.n for one in shown})]
        )
        axes.minorticks_off()
        axes.set_ylabel("bus bandwidth, GB/s" if nbytes else "a millisecond")
        what = f"{operation.name.lower()} of {size_in_words(nbytes)} a rank"
        axes.set_title(f"{what}; dashed: the bound", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:], dpi=PNG_DPI)
    write_atomically(out, lambda file: file.write(picture.getvalue()))


def _height(one: ScaleMeasurement) -> float:
    return one.bus_bytes_per_ns if one.nbytes else 1e6 / one.time_ns


RANKS_MAX = 20_000
RANKS_DEFAULT = 10_000
RANKS_FACTOR = 8
SIZES_DEFAULT = "1M,64M,1G"
TITLES = (
    "ranks",
    "bytes",
    "time\nms",
    "bound\nms",
    "x bound",
    "busbw\nGB/s",
    "x any",
    "instructions",
    "by",
)
WIDTH = 200
"""Characters a line where there is no terminal: no table is wider."""

EXAMPLES = """examples:
  zbmd sim collectives                             8 to 10,000 ranks, three sizes: some minutes
  zbmd sim collectives --ranks 1000 --sizes 64M --algorithms ring,hierarchical
  zbmd sim collectives --operation all --sizes 1M  every operation
  zbmd sim collectives --operation all_to_all --ranks 512 --algorithms bruck
  zbmd sim collectives --deaths 3 --seed 7         with three ranks dying in the middle of each operation
  zbmd sim collectives --ports 8 --plot scaling.svg  a port for each rank of a host; draw it
"""


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """Operation and group of a simulation."""

    operation: Operation
    algorithm: str
    n: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SimulatedCase:
    """One line of the table. `cpu_s`: what it took to simulate.

    `why`: why it was not, and `whole` is None.
    """

    asked: CollectiveCase
    whole: ScaleMeasurement | None
    repaired: RepairMeasurement | None = None
    cpu_s: float = 0.0
    why: str = ""


def ranks_up_to(most: int) -> list[int]:
    """8, 64, 512, … and `most`."""
    ranks = [RANKS_FACTOR]
    while ranks[-1] * RANKS_FACTOR < most:
        ranks.append(ranks[-1] * RANKS_FACTOR)
    return [count for count in ranks if count < most] + [most]


def _simulate(asked: CollectiveCase, fabric: Fabric, arguments: argparse.Namespace) -> SimulatedCase:
    operation, algorithm, n, nbytes = asked.operation, asked.algorithm, asked.n, asked.nbytes
    if why := refusal(operation, algorithm, n, nbytes, fabric):
        return SimulatedCase(asked, None, why=why)
    began_s = time.thread_time()
    whole = simulate(
        operation, algorithm, n, nbytes, fabric, skew_ns=arguments.skew * 1e9, seed=arguments.seed
    )
    repaired = None
    if 0 < arguments.deaths < n:
        recovery = Recovery(notice_ns=arguments.notice * 1e9)
        repaired = repeat_after_deaths(
            whole, fabric, deaths=arguments.deaths, recovery=recovery, seed=arguments.seed
        )
    return SimulatedCase(asked, whole, repaired, time.thread_time() - began_s)


def _run(arguments: argparse.Namespace) -> int:
    sizes, wanted = parse_sizes(arguments.sizes), _wanted(arguments.operation, arguments.algorithms)
    if not 2 <= arguments.ranks <= RANKS_MAX:
        raise UserError(f"--ranks: expected 2 to {RANKS_MAX:,}, got {arguments.ranks}")
    if not 0 <= arguments.deaths < arguments.ranks:
        raise UserError(f"--deaths {arguments.deaths}: fewer than the ranks, so that somebody is left")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    fabric = Fabric(ranks_per_host=arguments.ranks_per_host, ports=arguments.ports)
    print(f"{arguments.operation}, seed {arguments.seed}: {fabric}", file=sys.stderr)
    asked = [
        CollectiveCase(operation, algorithm, n, size)
        for operation, algorithms in wanted.items()
        for size in (sizes if operation is not Operation.BARRIER else [0])
        for n in ranks_up_to(arguments.ranks)
        for algorithm in algorithms
    ]
    cases: list[SimulatedCase] = []
    with ThreadPoolExecutor(max_workers=usable_cpus()) as threads:  # the stepper runs without the GIL
        futures: list[Future[SimulatedCase]] = []
        try:
            futures += [threads.submit(_simulate, one, fabric, arguments) for one in asked]
            for number, future in enumerate(futures, 1):
                cases.append(future.result())
                _tell(number, len(futures), cases[-1])
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if arguments.json:
        print(msgspec.json.encode([_as_json(case) for case in cases]).decode())
    else:
        _console().print(_table(cases))
    if arguments.plot is not None:
        draw([case.whole for case in cases if case.whole is not None], arguments.plot)
    return 0


def _wanted(operation: str, algorithms: str) -> dict[Operation, list[str]]:
    """The algorithms of each operation, of those that were named if any were."""
    operations = {known.name.lower(): known for known in AT_SCALE}
    if operation not in ("all", *operations):
        raise UserError(f"--operation {operation!r}: choose from {', '.join(operations)}, or all")
    chosen = list(AT_SCALE) if operation == "all" else [operations[operation]]
    known = {name for of in chosen for name in AT_SCALE[of]}
    names = [name.strip() for name in algorithms.split(",")] if algorithms else sorted(known)
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is not simulated at scale. Choose from {', '.join(sorted(known))}.")
    return {of: [name for name in AT_SCALE[of] if name in names] for of in chosen}


def _tell(number: int, of: int, case: SimulatedCase) -> None:
    asked, whole = case.asked, case.whole
    what = (
        f"{asked.operation.name.lower()}, {asked.algorithm}, {asked.n:,} ranks, {size_in_words(asked.nbytes)}"
    )
    done = case.why if whole is None else f"{whole.instructions:,} instructions in {case.cpu_s:.1f} s"
    print(f"{number}/{of} {what}: {done}", file=sys.stderr)


def _console() -> rich.console.Console:
    terminal = sys.stdout.isatty()
    return rich.console.Console(width=None if terminal else WIDTH)


def _table(cases: Sequence[SimulatedCase]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("operation", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    deaths = any(case.repaired is not None for case in cases)
    for title in TITLES + (("stalled", "recovered\nms") if deaths else ()):
        table.add_column(title, justify="right", overflow="fold")
    left_out = dict.fromkeys(case.why for case in cases if case.whole is None)
    notes = {why: number for number, why in enumerate(left_out, 1)}
    for case in cases:
        asked, whole, repaired = case.asked, case.whole, case.repaired
        row = [asked.operation.name.lower(), asked.algorithm, f"{asked.n:,}", size_in_words(asked.nbytes)]
        if whole is None:
            row.append(f"[{notes[case.why]}]")
        else:
            row += [
                f"{whole.time_ns / 1e6:.3f}",
                f"{whole.bound_ns / 1e6:.3f}",
                f"{whole.time_ns / whole.bound_ns:.2f}",
                f"{whole.bus_bytes_per_ns:.2f}",
                f"{whole.time_ns / whole.least_ns:.2f}",
                f"{whole.instructions:,}",
                "vectors" if whole.vectorised else "events",
            ]
        if repaired is not None:
            row += [f"{repaired.stalled:,}", f"{repaired.recovered_ns / 1e6:.3f}"]
        table.add_row(*(rich.text.Text(cell) for cell in row))
    if notes:
        told = "\n".join(f"[{number}] not simulated: {why}" for why, number in notes.items())
        table.caption, table.caption_justify = rich.text.Text(told), "left"
    return table


def _as_json(case: SimulatedCase) -> dict[str, Any]:
    asked = case.asked
    told: dict[str, Any] = {
        "algorithm": asked.algorithm,
        "n": asked.n,
        "nbytes": asked.nbytes,
        "why": case.why,
    }
    if case.whole is not None:
        told |= msgspec.to_builtins(case.whole)
        told["bus_bytes_per_ns"] = case.whole.bus_bytes_per_ns
    told |= {"operation": asked.operation.name.lower(), "cpu_s": case.cpu_s}
    if case.repaired is not None:
        told["repaired"] = msgspec.to_builtins(case.repaired)
    return told


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `collectives` to `sim`."""
    parser = actions.add_parser(
        "collectives",
        help="operations on thousands of ranks of a modelled network",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_ranks(parser, RANKS_DEFAULT, "size of the largest group")
    parser.add_argument(
        "--sizes", default=SIZES_DEFAULT, help="bytes a rank: A,B,C or FIRST:LAST (default: %(default)s)"
    )
    parser.add_argument(
        "--operation", default="all_reduce", help="all_reduce, all_gather, ..., or all (default: %(default)s)"
    )
    parser.add_argument("--algorithms", default="", help="A,B,C (all that are simulated)")
    parser.add_argument(
        "--ranks-per-host", type=int, default=Fabric().ranks_per_host, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--ports", type=int, default=1, help="ports of 400 Gb/s a host (default: %(default)s)"
    )
    parser.add_argument(
        "--deaths", type=int, default=0, help="ranks that die in each operation (default: %(default)s)"
    )
    parser.add_argument(
        "--notice",
        type=parse_duration,
        default="1ms",
        help="from a death to its notice (default: %(default)s)",
    )
    parser.add_argument(
        "--skew", type=parse_duration, default=0.0, help="how far apart ranks begin (not at all)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="who dies, when, and who comes late (default: %(default)s)"
    )
    add_json(parser)
    add_plot(parser)
    parser.set_defaults(run_command=_run)
