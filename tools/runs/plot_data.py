"""Data of a run's plot, from its committed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from zbmd.tools.runs.result import Death, RunResult
from zbmd.training.autograd._spans import CATEGORIES
from zbmd.training.profiler.lines import IDLE, RankProfile
from zbmd.training.run.ledger import CommitRecord, loss_of

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
    """What the time of the steps went into; None for a run without a profile."""
    unit: str = "byte"

    @property
    def steps(self) -> int:
        """The number of steps that are drawn."""
        return self.last_step - self.first_step + 1


def spent_by(lives: Sequence[RankProfile]) -> Spent | None:
    """What the steps of a run went into, each in the mean of the ranks that did it; None if none was done.

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
