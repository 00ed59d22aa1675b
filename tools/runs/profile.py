"""`zbmd profile` and `zbmd trace`: what the steps of a run spent their time on, as a table and as a trace."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from zbmd.tools.cli.options import add_command, add_json
from zbmd.tools.cli.trace_events import TraceEvents, write_trace_file
from zbmd.training.autograd._spans import CATEGORIES, TRACK_OP, TRACK_OPERATION, TRACK_STEP
from zbmd.training.profiler.lines import (
    PROFILE_DIRECTORY,
    RankProfile,
    RankShare,
    StepLine,
    Summary,
    read_profiles,
    summary_of,
)
from zbmd.training.profiler.operations import COPY
from zbmd.training.profiler.peak import CUDA, MachineDescription, known, known_peak, peak_of, this_machine
from zbmd.training.profiler.ring import RECORDS_MAX, GroupLine, Records, Spans, read_ring
from zbmd.transport.clock.offsets import Delay, Offset, offset_between, offsets_from_first
from zbmd.transport.errors import UserError

# `zbmd trace`: a process of the trace is an incarnation of a rank; its tracks are its steps, with the spans
# they spent their time on nested in them, and the operations of each of its groups. Ranks of one host share a
# clock. Between hosts wall clocks count, corrected by operations: none that all members wait for ends
# anywhere before the last member has entered it.

STEP_TRACK: Final = 0
OPS_TRACK: Final = 1
FIRST_GROUP_TRACK: Final = 2
ALL_WAIT: Final = frozenset(
    {
        "all_gather",
        "all_gather_v",
        "all_reduce",
        "all_reduce_shards",
        "all_to_all",
        "barrier",
        "reduce_scatter",
    }
)
"""Operations that end nowhere before all members have entered them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How a rank's times are brought to the trace's: its monotonic clock plus `shift_ns`, right within
    `error_ns`; None if nothing tells how right.
    """

    shift_ns: int
    error_ns: int | None


def read_rings(directories: Sequence[Path]) -> list[Spans]:
    """The spans of all ranks, by rank and incarnation. Raises `UserError` if there are none."""
    paths = [
        path for directory in directories for path in (directory / PROFILE_DIRECTORY).glob("rank*.spans")
    ]
    if not paths:
        raise UserError(f"{', '.join(map(str, directories))}: no spans of ranks are kept there.")
    every = [read_ring(path) for path in paths]
    return sorted(every, key=lambda spans: (spans.run.rank, spans.run.incarnation))


def clocks_of(every: Sequence[Spans]) -> list[Clock]:
    """The clock of each, beside that of the first."""
    anchors = [spans.run.unix_ns - spans.run.monotonic_ns for spans in every]
    delays = _delays(every, anchors)

    def between(known: int, other: int) -> Offset | None:
        if every[known].run.boot_id and every[known].run.boot_id == every[other].run.boot_id:
            return Offset(offset_ns=anchors[other] - anchors[known], error_ns=0, seen=0)
        return offset_between(delays.get((known, other)), delays.get((other, known)))

    found = offsets_from_first(len(every), between)
    return [
        Clock(shift_ns=anchor - found[place][0].offset_ns, error_ns=found[place][0].error_ns)
        if place in found
        else Clock(shift_ns=anchor, error_ns=None)
        for place, anchor in enumerate(anchors)
    ]


def _delays(every: Sequence[Spans], anchors: Sequence[int]) -> dict[tuple[int, int], Delay]:
    """The smallest time, by wall clocks, from one's entry into an operation to its end at another host."""
    tables = [_operations(spans) for spans in every]
    delays: dict[tuple[int, int], Delay] = {}
    for a in range(len(every)):
        for b in range(len(every)):
            if a == b or every[a].run.boot_id == every[b].run.boot_id:
                continue
            for group in tables[a].keys() & tables[b].keys():
                theirs, ours = tables[a][group], tables[b][group]
                _, at, bt = np.intersect1d(theirs["sequence"], ours["sequence"], return_indices=True)
                if len(at) == 0:
                    continue
                ends, begins = ours["end_ns"][bt].astype(np.int64), theirs["begin_ns"][at].astype(np.int64)
                delay = int((ends - begins).min()) + anchors[b] - anchors[a]
                known = delays.setdefault((a, b), Delay(delay, 0))
                known.take(delay)
    return delays


