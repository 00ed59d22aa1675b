"""Data of a run's plot, from its committed steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.tools.runs.result import Death, RunResult, load_result
from zbmd.training.autograd._spans import CATEGORIES
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.profiler.lines import IDLE, PROFILE_DIRECTORY, RankProfile, read_profiles
from zbmd.training.run.ledger import LOG_NAME, CommitRecord, has_log, loss_of, read_log
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import read_json_lines

POINTS_MAX = 1_000
"""A curve of more steps is drawn in so many bins."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """An uninterrupted membership: this incarnation of `rank` took part in the steps `first` to `last`."""

    rank: int
    incarnation: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A new epoch: `step` is the first that it committed, `step_ms` the time since the commit before."""

    step: int
    epoch_before: int
    epoch: int
    step_ms: float
    deaths: tuple[Death, ...]
    left: tuple[int, ...]
    """Members of the epoch before that are not in this one."""
    joined: tuple[int, ...]
    """Members that were not in the epoch before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values of steps, both float64 of one length."""

    steps: Floats
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """ms of each of `names`, (names, steps) float64, in the mean of the ranks."""

    names: tuple[str, ...]
    steps: Floats
    ms: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPicture:
    """All that is drawn. Losses in nats per `unit`, times in ms."""

    loss: Curve
    held_out: Curve
    step_ms: Curve
    evaluated: Curve
    """The part of `step_ms` whose steps also judged the weights on held-out text."""
    step_ms_median: float | None
    stays: tuple[Stay, ...]
    changes: tuple[Change, ...]
    result: RunResult
    first_step: int
    last_step: int
    ranks: tuple[int, ...]
    """Every rank that was ever a member, ascending."""
    spent: Spent | None = None
    """Time of the steps by category; None for a run without a profile."""
    unit: str = "byte"

    @property
    def steps(self) -> int:
        """The number of steps that are drawn."""
        return self.last_step - self.first_step + 1


def spent_by(lives: Sequence[RankProfile]) -> Spent | None:
    """Return the steps' time by category, each in the mean of the ranks that did it; None without a step.

    A step that was given up and done again counts as often as it was begun, as in the run's time.
    """
    every = [line for life in lives for line in life.steps]
    if not every:
        return None
    numbers = sorted({line.step for line in every})
    place_of = {step: place for place, step in enumerate(numbers)}
    names = tuple(name for name in (*CATEGORIES, IDLE) if any(line.ns.get(name) for line in every))
    total = np.zeros((len(names), len(numbers)))
    for line in every:
        for row, name in enumerate(names):
            total[row, place_of[line.step]] += line.ns.get(name, 0) / 1e6
    ranks = np.zeros(len(numbers))
    for step, _ in {(line.step, life.run.rank) for life in lives for line in life.steps}:
        ranks[place_of[step]] += 1
    starts = _bin_starts(len(numbers))
    widths = np.diff(np.append(starts, len(numbers)))
    steps = np.add.reduceat(np.array(numbers, np.float64), starts) / widths
    return Spent(names=names, steps=steps, ms=np.add.reduceat(total / ranks, starts, axis=1) / widths)


def picture_of(records: Sequence[CommitRecord], result: RunResult, spent: Spent | None = None) -> RunPicture:
    """Return the plot data of the committed steps `records`, at least one, in the order of the log."""
    steps = np.array([record.version for record in records], dtype=np.float64)
    losses = np.array([loss_of(record) for record in records], dtype=np.float64)
    shown = np.isfinite(losses) & (losses > 0.0)  # what a logarithmic axis can show
    at_ms = np.array([record.at_ns for record in records], dtype=np.float64) / 1e6
    # The clock is that of the writer: between writers on two hosts a difference may mean nothing.
    step_ms = np.diff(at_ms)
    timed = step_ms > 0.0
    times = binned_max(Curve(steps=steps[1:][timed], values=step_ms[timed]))
    evaluated = np.isin(
        times.steps, [record.version for record in records if record.held_out_loss is not None]
    )
    epochs = [list(group) for _, group in groupby(records, key=lambda record: record.epoch)]
    return RunPicture(
        loss=binned_mean(Curve(steps=steps[shown], values=losses[shown])),
        held_out=binned_mean(_held_out(records, result)),
        step_ms=times,
        evaluated=Curve(steps=times.steps[evaluated], values=times.values[evaluated]),
        step_ms_median=float(np.median(step_ms[timed])) if timed.any() else None,
        stays=tuple(_stays(epochs, result.deaths)),
        changes=tuple(_change(old, new, result.deaths) for old, new in pairwise(epochs)),
        result=result,
        first_step=records[0].version,
        last_step=records[-1].version,
        ranks=tuple(sorted({rank for record in records for rank in record.members})),
        spent=spent,
    )


