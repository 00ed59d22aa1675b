"""Plan the checkpoints of a run: its interval, what that costs, and what to change if it costs too much.

Pure: from `CheckpointInputs` to a `CheckpointPlan`, which is also what `--json` prints. Times are in seconds,
sizes in bytes, costs in fractions of useful time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from zbmd.tools.plan.quantities import shown_s, shown_share
from zbmd.training.checkpoint.intervals import (
    SMALL,
    Failing,
    Level,
    Lost,
    NestedIntervals,
    best,
    cluster_mtbf_s,
    daly_first_s,
    daly_s,
    exact_s,
    lost,
    lost_by_level,
    nested,
    optimum_s,
    snapped_steps,
    young_s,
)
from zbmd.transport.errors import UserError

STALL_ASYNC: Final = 0.02
"""Of the write: how long an asynchronous checkpoint keeps training waiting, unless it was measured."""
BUDGET: Final = 0.2
_SEARCHES: Final = 60
_MTBF_FACTOR_MAX: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInputs:
    """The input of a plan. mtbf_s: of one accelerator. write_s: of a whole checkpoint.

    stall: the part of the write that training waits for; 1.0 is a synchronous checkpoint. step_s: 0 if not
    known, and intervals are not snapped. budget: on the total of time lost. work_s: useful work of the run.
    restart_s: None if a restart takes as long as a write, because it reads the same bytes.
    """

    accelerators: int
    mtbf_s: float
    write_s: float
    restart_s: float | None = None
    stall: float = 1.0
    step_s: float = 0.0
    budget: float = BUDGET
    work_s: float = 720 * 3600.0
    interval_s: float | None = None

    def __post_init__(self) -> None:
        if self.accelerators < 1:
            raise UserError(f"--accelerators: expected at least 1, got {self.accelerators}")
        if self.interval_s is not None and self.interval_s < self.step_s:
            raise UserError(
                f"--interval: expected at least one step ({shown_s(self.step_s)}), got "
                f"{shown_s(self.interval_s)}"
            )

    @property
    def failing(self) -> Failing:
        """Return the cluster and its checkpoint as the formulas need them."""
        stall_s = self.stall * self.write_s
        return Failing(
            mtbf_s=cluster_mtbf_s(self.accelerators, self.mtbf_s),
            stall_s=stall_s,
            restart_s=self.write_s if self.restart_s is None else self.restart_s,
            latency_s=self.write_s - stall_s,
        )


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """An interval and what it costs. overhead: stalls, as C/T; all are fractions of useful time.

    steps: None if the time of a step is not known.
    """

    interval_s: float
    steps: int | None
    overhead: float
    rework: float
    restart: float
    total: float
    efficiency: float
    expected_s: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One change that brings the total of time lost within the budget, or the nearest to it."""

    change: str
    total: float


class LevelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One level of a plan with several. every: in checkpoints of the first level."""

    name: str
    mtbf_s: float
    interval_s: float
    every: int
    overhead: float
    rework: float
    restart: float


class CheckpointPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `zbmd plan checkpoint --json` prints.

    formula: which one gave `optimum_s`. floor_s: no interval is shorter, because one write must end before
    the next begins. best: the interval to use, snapped to steps. yours: that of `--interval`.
    """

    accelerators: int
    mtbf_s: float
    write_s: float
    stall_s: float
    restart_s: float
    young_s: float
    daly_first_s: float
    daly_s: float
    exact_s: float
    formula: str
    optimum_s: float
    floor_s: float
    best: Cost
    yours: Cost | None
    budget: float
    exceeded: bool
    advice: list[Advice]
    levels: list[LevelPlan]


def plan_checkpoint(inputs: CheckpointInputs) -> CheckpointPlan:
    """Return the plan of a run with one kind of checkpoint."""
    failing = inputs.failing
    stall_s, mtbf_s = failing.stall_s, failing.mtbf_s
    optimum = optimum_s(stall_s, mtbf_s)
    chosen_s = max(optimum, failing.latency_s)
    steps = None
    if inputs.step_s:
        steps = snapped_steps(chosen_s, inputs.step_s, failing, least_s=failing.latency_s)
    at_best = _cost(inputs, chosen_s if steps is None else steps * inputs.step_s)
    yours = None if inputs.interval_s is None else _cost(inputs, _snapped(inputs, inputs.interval_s))
    exceeded = (yours or at_best).total > inputs.budget
    return CheckpointPlan(
        accelerators=inputs.accelerators,
        mtbf_s=mtbf_s,
        write_s=inputs.write_s,
        stall_s=stall_s,
        restart_s=failing.restart_s,
        young_s=young_s(stall_s, mtbf_s),
        daly_first_s=daly_first_s(stall_s, mtbf_s, failing.restart_s),
        daly_s=daly_s(stall_s, mtbf_s),
        exact_s=exact_s(stall_s, mtbf_s),
        formula="Young" if stall_s <= SMALL * mtbf_s else "Daly, higher order",
        optimum_s=optimum,
        floor_s=failing.latency_s,
        best=at_best,
        yours=yours,
        budget=inputs.budget,
        exceeded=exceeded,
        advice=list(_advice(inputs, at_best, yours)) if exceeded else [],
        levels=[],
    )