def _operations(spans: Spans) -> dict[GroupLine, Records]:
    """The operations that all members wait for, by group."""
    records = spans.records[spans.records["track"] == TRACK_OPERATION]
    waited = [name in ALL_WAIT for name in spans.operations]
    named = records["category"] < len(waited)
    records = records[named]
    records = records[np.array(waited, bool)[records["category"]]] if len(waited) else records[:0]
    return {group: records[records["group"] == number] for number, group in enumerate(spans.groups)}


def trace_of(
    every: Sequence[Spans], lives: Sequence[RankProfile], *, steps: tuple[int, int] | None = None
) -> bytes:
    """The trace. steps: the first and the last one that are wanted; None: all that are kept."""
    clocks = clocks_of(every)
    chosen = [_chosen(spans, steps) for spans in every]
    ended = [_ended(spans, records, lives) for spans, records in zip(every, chosen, strict=True)]
    begins = [
        min([int(records["begin_ns"].min()), *(step.begin_ns for step in own)]) + clock.shift_ns
        for records, own, clock in zip(chosen, ended, clocks, strict=True)
        if len(records)
    ]
    if not begins:
        raise UserError(f"no span of these steps is kept: the latest {RECORDS_MAX:,} of each rank are.")
    events = TraceEvents()
    for pid, (spans, clock) in enumerate(zip(every, clocks, strict=True)):
        rank = _Rank(events, pid, spans, clock, min(begins))
        rank.name()
        rank.steps(ended[pid])
        rank.spans(chosen[pid])
    return events.encode("zbmd trace")


def _ended(spans: Spans, records: Records, lives: Sequence[RankProfile]) -> list[StepLine]:
    """The steps that any of `records` is of, and that have ended."""
    run, numbers = spans.run, set(records["step"].tolist())
    of_run = (run.rank, run.incarnation, run.pid)
    return [
        step
        for life in lives
        if (life.run.rank, life.run.incarnation, life.run.pid) == of_run
        for step in life.steps
        if step.step in numbers
    ]


def _chosen(spans: Spans, steps: tuple[int, int] | None) -> Records:
    if steps is None:
        return spans.records
    first, last = steps
    return spans.records[(spans.records["step"] >= first) & (spans.records["step"] <= last)]


class _Rank:
    """Writes one life of a rank as process `pid`."""

    def __init__(self, events: TraceEvents, pid: int, spans: Spans, clock: Clock, origin_ns: int) -> None:
        self._events, self._pid, self._spans, self._clock = events, pid, spans, clock
        self._shift_ns = clock.shift_ns - origin_ns
        self._units = tuple(unit.name for unit in spans.run.units)

    def name(self) -> None:
        run, clock = self._spans.run, self._clock
        life = "" if run.incarnation == 1 else f" #{run.incarnation}"
        right = ", clock unknown" if clock.error_ns is None else f", clock ± {clock.error_ns / 1e3:.0f} us"
        host = f" on {run.host}{right if clock.error_ns != 0 else ''}"
        self._events.process(self._pid, f"rank {run.rank}{life}{host} (pid {run.pid})")
        self._events.thread(self._pid, STEP_TRACK, "steps")
        if (self._spans.records["track"] == TRACK_OP).any():
            self._events.thread(self._pid, OPS_TRACK, "ops of sampled steps")
        for number, group in enumerate(self._spans.groups):
            about = f"group {group.channel} of epoch {group.epoch}, ranks {list(group.members)}"
            self._events.thread(self._pid, FIRST_GROUP_TRACK + number, about)

    def _us(self, at_ns: int) -> float:
        return (at_ns + self._shift_ns) / 1e3

    def steps(self, steps: Sequence[StepLine]) -> None:
        for step in steps:
            told = {name: f"{ns / 1e6:.3f} ms" for name, ns in step.ns.items()}
            begin_us, end_us = self._us(step.begin_ns), self._us(step.end_ns)
            name = f"step {step.step}"
            self._events.slice(self._pid, STEP_TRACK, name, begin_us, end_us, category="step", told=told)

    def spans(self, records: Records) -> None:
        for record in records.tolist():
            begin_ns, end_ns, amount, step, sequence, unit, group, category, track, _, _ = record
            begin_us, end_us = self._us(begin_ns), self._us(end_ns)
            if track == TRACK_STEP:
                name = CATEGORIES[category]
                title = name if unit < 0 else f"{name} {self._units[unit]}"
                told = {"step": step, "own_us": amount / 1e3}
                self._events.slice(self._pid, STEP_TRACK, title, begin_us, end_us, category=name, told=told)
                continue
            operations = self._spans.operations
            title = operations[category] if category < len(operations) else "operation"
            if track == TRACK_OP:
                of_unit = self._units[unit] if 0 <= unit < len(self._units) else ""
                told = {"step": step, "own_us": amount / 1e3, "unit": of_unit}
                self._events.slice(self._pid, OPS_TRACK, title, begin_us, end_us, category="op", told=told)
            else:
                track_of_group, told = FIRST_GROUP_TRACK + group, {"step": step, "bytes": amount}
                title = f"{title} #{sequence}"
                self._events.slice(
                    self._pid, track_of_group, title, begin_us, end_us, category="operation", told=told
                )