def _held_out(records: Sequence[CommitRecord], result: RunResult) -> Curve:
    """Held-out losses by the step whose weights they judge: a record holds that of the step before it."""
    points = [
        (record.version - 1, record.held_out_loss) for record in records if record.held_out_loss is not None
    ]
    if result.heldout_loss_last is not None:
        points.append((records[-1].version, result.heldout_loss_last))
    found = np.array(points, dtype=np.float64).reshape(-1, 2)
    return Curve(steps=found[:, 0], values=found[:, 1])


def _stays(epochs: list[list[CommitRecord]], deaths: tuple[Death, ...]) -> list[Stay]:
    current: dict[int, Stay] = {}
    ended: list[Stay] = []
    for records in epochs:
        first, last = records[0], records[-1]
        for rank in first.members:
            died = [d.incarnation for d in deaths if d.rank == rank and d.epoch < first.epoch]
            incarnation, begin = max(died, default=0) + 1, first.version
            known = current.get(rank)
            if known is not None and (known.incarnation, known.last) == (incarnation, begin - 1):
                begin = known.first
            elif known is not None:
                ended.append(known)
            current[rank] = Stay(rank=rank, incarnation=incarnation, first=begin, last=last.version)
    return sorted([*ended, *current.values()], key=lambda stay: (stay.rank, stay.first))


def _change(old: list[CommitRecord], new: list[CommitRecord], deaths: tuple[Death, ...]) -> Change:
    before, after = old[-1], new[0]
    return Change(
        step=after.version,
        epoch_before=before.epoch,
        epoch=after.epoch,
        step_ms=(after.at_ns - before.at_ns) / 1e6,
        deaths=tuple(death for death in deaths if before.epoch <= death.epoch < after.epoch),
        left=tuple(sorted(set(before.members) - set(after.members))),
        joined=tuple(sorted(set(after.members) - set(before.members))),
    )


def _bin_starts(length: int) -> npt.NDArray[np.intp]:
    return np.linspace(0, length, min(length, POINTS_MAX), endpoint=False).astype(np.intp)


def binned_mean(curve: Curve) -> Curve:
    """`curve` in at most `POINTS_MAX` points, each the mean of its bin."""
    if curve.steps.size <= POINTS_MAX:
        return curve
    starts = _bin_starts(curve.steps.size)
    counts = np.diff(np.append(starts, curve.steps.size))
    return Curve(
        steps=np.add.reduceat(curve.steps, starts) / counts,
        values=np.add.reduceat(curve.values, starts) / counts,
    )


def binned_max(curve: Curve) -> Curve:
    """The slowest step of each bin, at its own place: a recovery must not be averaged away."""
    if curve.steps.size <= POINTS_MAX:
        return curve
    bounds = np.append(_bin_starts(curve.steps.size), curve.steps.size)
    slowest = [low + int(np.argmax(curve.values[low:high])) for low, high in pairwise(bounds.tolist())]
    return Curve(steps=curve.steps[slowest], values=curve.values[slowest])


# ---- a run on a mesh, which keeps metrics and profiles instead of a commit log


def read_picture(directory: Path) -> RunPicture:
    """The picture of the run in `directory`.

    Raises `UserError` if there is nothing of a run, if it holds no step yet, or if a file is damaged.
    """
    lives = read_profiles(directory) if (directory / PROFILE_DIRECTORY).is_dir() else []
    spent = spent_by(lives)
    metrics = directory / METRICS_NAME
    if metrics.exists() and not has_log(directory / LOG_NAME):
        picture = picture_of_metrics(read_metrics(metrics), lives, spent)
        if picture is None:
            raise UserError(f"{metrics} holds no step yet: there is nothing to draw.")
        return picture
    _, records = read_log(directory / LOG_NAME)
    if not records:
        raise UserError(f"{directory / LOG_NAME} holds no committed step yet: there is nothing to draw.")
    return picture_of(records, load_result(directory), spent)


METRICS_BYTES_MAX = 256 << 20
"""Of millions of steps."""


