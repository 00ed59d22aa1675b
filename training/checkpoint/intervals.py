"""Formulas of checkpoint intervals: how often to write, and what writing and failures cost.

All functions are pure. Times are in seconds. An interval is the useful work between the end of one checkpoint
and the start of the next, as in Young and Daly; a period is an interval and one stall. Costs are fractions of
useful time: 0.065 means 6.5 s for every 100 s of useful work.

Sources:
- Young 1974: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9).
- Daly 2006: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
  Future Generation Computer Systems 22(3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SMALL: Final = 0.01
"""A stall of at most this part of the MTBF is small: Young's interval is then within 5 % of the exact one."""
_NEWTON_STEPS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """One kind of checkpoint on a cluster that fails. All times are in seconds.

    mtbf_s: between failures of the whole cluster. stall_s: training waits so long for each checkpoint.
    latency_s: after its stall, a checkpoint can be restored only so much later, because it is still being
    written. restart_s: from a failure to the first step after it, without the steps that are repeated.
    """

    mtbf_s: float
    stall_s: float
    restart_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The time that is lost for each second of useful work. io: stalls; rework: repeated steps.

    rework includes stalls and writes that a failure cut short.
    """

    io: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.io + self.rework + self.restart

    @property
    def efficiency(self) -> float:
        """Return the part of all time that is useful work, 0 to 1."""
        return 1.0 / (1.0 + self.total)


def cluster_mtbf_s(accelerators: int, mtbf_s: float) -> float:
    """Return the mean time between failures of a job that any one of its accelerators interrupts.

    Failures of `accelerators` independent parts, each with a mean of `mtbf_s`: rates add up.
    """
    return mtbf_s / accelerators


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval, √(2·C·M) (Young 1974)."""
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_first_s(stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return Daly's interval of first order, √(2·C·(M + R)) (Daly 2006)."""
    return math.sqrt(2.0 * stall_s * (mtbf_s + restart_s))


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's interval of higher order (Daly 2006, the perturbation solution).

    √(2CM)·[1 + ⅓·√(C/2M) + ⅑·(C/2M)] − C for C < 2M, otherwise M.
    """
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    part = stall_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * stall_s * mtbf_s) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - stall_s


def exact_s(stall_s: float, mtbf_s: float) -> float:
    """Return the interval with the least total of `lost`: M·(1 + W₀(−e^(−C/M − 1))), W₀ Lambert's function.

    It follows from the zero of the derivative of Daly's cost (Daly 2006), (1 − x)·e^(x + C/M) = 1
    for x = T/M; it depends neither on the restart time nor on the latency of a checkpoint.
    """
    stall, x = stall_s / mtbf_s, 1.0
    for _ in range(_NEWTON_STEPS_MAX):  # convex, and from the right: it never leaves (0, 1]
        value, slope = x + math.expm1(-(x + stall)), -math.expm1(-(x + stall))
        nearer = x - value / slope
        if not nearer < x:
            break
        x = nearer
    return x * mtbf_s


def optimum_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval for a stall that is `SMALL` beside the MTBF, and otherwise Daly's."""
    young = stall_s <= SMALL * mtbf_s
    return young_s(stall_s, mtbf_s) if young else daly_s(stall_s, mtbf_s)


def lost(interval_s: float, failing: Failing) -> Lost:
    """Return what checkpoints after each `interval_s` of work cost, with failures of a Poisson process.

    Daly's complete cost (Daly 2006), in which restarts and repeated steps fail too: a period P
    takes M·e^(R/M)·(e^(P/M) − 1). A latency L multiplies it by e^(L/M): the first checkpoint after a restart
    is of use only after P + L, each later one after another P.
    """
    mtbf_s, period_s = failing.mtbf_s, interval_s + failing.stall_s
    failures = _exp(failing.latency_s / mtbf_s) * _expm1(period_s / mtbf_s)  # of each period that succeeds
    return Lost(
        io=failing.stall_s / interval_s,
        rework=(failures * mtbf_s - period_s) / interval_s,
        restart=failures * mtbf_s * _expm1(failing.restart_s / mtbf_s) / interval_s,
    )


def snapped_steps(interval_s: float, step_s: float, failing: Failing, *, least_s: float = 0.0) -> int:
    """Return the whole number of steps next to `interval_s` that costs least, and lasts `least_s` or more."""
    below = max(1, math.floor(interval_s / step_s), math.ceil(least_s / step_s - 1e-9))
    return min((below, below + 1), key=lambda steps: lost(steps * step_s, failing).total)


def best(failing: Failing) -> float:
    """Return the total of `lost` at the exact optimum, or at the latency where that is longer."""
    interval_s = max(exact_s(failing.stall_s, failing.mtbf_s), failing.latency_s)
    return lost(interval_s, failing).total


# ---- several levels: memory, disk, object store


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One tier of checkpoints. share: the part of all failures for which it is the nearest that survives.

    stall_s: training waits so long for each of its checkpoints, in addition to those of other levels.
    """

    name: str
    stall_s: float
    share: float
    restart_s: float

    def mtbf_s(self, cluster_s: float) -> float:
        """Return the mean time between the failures that this level recovers."""
        return cluster_s / self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedIntervals:
    """Intervals of levels: the first writes after each `base_s` of work, level i with every `every[i]`-th.

    `every` begins with 1, and each entry divides the next: a higher level coincides with all lower ones.
    """

    base_s: float
    every: tuple[int, ...]

    def interval_s(self, level: int) -> float:
        """Return the interval of a level."""
        return self.base_s * self.every[level]


def nested(levels: Sequence[Level], cluster_s: float, step_s: float) -> NestedIntervals:
    """Return each level's own optimum for the failures that it recovers, snapped to steps and nested."""
    own = [optimum_s(level.stall_s, level.mtbf_s(cluster_s)) for level in levels]
    base_s = max(1, round(own[0] / step_s)) * step_s
    every = [1]
    for wanted_s in own[1:]:
        every.append(every[-1] * max(1, round(wanted_s / (base_s * every[-1]))))
    return NestedIntervals(base_s=base_s, every=tuple(every))


def lost_by_level(levels: Sequence[Level], intervals: NestedIntervals, cluster_s: float) -> list[Lost]:
    """Return what each level costs, to first order in C/M: C/T for its stalls, T/2M + R/M for its failures.

    The first order leaves out failures during restarts and repeated steps; a simulation has them.
    """
    found: list[Lost] = []
    for number, level in enumerate(levels):
        interval_s, mtbf_s = intervals.interval_s(number), level.mtbf_s(cluster_s)
        rework = interval_s / (2.0 * mtbf_s)
        found.append(Lost(io=level.stall_s / interval_s, rework=rework, restart=level.restart_s / mtbf_s))
    return found


def _exp(x: float) -> float:
    return 1.0 + _expm1(x)


def _expm1(x: float) -> float:
    try:
        return math.expm1(x)
    except OverflowError:
        return math.inf
