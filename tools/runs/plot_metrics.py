"""Plot data of a run on a mesh, which keeps metrics and profiles in place of a commit log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from zbmd.tools.runs.plot_data import (
    Change,
    Curve,
    RunPicture,
    Spent,
    Stay,
    binned_max,
    binned_mean,
    picture_of,
    spent_by,
)
from zbmd.tools.runs.result import Death, RunResult, load_result
from zbmd.training.files import read_json_lines
from zbmd.training.profiler.lines import PROFILE_DIRECTORY, RankProfile, read_profiles
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.training.sharded.records import METRICS_NAME
from zbmd.transport.errors import UserError


def read_picture(directory: Path) -> RunPicture:
    """The picture of the run in `directory`.

    Raises `UserError` if there is nothing of a run, if it holds no step yet, or if a file is damaged.
    """
    lives = read_profiles(directory) if (directory / PROFILE_DIRECTORY).is_dir() else []
    spent = spent_by(lives)
    metrics = directory / METRICS_NAME
    if metrics.exists() and not (directory / LOG_NAME).exists():
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
    """What is drawn of a line; losses in nats per token."""

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
    stays = _stays(lives, first, last)
    found = np.array([line.step for line in lines if line.held_out_loss is not None], np.float64)
    evaluated = np.isin(times.steps, found)
    return RunPicture(
        loss=binned_mean(_curve((line.step, line.loss) for line in lines)),
        held_out=binned_mean(_curve((line.step, line.held_out_loss) for line in lines)),
        step_ms=times,
        evaluated=Curve(steps=times.steps[evaluated], values=times.values[evaluated]),
        step_ms_median=float(np.median(times.values)) if times.values.size else None,
        stays=tuple(stays),
        changes=tuple(_changes(stays, times)),
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


def _stays(lives: Sequence[RankProfile], first: int, last: int) -> list[Stay]:
    found: list[Stay] = []
    ordered = sorted(lives, key=lambda life: (life.run.rank, life.run.incarnation))
    for (rank, incarnation), same in groupby(ordered, key=lambda life: (life.run.rank, life.run.incarnation)):
        steps = [line.step for life in same for line in life.steps if first <= line.step <= last]
        if steps:
            found.append(Stay(rank=rank, incarnation=incarnation, first=min(steps), last=max(steps)))
    return found


def _changes(stays: Sequence[Stay], times: Curve) -> list[Change]:
    """A later incarnation of a rank tells that the one before was lost; when, only its first step does."""
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