TRACE_NAME: Final = "trace.json"
RANKS_SHOWN: Final = 8
"""Of more ranks the table has the sums alone."""
STRAGGLERS_SHOWN: Final = 20
OPS_SHOWN: Final = 10
OP_WIDTH: Final = 52
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
    lives = _lives(arguments.runs)
    summary = summary_of(lives, peak_here)
    if arguments.json:
        slow = [msgspec.to_builtins(line) for life in lives for line in life.stragglers]
        ops = [asdict(one) for one in op_shares(lives)]
        print(msgspec.json.encode({**as_json(summary), "ops": ops, "stragglers": slow}).decode())
    else:
        print("\n".join([*table_of(summary), *slowest_ops(lives), *stragglers_of(lives)]))
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    steps = None if arguments.steps is None else _steps(arguments.steps)
    write_trace(arguments.runs, arguments.out, steps=steps)
    return 0


def write_trace(runs: Sequence[Path], out: Path | None, *, steps: tuple[int, int] | None = None) -> None:
    """Write the trace of a run, by default beside its files, and say where. steps: as of `trace_of`."""
    path = out or runs[0] / TRACE_NAME
    write_trace_file(path, trace_of(read_rings(runs), _lives(runs), steps=steps))
    print(f"{path}: open it at https://ui.perfetto.dev or in chrome://tracing")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShare:
    """An op of equal shapes in a pass, over the sampled steps of all ranks; times in ms a step.

    share: of the time of all ops. of_peak: the time that it takes where products and memory have their
    peaks, whichever takes longer, of the time that it took; None if these are not known, and of copies
    between host and device. enqueue_ms: in which the host asked for it.
    """

    op: str
    which: str
    shape: str
    dtype: str
    launches: float
    ms: float
    enqueue_ms: float
    wait_ms: float
    share: float
    gflops: float
    gigabytes_per_s: float
    of_peak: float | None


def op_shares(lives: Sequence[RankProfile]) -> list[OpShare]:
    """Return the ops of sampled steps, the slowest first; none, if no step was sampled."""
    sums: dict[tuple[str, str, str, str], np.ndarray] = {}
    steps = 0
    for life in lives:
        steps += len(life.ops)
        flops_per_s, bytes_per_s = _peaks_of(life) if life.ops else (None, None)
        for row in (row for line in life.ops for row in line.ops):
            ideal_ns = math.nan
            if flops_per_s and bytes_per_s and row.which != COPY:
                ideal_ns = 1e9 * max(row.flops / flops_per_s, row.nbytes / bytes_per_s)
            times = (row.execute_ns, row.wait_ns, row.enqueue_ns)
            numbers = (row.calls, *times, row.nbytes, row.flops, ideal_ns)
            key = (row.op, row.which, row.shape, row.dtype)
            sums[key] = sums.get(key, np.zeros(len(numbers))) + numbers
    whole_ns = sum(float(one[1]) for one in sums.values())
    shares = [_op_share(key, one.tolist(), steps, whole_ns) for key, one in sums.items()]
    return sorted(shares, key=lambda share: -share.ms)


