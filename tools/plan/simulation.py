"""Simulate failures event by event, to check the formulas of `intervals.py` and to find where they end.

Each trial is a job of a fixed amount of work. Its events are failures, drawn from a seed; between two of them
it restarts, works, writes checkpoints and is thrown back to the newest one that survives. All trials advance
together in arrays of numpy, one failure a round. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.training.checkpoint.intervals import Failing, Level, NestedIntervals, daly_s, exact_s, young_s
from zbmd.transport.errors import UserError

FAILURES_MAX: Final = 20_000
"""Of one trial. A job that fails more often makes no progress."""
PERIODS_MAX: Final = 2_000_000
GRID: Final = 25
GRID_SPAN: Final = 2.5
"""A search covers intervals from 1/GRID_SPAN to GRID_SPAN times the one that it starts at."""
FIT_DEGREE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Times between failures: Weibull with mean `mtbf_s`; shape 1 is exponential.

    Below 1, failures come in bursts: one makes the next more likely. Above 1, they wear in. Each failure
    starts the process again (a renewal process of the whole cluster).
    """

    mtbf_s: float
    shape: float = 1.0

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Return `count` times, in seconds."""
        if self.shape == 1.0:
            return rng.exponential(self.mtbf_s, count)
        return rng.weibull(self.shape, count) * (self.mtbf_s / math.gamma(1.0 + 1.0 / self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLevel:
    """A level as the simulation needs it. every: in writes of the first level; latency_s: after a stall."""

    stall_s: float
    share: float
    restart_s: float
    every: int = 1
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The result of a simulation: the time lost for each second of useful work, and its standard error."""

    lost: float
    error: float
    failures: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The extent of a simulation. work_mtbfs: useful work of each trial, in MTBFs of the cluster."""

    work_mtbfs: float = 100.0
    trials: int = 400
    seed: int = 0


DEFAULT_SETUP: Final = Setup()


def one_level(failing: Failing) -> tuple[SimulatedLevel, ...]:
    """Return the levels of a job with one kind of checkpoint."""
    level = SimulatedLevel(
        stall_s=failing.stall_s, share=1.0, restart_s=failing.restart_s, latency_s=failing.latency_s
    )
    return (level,)


def several_levels(levels: Sequence[Level], intervals: NestedIntervals) -> tuple[SimulatedLevel, ...]:
    """Return levels as the simulation needs them."""
    return tuple(
        SimulatedLevel(stall_s=level.stall_s, share=level.share, restart_s=level.restart_s, every=every)
        for level, every in zip(levels, intervals.every, strict=True)
    )


def simulate(
    interval_s: float,
    levels: Sequence[SimulatedLevel],
    failures: Failures,
    setup: Setup = DEFAULT_SETUP,
) -> Trials:
    """Simulate jobs that write after each `interval_s` of work.

    The same seed draws the same failures for any interval, so that two intervals are compared on one history.
    Raises `UserError` if jobs make no progress, or have more than `PERIODS_MAX` periods.
    """
    periods = max(1, round(setup.work_mtbfs * failures.mtbf_s / interval_s))
    if periods > PERIODS_MAX:
        raise UserError(
            f"{periods:,} checkpoints are too many to simulate: expected at most {PERIODS_MAX:,}; "
            "give a longer interval or less work."
        )
    clocks, counts = _Jobs(interval_s, levels, periods, setup.trials).run(
        failures, np.random.default_rng(setup.seed)
    )
    lost = clocks / (periods * interval_s) - 1.0
    error = float(lost.std(ddof=1)) / math.sqrt(setup.trials) if setup.trials > 1 else math.inf
    return Trials(lost=float(lost.mean()), error=error, failures=float(counts.mean()))


class _Jobs:
    """All trials of one simulation. Positions are in periods; `_reached_s[b]` is the time of `b` periods."""

    def __init__(
        self, interval_s: float, levels: Sequence[SimulatedLevel], periods: int, trials: int
    ) -> None:
        self._levels = levels
        number = np.arange(periods + 1)
        self._reached_s = number * interval_s
        for level in levels:
            self._reached_s = self._reached_s + level.stall_s * (number // level.every)
        self._shares = np.cumsum([level.share for level in levels])
        self._shares[-1] = 1.0
        self._restarts_s = np.array([level.restart_s for level in levels])
        self._position = np.zeros(trials, dtype=np.int64)
        self._durable = np.zeros((len(levels), trials), dtype=np.int64)
        self._restart_s = np.zeros(trials)

    def run(
        self, failures: Failures, rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the seconds that each trial took, and how often it failed."""
        trials = len(self._position)
        clock, count = np.zeros(trials), np.zeros(trials, dtype=np.int64)
        running = np.ones(trials, dtype=np.bool_)
        for _ in range(FAILURES_MAX):
            uptime_s, hit = failures.draw(rng, trials), rng.random(trials)
            start_s = self._reached_s[self._position]
            rest_s = self._restart_s + self._reached_s[-1] - start_s
            ends = uptime_s >= rest_s
            clock += np.where(running, np.minimum(uptime_s, rest_s), 0.0)
            running &= ~ends
            if not running.any():
                return clock, count
            count += running
            self._write(start_s + uptime_s - self._restart_s, running)
            self._fall_back(np.searchsorted(self._shares, hit, side="right"), running)
        raise UserError(
            f"a simulated job failed {FAILURES_MAX:,} times without an end: the interval and its stall "
            "are too long for this MTBF; expected a shorter interval or a longer MTBF."
        )

    def _write(self, until_s: NDArray[np.float64], running: NDArray[np.bool_]) -> None:
        """Note the checkpoints of this uptime whose writes were complete when it ended."""
        for durable, level in zip(self._durable, self._levels, strict=True):
            reached = np.searchsorted(self._reached_s, until_s - level.latency_s, side="right") - 1
            reached = reached // level.every * level.every
            np.copyto(durable, reached, where=running & (reached > self._position))

    def _fall_back(self, hit: NDArray[np.int64], running: NDArray[np.bool_]) -> None:
        """Go back to the newest checkpoint of level `hit` or a higher one; lower levels are refilled."""
        for number in range(len(self._levels)):
            struck = running & (hit == number)
            np.copyto(self._position, self._durable[number:].max(axis=0), where=struck)
            self._durable[:number, struck] = self._position[struck]
            self._restart_s[struck] = self._restarts_s[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The best interval of a simulation. error: of `lost` there, one standard error."""

    interval_s: float
    lost: float
    error: float


def best_interval(
    start_s: float, failing: Failing, failures: Failures, setup: Setup = DEFAULT_SETUP
) -> Search:
    """Search the interval with the least loss near `start_s`, or beyond, on one history of failures.

    A polynomial through the logarithms smooths what is left of the noise. Raises `UserError` as `simulate`.
    """
    levels = one_level(failing)
    around_s = start_s
    for _ in range(4):
        grid = around_s * np.geomspace(1.0 / GRID_SPAN, GRID_SPAN, GRID)
        found = [simulate(float(interval_s), levels, failures, setup).lost for interval_s in grid]
        fit = np.polynomial.Polynomial.fit(np.log(grid), np.log(found), FIT_DEGREE)
        fine = np.linspace(math.log(grid[0]), math.log(grid[-1]), 2_001)
        lowest = int(np.argmin(fit(fine)))
        around_s = math.exp(fine[lowest])
        if 0.1 < lowest / len(fine) < 0.9:
            break
    at = simulate(around_s, levels, failures, setup)
    return Search(interval_s=around_s, lost=at.lost, error=at.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The formulas beside a simulation, for one stall, in MTBFs, and one shape. Intervals are in MTBFs too.

    lost_young, lost_daly, lost_best: time lost for each second of work at those intervals, simulated.
    """

    stall: float
    shape: float
    young: float
    daly: float
    exact: float
    best: float
    lost_young: float
    lost_daly: float
    lost_best: float


def validity(stall: float, shape: float, setup: Setup = DEFAULT_SETUP) -> Validity:
    """Compare the formulas with a simulation, for a stall in units of the MTBF and restarts as long as it."""
    failing = Failing(mtbf_s=1.0, stall_s=stall, restart_s=stall)
    failures = Failures(mtbf_s=1.0, shape=shape)
    intervals = young_s(stall, 1.0), daly_s(stall, 1.0)
    at = [simulate(interval, one_level(failing), failures, setup).lost for interval in intervals]
    exact = exact_s(stall, 1.0)
    found = best_interval(exact, failing, failures, setup)
    return Validity(
        stall=stall,
        shape=shape,
        young=intervals[0],
        daly=intervals[1],
        exact=exact,
        best=found.interval_s,
        lost_young=at[0],
        lost_daly=at[1],
        lost_best=found.lost,
    )
