"""`zbmd profile` and `zbmd trace`: what the steps of a run spent their time on, as a table and as a trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from zbmd.tools.cli.options import add_command, add_json
from zbmd.tools.cli.trace_events import write_trace_file
from zbmd.tools.runs.trace import read_rings, trace_of
from zbmd.training.profiler.lines import RankProfile, read_profiles
from zbmd.training.profiler.peak import MachineDescription, known_peak, peak_of, this_machine
from zbmd.training.profiler.summary import RankShare, Summary, summary_of
from zbmd.transport.errors import UserError

TRACE_NAME: Final = "trace.json"
RANKS_SHOWN: Final = 8
"""Of more ranks the table has the sums alone."""
GIGA: Final = 1e9
MIB: Final = 1 << 20


def add_profile(commands: Any) -> None:
    """Add `zbmd profile` and `zbmd trace`."""
    table = add_command(
        commands,
        "profile",
        "show where the steps of a run spent their time, with FLOPs and MFU",
        description="Show where the steps of a run spent their time. The first step of each incarnation of a "
        "rank is left out.",
        examples=("zbmd profile zbmd-runs/demo",),
    )
    table.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the run's directory, of each host")
    add_json(table)
    table.set_defaults(run_command=_profile)
    trace = add_command(
        commands,
        "trace",
        "write all ranks of a run on one clock as a trace for Perfetto or Chrome",
        description="Write the latest steps of all ranks as a trace, to open at https://ui.perfetto.dev.",
        examples=("zbmd trace zbmd-runs/demo --steps 20:24",),
    )
    trace.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the run's directory, of each host")
    trace.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file to write (default: {TRACE_NAME} in the first directory)",
    )
    trace.add_argument("--steps", metavar="FIRST:LAST", help="steps to write (default: all that are kept)")
    trace.set_defaults(run_command=_trace)


def peak_here(machine: MachineDescription) -> float | None:
    """FLOPs a second of a machine: measured if it is this one, else as it is known here, if it is."""
    here = this_machine(parallel=machine.parallel, dtype=machine.dtype)
    same = msgspec.structs.replace(here, threads=machine.threads, parallel=machine.parallel)
    return peak_of(machine) if same == machine else known_peak(machine)


def _lives(runs: Sequence[Path]) -> list[RankProfile]:
    every = [life for run in runs for life in read_profiles(run)]
    return sorted(every, key=lambda life: (life.run.rank, life.run.incarnation))


def _profile(arguments: argparse.Namespace) -> int:
    summary = summary_of(_lives(arguments.runs), peak_here)
    if arguments.json:
        print(msgspec.json.encode(as_json(summary)).decode())
    else:
        print("\n".join(table_of(summary)))
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    steps = None if arguments.steps is None else _steps(arguments.steps)
    path: Path = arguments.out or arguments.runs[0] / TRACE_NAME
    write_trace_file(path, trace_of(read_rings(arguments.runs), _lives(arguments.runs), steps=steps))
    print(f"{path}: open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or len(text) > 24 or int(first) > int(last):
        raise UserError(f"--steps {text}: say the first and the last step, such as 20:24.")
    return int(first), int(last)


# ---- the table


def table_of(summary: Summary) -> list[str]:
    """The lines of the table: shares of time, overlap, utilisation, and the units of the model."""
    ranks = summary.ranks if len(summary.ranks) <= RANKS_SHOWN else ()
    steps = max(rank.steps for rank in summary.ranks)
    lines = [
        f"{len(summary.ranks)} {'rank' if len(summary.ranks) == 1 else 'ranks'}, {steps} steps, "
        f"{_per_step_ms(summary):.2f} ms a step (mean; median of rank {summary.ranks[0].rank}: "
        f"{summary.ranks[0].step_ns_median / 1e6:.2f} ms)",
        "",
        _row("", "ms a step", "share", *(f"rank {rank.rank}" for rank in ranks)),
    ]
    for name in summary.categories:
        share = summary.ns(name) / summary.wall_ns
        own = (_percent(rank.ns.get(name, 0), rank.wall_ns) for rank in ranks)
        lines.append(_row(name, f"{_per_step_ms(summary) * share:.2f}", f"{share:.1%}", *own))
    told = [*_overlap_lines(summary), *_held_lines(summary), *_utilisation_lines(summary)]
    return [*lines, "", *told, "", *_unit_lines(summary)]


def _per_step_ms(summary: Summary) -> float:
    return summary.wall_ns / sum(rank.steps for rank in summary.ranks) / 1e6


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _row(name: str, *cells: str) -> str:
    return f"{name:<14}" + "".join(f"{cell:>12}" for cell in cells)


def _overlap_lines(summary: Summary) -> list[str]:
    found, hidden = summary.overlap, summary.hidden
    if hidden is None:
        return ["overlap: no operation of a group was under way"]
    steps = sum(rank.steps for rank in summary.ranks)
    return [
        f"overlap: operations of groups were under way for {found.under_way_ns / steps / 1e6:.2f} ms a step; "
        f"{hidden:.1%} of that was hidden behind computation, {found.waited_ns / found.under_way_ns:.1%} "
        "was waited for"
    ]


def _held_lines(summary: Summary) -> list[str]:
    """What ranks held of activations, beside what their schedule promises."""
    lines: list[str] = []
    for rank in summary.ranks[:RANKS_SHOWN]:
        if (held := rank.held) is not None:
            lines.append(
                f"activations of rank {rank.rank}: at most {held.microbatches} micro-batches at once, of "
                f"{held.microbatches_max} that the schedule promises: {held.nbytes / MIB:.2f} of "
                f"{held.nbytes_max / MIB:.2f} MiB"
            )
    return lines


def _utilisation_lines(summary: Summary) -> list[str]:
    flops = sum(rank.flops for rank in summary.ranks)
    hardware = sum(rank.hardware_flops for rank in summary.ranks)
    speed = f"{flops / summary.wall_ns * len(summary.ranks):.2f} GFLOP/s"
    mfu, hfu = summary.utilisation(_model_flops), summary.utilisation(_hardware_flops)
    if mfu is None or hfu is None:
        return [f"{speed}; MFU is not known: the peak of a rank's machine was not measured. Run this there."]
    peak = sum(rank.peak or 0.0 for rank in summary.ranks) / GIGA
    told = "; ".join(
        f"{machine.processor}, {machine.parallel} x {machine.threads} threads, {machine.dtype}"
        for machine in summary.machines
    )
    again = f" ({hardware / flops:.3f} of the model's FLOPs were computed)" if flops else ""
    return [f"MFU {mfu:.1%}, HFU {hfu:.1%}{again}: {speed} of {peak:.0f} ({told})"]


def _model_flops(rank: RankShare) -> int:
    return rank.flops


def _hardware_flops(rank: RankShare) -> int:
    return rank.hardware_flops


def _unit_lines(summary: Summary) -> list[str]:
    steps = max(rank.steps for rank in summary.ranks)
    peak = sum(rank.peak or 0.0 for rank in summary.ranks) / len(summary.ranks)
    lines = [_row("layer", "forward ms", "backward ms", "again ms", "GFLOP", "GFLOP/s", "of peak")]
    for unit in summary.units:
        ns = sum(unit.ns.values())
        speed = unit.hardware_flops / ns if ns else 0.0
        times = (f"{unit.ns[name] / steps / 1e6:.2f}" for name in ("forward", "backward", "recompute"))
        of_peak = f"{speed * GIGA / peak:.1%}" if peak else "-"
        work = f"{unit.flops / steps / GIGA:.3f}"
        lines.append(_row(unit.name, *times, work, f"{speed:.1f}", of_peak))
    return [*lines, "(a step, all ranks together; times are of a layer's passes, without waiting)"]


def as_json(summary: Summary) -> dict[str, Any]:
    """The same as data; times in ns, of all counted steps."""
    overlap = summary.overlap
    return {
        "ranks": [
            {
                "rank": rank.rank,
                "steps": rank.steps,
                "wall_ns": rank.wall_ns,
                "step_ns_median": rank.step_ns_median,
                "ns": rank.ns,
                "flops": rank.flops,
                "hardware_flops": rank.hardware_flops,
                "mfu": rank.utilisation(rank.flops),
                "hfu": rank.utilisation(rank.hardware_flops),
                "held": None if rank.held is None else msgspec.to_builtins(rank.held),
            }
            for rank in summary.ranks
        ],
        "share": {name: summary.ns(name) / summary.wall_ns for name in summary.categories},
        "overlap": {
            "under_way_ns": overlap.under_way_ns,
            "waited_ns": overlap.waited_ns,
            "hidden_ns": overlap.hidden_ns,
            "hidden": summary.hidden,
        },
        "mfu": summary.utilisation(_model_flops),
        "hfu": summary.utilisation(_hardware_flops),
        "units": [
            {"name": unit.name, "ns": unit.ns, "flops": unit.flops, "hardware_flops": unit.hardware_flops}
            for unit in summary.units
        ],
    }