def plan_levels(inputs: CheckpointInputs, levels: list[Level]) -> CheckpointPlan:
    """Return the plan of a run with several levels of checkpoints, cheapest first.

    `write_s` and `restart_s` of the inputs are not used. Raises `UserError` if shares do not add up to 1.
    """
    share = sum(level.share for level in levels)
    if abs(share - 1.0) > 1e-6:
        raise UserError(
            f"--level: expected shares of failures that add up to 100%, got {share:.1%}; the last level "
            "recovers what no other does."
        )
    mtbf_s = cluster_mtbf_s(inputs.accelerators, inputs.mtbf_s)
    step_s = inputs.step_s or min(level.stall_s for level in levels)
    intervals = nested(levels, mtbf_s, step_s)
    parts = lost_by_level(levels, intervals, mtbf_s)
    whole = Lost(
        io=sum(part.io for part in parts),
        rework=sum(part.rework for part in parts),
        restart=sum(part.restart for part in parts),
    )
    alone = replace(inputs, write_s=levels[-1].stall_s, restart_s=levels[-1].restart_s, stall=1.0)
    plan = plan_checkpoint(replace(alone, interval_s=None))
    best_cost = _as_cost(whole, intervals.base_s, inputs)
    return msgspec.structs.replace(
        plan,
        best=best_cost,
        exceeded=best_cost.total > inputs.budget,
        advice=_advice_levels(levels, parts, plan) if best_cost.total > inputs.budget else [],
        levels=_level_plans(levels, intervals, parts, mtbf_s),
    )


def _level_plans(
    levels: list[Level], intervals: NestedIntervals, parts: list[Lost], mtbf_s: float
) -> list[LevelPlan]:
    return [
        LevelPlan(
            name=level.name,
            mtbf_s=level.mtbf_s(mtbf_s),
            interval_s=intervals.interval_s(number),
            every=intervals.every[number],
            overhead=part.io,
            rework=part.rework,
            restart=part.restart,
        )
        for number, (level, part) in enumerate(zip(levels, parts, strict=True))
    ]


def _advice_levels(levels: list[Level], parts: list[Lost], alone: CheckpointPlan) -> list[Advice]:
    totals = [part.total for part in parts]
    worst = totals.index(max(totals))
    change = f"level {levels[worst].name} costs most: a cheaper checkpoint or restart there gains most"
    return [
        Advice(change=change, total=totals[worst]),
        Advice(change=f"level {levels[-1].name} alone", total=alone.best.total),
    ]


def _snapped(inputs: CheckpointInputs, interval_s: float) -> float:
    if not inputs.step_s:
        return interval_s
    return max(1, round(interval_s / inputs.step_s)) * inputs.step_s


def _cost(inputs: CheckpointInputs, interval_s: float) -> Cost:
    return _as_cost(lost(interval_s, inputs.failing), interval_s, inputs)


def _as_cost(found: Lost, interval_s: float, inputs: CheckpointInputs) -> Cost:
    return Cost(
        interval_s=interval_s,
        steps=round(interval_s / inputs.step_s) if inputs.step_s else None,
        overhead=found.io,
        rework=found.rework,
        restart=found.restart,
        total=found.total,
        efficiency=found.efficiency,
        expected_s=inputs.work_s * (1.0 + found.total),
    )


# ---- what to change


def _advice(inputs: CheckpointInputs, at_best: Cost, yours: Cost | None) -> list[Advice]:
    """Return single changes that meet the budget, each at its own best interval."""
    found: list[Advice] = []
    if yours is not None and at_best.total < yours.total:
        found.append(
            Advice(change=f"write every {shown_s(at_best.interval_s)}, as planned", total=at_best.total)
        )
        if at_best.total <= inputs.budget:
            return found
    if inputs.stall == 1.0:
        total = best(replace(inputs, stall=STALL_ASYNC).failing)
        change = f"write asynchronously (--async), with a stall of {STALL_ASYNC:.0%} of the write"
        found.append(Advice(change=change, total=total))
    factor = _factor(lambda part: best(replace(inputs, write_s=inputs.write_s * part).failing), inputs.budget)
    if factor is not None:
        found.append(
            _within(inputs, f"write in {shown_s(inputs.write_s * factor)}, {1 / factor:.3g} x as fast")
        )
    restart_s = inputs.failing.restart_s
    factor = _factor(lambda part: best(replace(inputs, restart_s=restart_s * part).failing), inputs.budget)
    if factor is not None:
        found.append(_within(inputs, f"restart in {shown_s(restart_s * factor)}"))
    factor = _factor(lambda part: best(replace(inputs, mtbf_s=inputs.mtbf_s / part).failing), inputs.budget)
    if factor is not None:
        needed_s = inputs.mtbf_s / factor
        found.append(_within(inputs, f"accelerators with an MTBF of {shown_s(needed_s)} each"))
        fewer = int(inputs.accelerators * factor)
        if fewer >= 1:
            found.append(_within(inputs, f"at most {fewer:,} accelerators in one job"))
    return found


def _within(inputs: CheckpointInputs, change: str) -> Advice:
    return Advice(change=change, total=inputs.budget)


def _factor(total: Callable[[float], float], budget: float) -> float | None:
    """Return the largest factor below 1 with `total(factor) <= budget`; None if none does.

    `total` grows with its argument.
    """
    low, high = 1.0 / _MTBF_FACTOR_MAX, 1.0
    if total(low) > budget:
        return None
    for _ in range(_SEARCHES):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if total(middle) <= budget else (low, middle)
    return low


def describe(plan: CheckpointPlan) -> str:
    """Return the plan in one line."""
    return (
        f"an MTBF of {shown_s(plan.mtbf_s)} and a stall of {shown_s(plan.stall_s)}: every "
        f"{shown_s(plan.best.interval_s)}, {shown_share(plan.best.total)} of useful time lost"
    )