def _op_share(
    key: tuple[str, str, str, str], numbers: Sequence[float], steps: int, whole_ns: float
) -> OpShare:
    calls, execute_ns, wait_ns, enqueue_ns, nbytes, flops, ideal_ns = numbers
    op, which, shape, dtype = key
    took_ns = max(1.0, execute_ns)
    return OpShare(
        op=op,
        which=which,
        shape=shape,
        dtype=dtype,
        launches=calls / steps,
        ms=execute_ns / steps / 1e6,
        enqueue_ms=enqueue_ns / steps / 1e6,
        wait_ms=wait_ns / steps / 1e6,
        share=execute_ns / max(1.0, whole_ns),
        gflops=flops / took_ns,
        gigabytes_per_s=nbytes / took_ns,
        of_peak=None if math.isnan(ideal_ns) else ideal_ns / took_ns,
    )


def _peaks_of(life: RankProfile) -> tuple[float | None, float | None]:
    """Return the FLOPs and the bytes a second of a rank's share of its machine."""
    run = life.run
    if run.peak is not None and run.stream is not None:
        return run.peak, run.stream
    together = peak_here(run.machine)
    found = known(run.machine)
    stream = None if found is None else found.bytes_per_s
    of_rank = (None if each is None else each / run.ranks_on_host for each in (together, stream))
    flops_per_s, bytes_per_s = of_rank
    return flops_per_s, bytes_per_s


def slowest_ops(lives: Sequence[RankProfile]) -> list[str]:
    """The lines of the table on the slowest ops; none, if no step was sampled."""
    every = op_shares(lives)
    if not every:
        return []
    columns = ("ms a step", "share", "launches", "enqueue ms", "wait ms", "GFLOP/s", "GB/s", "of peak")
    lines = [f"{'slowest ops':<{OP_WIDTH}}" + "".join(f"{cell:>11}" for cell in columns)]
    for one in every[:OPS_SHOWN]:
        name = f"{one.op} {one.which} {one.shape} {one.dtype}".strip()
        cells = (
            *(f"{one.ms:.2f}", f"{one.share:.1%}", f"{one.launches:.1f}"),
            *(f"{one.enqueue_ms:.2f}", f"{one.wait_ms:.2f}"),
            f"{one.gflops:.1f}" if one.gflops else "-",
            f"{one.gigabytes_per_s:.1f}",
            "-" if one.of_peak is None else f"{one.of_peak:.1%}",
        )
        lines.append(f"{name:<{OP_WIDTH}}" + "".join(f"{cell:>11}" for cell in cells))
    samples = sum(len(life.ops) for life in lives)
    return ["", *lines, f"(mean of {samples} sampled steps of ranks)"]


def stragglers_of(lives: Sequence[RankProfile]) -> list[str]:
    """The lines of the table on ranks that were slow; none, if none was."""
    found = sorted((line for life in lives for line in life.stragglers), key=lambda line: line.at_ns)
    shown = [f"step {line.step}: {line.text}" for line in found[-STRAGGLERS_SHOWN:]]
    return ["", "stragglers", *shown] if shown else []


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
    """Return the activations that ranks held, beside what their schedule promises."""
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
        unknown = next((one for one in summary.machines if one.blas == CUDA), None)
        if unknown is not None:
            return [f"{speed}; MFU is not known: zbmd has no peak of {unknown.processor}."]
        return [f"{speed}; MFU is not known: the peak of a rank's machine was not measured. Run this there."]
    peak = sum(rank.peak or 0.0 for rank in summary.ranks) / GIGA
    told = "; ".join(map(_machine, summary.machines))
    again = f" ({hardware / flops:.3f} of the model's FLOPs were computed)" if flops else ""
    return [f"MFU {mfu:.1%}, HFU {hfu:.1%}{again}: {speed} of {peak:.0f} ({told})"]


def _machine(one: MachineDescription) -> str:
    if one.blas == CUDA:
        shared = f", shared by {one.parallel} ranks" if one.parallel > 1 else ""
        return f"{one.processor}, {one.dtype}, dense peak of its data sheet{shared}"
    return f"{one.processor}, {one.parallel} x {one.threads} threads, {one.dtype}"


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
