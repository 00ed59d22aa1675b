"""Simulated failures agree with the formulas where those hold, and show where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from zbmd.tools.plan.simulation import (
    Failures,
    Setup,
    SimulatedLevel,
    best_interval,
    one_level,
    several_levels,
    simulate,
    validity,
)
from zbmd.training.checkpoint.intervals import (
    Failing,
    Level,
    daly_s,
    exact_s,
    lost,
    lost_by_level,
    nested,
    young_s,
)
from zbmd.transport.errors import UserError

SETUP = Setup(work_mtbfs=60.0, trials=300, seed=7)
ISSUE = Failing(mtbf_s=28_800.0, stall_s=240.0, restart_s=240.0)


@pytest.mark.parametrize("part", [0.002, 0.05, 0.3])
@pytest.mark.parametrize("latency", [0.0, 0.1])
def test_the_cost_of_an_interval_is_the_formulas(part: float, latency: float) -> None:
    failing = Failing(mtbf_s=1_000.0, stall_s=part * 1e3, restart_s=50.0, latency_s=latency * 1e3)
    interval_s = max(exact_s(failing.stall_s, 1e3), failing.latency_s)
    found = simulate(interval_s, one_level(failing), Failures(mtbf_s=1e3), SETUP)
    assert found.lost == pytest.approx(lost(interval_s, failing).total, abs=4 * found.error + 0.005)


@pytest.mark.parametrize(
    ("stall_s", "mtbf_s"), [(240.0, 28_800.0), (5.12, 43.945), (50.0, 100.0)], ids=["0.8%", "12%", "50%"]
)
def test_the_best_interval_is_within_5_percent_of_the_formula(stall_s: float, mtbf_s: float) -> None:
    failing = Failing(mtbf_s=mtbf_s, stall_s=stall_s, restart_s=stall_s)
    found = best_interval(daly_s(stall_s, mtbf_s), failing, Failures(mtbf_s=mtbf_s), SETUP)
    assert found.interval_s == pytest.approx(exact_s(stall_s, mtbf_s), rel=0.05)
    assert found.lost == pytest.approx(lost(found.interval_s, failing).total, rel=0.05)


def test_youngs_interval_is_confirmed_where_a_stall_is_small() -> None:
    found = best_interval(young_s(240.0, 28_800.0), ISSUE, Failures(mtbf_s=28_800.0), SETUP)
    assert found.interval_s == pytest.approx(young_s(240.0, 28_800.0), rel=0.06)


def test_youngs_interval_is_too_long_where_a_stall_is_near_the_mtbf() -> None:
    row = validity(0.5, 1.0, SETUP)
    assert row.young / row.best > 1.3
    assert row.lost_young > 1.03 * row.lost_best
    assert row.daly == pytest.approx(row.best, rel=0.05)


def test_bursts_of_failures_want_longer_intervals_than_the_formulas_give() -> None:
    bursts, wearing = validity(0.1, 0.5, SETUP), validity(0.1, 1.5, SETUP)
    assert bursts.best > 1.25 * bursts.exact
    assert wearing.best < 0.95 * wearing.exact
    assert bursts.lost_best < wearing.lost_best, "as many failures, but fewer of them far apart"


def test_the_same_seed_has_the_same_history_and_another_has_not() -> None:
    levels, failures = one_level(ISSUE), Failures(mtbf_s=28_800.0, shape=0.7)
    first = simulate(3_600.0, levels, failures, SETUP)
    assert simulate(3_600.0, levels, failures, SETUP) == first
    assert simulate(3_600.0, levels, failures, Setup(work_mtbfs=60.0, trials=300, seed=8)) != first


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 1.5, 3.0])
def test_drawn_times_have_the_mean_that_was_asked_for(shape: float) -> None:
    drawn = Failures(mtbf_s=100.0, shape=shape).draw(np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(100.0, rel=0.02)
    if shape != 1.0:
        assert (drawn.std() / drawn.mean() > 1.0) == (shape < 1.0)


def test_without_failures_only_stalls_are_lost() -> None:
    levels = (
        SimulatedLevel(stall_s=1.0, share=0.5, restart_s=1.0),
        SimulatedLevel(stall_s=10.0, share=0.5, restart_s=1.0, every=4),
    )
    found = simulate(100.0, levels, Failures(mtbf_s=1e12), Setup(work_mtbfs=400 / 1e12, trials=2))
    assert found.failures == 0
    assert found.lost == pytest.approx((4 * 1.0 + 10.0) / 400)


def test_a_failure_goes_back_to_the_level_that_survives_it() -> None:
    """All failures strike the upper level: the checkpoints of the lower one are of no use."""
    lower = SimulatedLevel(stall_s=0.0, share=0.0, restart_s=1.0)
    upper = SimulatedLevel(stall_s=5.0, share=1.0, restart_s=1.0, every=10)
    failing = Failing(mtbf_s=500.0, stall_s=5.0, restart_s=1.0)
    both = simulate(10.0, (lower, upper), Failures(mtbf_s=500.0), SETUP)
    assert both.lost == pytest.approx(lost(100.0, failing).total, abs=4 * both.error + 0.005)
    spared = simulate(
        10.0,
        (SimulatedLevel(stall_s=0.0, share=1.0, restart_s=1.0), upper),
        Failures(mtbf_s=500.0),
        SETUP,
    )
    assert spared.lost < both.lost


def test_several_levels_cost_what_the_first_order_says() -> None:
    levels = [
        Level(name="memory", stall_s=0.2, share=0.80, restart_s=2.0),
        Level(name="disk", stall_s=3.0, share=0.15, restart_s=20.0),
        Level(name="store", stall_s=40.0, share=0.05, restart_s=180.0),
    ]
    mtbf_s = 70_312.5
    intervals = nested(levels, mtbf_s, 5.0)
    found = simulate(intervals.base_s, several_levels(levels, intervals), Failures(mtbf_s=mtbf_s), SETUP)
    assert found.lost == pytest.approx(
        sum(one.total for one in lost_by_level(levels, intervals, mtbf_s)), rel=0.1
    )


def test_a_job_without_progress_is_reported_and_ends() -> None:
    failing = Failing(mtbf_s=1.0, stall_s=20.0, restart_s=0.1)
    with pytest.raises(UserError, match="without an end"):
        simulate(1.0, one_level(failing), Failures(mtbf_s=1.0), Setup(work_mtbfs=1.0, trials=2))
    with pytest.raises(UserError, match="too many to simulate"):
        simulate(1e-9, one_level(failing), Failures(mtbf_s=1.0))