class MetricLine(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a line that is drawn; losses in nats per token."""

    step: int
    loss: float | None = None
    held_out_loss: float | None = None


_decoder: Final = msgspec.json.Decoder(MetricLine)


def read_metrics(path: Path) -> list[MetricLine]:
    """The lines of the last run that has written to `path`. Raises `UserError` as `read_json_lines` does."""
    found: list[MetricLine] = []
    last = 0
    what = "metrics that are"
    for line in read_json_lines(
        path, _decoder.decode, bytes_max=METRICS_BYTES_MAX, what=what, advice="move the file away"
    ):
        if line.loss is not None:
            if line.step <= last:
                found.clear()  # another run has begun in the same directory
            last = line.step
        found.append(line)
    return found


def picture_of_metrics(
    lines: Sequence[MetricLine], lives: Sequence[RankProfile], spent: Spent | None
) -> RunPicture | None:
    """The picture of `lines`, with the times and members that the profiles tell; None without a loss."""
    first = next((line.step for line in lines if line.loss is not None), None)
    if first is None:
        return None
    last = max(line.step for line in lines)
    times = _times(lives, first, last)
    stays = _stays_of_lives(lives, first, last)
    found = np.array([line.step for line in lines if line.held_out_loss is not None], np.float64)
    evaluated = np.isin(times.steps, found)
    return RunPicture(
        loss=binned_mean(_curve((line.step, line.loss) for line in lines)),
        held_out=binned_mean(_curve((line.step, line.held_out_loss) for line in lines)),
        step_ms=times,
        evaluated=Curve(steps=times.steps[evaluated], values=times.values[evaluated]),
        step_ms_median=float(np.median(times.values)) if times.values.size else None,
        stays=tuple(stays),
        changes=tuple(_changes_of_stays(stays, times)),
        result=RunResult(),
        first_step=first,
        last_step=last,
        ranks=tuple(sorted({stay.rank for stay in stays})) or (0,),
        spent=spent,
        unit="token",
    )


def _curve(points: Iterable[tuple[int, float | None]]) -> Curve:
    shown = [(step, value) for step, value in points if value is not None and 0.0 < value < np.inf]
    found = np.array(shown, np.float64).reshape(-1, 2)
    return Curve(steps=found[:, 0], values=found[:, 1])


def _times(lives: Sequence[RankProfile], first: int, last: int) -> Curve:
    """Of each step, that of the rank that took longest; what it took in all, if it was done again."""
    spent: defaultdict[tuple[int, int], int] = defaultdict(int)
    for life in lives:
        for line in life.steps:
            if first <= line.step <= last:
                spent[line.step, life.run.rank] += line.wall_ns
    longest: defaultdict[int, int] = defaultdict(int)
    for (step, _), ns in spent.items():
        longest[step] = max(longest[step], ns)
    steps = np.array(sorted(longest), np.float64)
    return binned_max(Curve(steps=steps, values=np.array([longest[int(step)] / 1e6 for step in steps])))


def _stays_of_lives(lives: Sequence[RankProfile], first: int, last: int) -> list[Stay]:
    found: list[Stay] = []
    ordered = sorted(lives, key=lambda life: (life.run.rank, life.run.incarnation))
    for (rank, incarnation), same in groupby(ordered, key=lambda life: (life.run.rank, life.run.incarnation)):
        steps = [line.step for life in same for line in life.steps if first <= line.step <= last]
        if steps:
            found.append(Stay(rank=rank, incarnation=incarnation, first=min(steps), last=max(steps)))
    return found


def _changes_of_stays(stays: Sequence[Stay], times: Curve) -> list[Change]:
    """A later incarnation of a rank shows that the one before was lost; its first step shows when."""
    took = dict(zip(times.steps.tolist(), times.values.tolist(), strict=True))
    lost = sorted((stay for stay in stays if stay.incarnation > 1), key=lambda stay: stay.first)
    found: list[Change] = []
    for step, same in groupby(lost, key=lambda stay: stay.first):
        epoch = len(found) + 1
        deaths = [
            Death(rank=stay.rank, incarnation=stay.incarnation - 1, step=step, epoch=epoch) for stay in same
        ]
        change = Change(
            step=step,
            epoch_before=epoch,
            epoch=epoch + 1,
            step_ms=took.get(step, 0.0),
            deaths=tuple(deaths),
            left=(),
            joined=(),
        )
        found.append(change)
    return found
