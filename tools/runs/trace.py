"""`zbmd trace`: all ranks of a run on one clock, as a trace for Perfetto (ui.perfetto.dev) or Chrome.

A process of the trace is a life of a rank; its tracks are its steps, with what they were spent on nested in
them, and the operations of each of its groups. Ranks of one host share a clock. Between hosts the wall clocks
count, less what the operations tell of them: none that all members wait for ends anywhere before the last of
them has entered it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from zbmd.tools.cli.trace_events import TraceEvents
from zbmd.training.autograd._spans import CATEGORIES, TRACK_OPERATION, TRACK_STEP
from zbmd.training.profiler.lines import PROFILE_DIRECTORY, RankProfile, StepLine
from zbmd.training.profiler.ring import RECORDS_MAX, GroupLine, Records, Spans, read_ring
from zbmd.transport.clock.offsets import Delay, Offset, offset_between, offsets_from_first
from zbmd.transport.errors import UserError

STEP_TRACK: Final = 0
FIRST_GROUP_TRACK: Final = 1
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
            else:
                operations = self._spans.operations
                title = operations[category] if category < len(operations) else "operation"
                track_of_group, told = FIRST_GROUP_TRACK + group, {"step": step, "bytes": amount}
                title = f"{title} #{sequence}"
                self._events.slice(
                    self._pid, track_of_group, title, begin_us, end_us, category="operation", told=told
                )
