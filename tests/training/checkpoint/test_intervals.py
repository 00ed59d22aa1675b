"""The formulas of checkpoint intervals: published values, and what must hold for any cluster."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.checkpoint.intervals import (
    SMALL,
    Failing,
    Level,
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

MINUTE, HOUR = 60.0, 3600.0
mtbfs = st.floats(10.0, 1e7)
parts = st.floats(1e-6, 3.0)
"""Of a stall, in MTBFs."""


def test_a_stall_of_4_minutes_and_an_mtbf_of_8_hours() -> None:
    stall_s, mtbf_s = 4 * MINUTE, 8 * HOUR
    assert young_s(stall_s, mtbf_s) == pytest.approx(62.0 * MINUTE, abs=3.0)
    failing = Failing(mtbf_s=mtbf_s, stall_s=stall_s, restart_s=stall_s)
    # The overhead of the literature is C/T; half of the interval is lost with each failure, to first order.
    assert lost(62 * MINUTE, failing).io == pytest.approx(0.0645, abs=1e-4)
    assert lost(30 * MINUTE, failing).io == pytest.approx(0.1333, abs=1e-4)
    assert lost(62 * MINUTE, failing).rework > 62 * MINUTE / (2 * mtbf_s)


def test_16384_accelerators_at_200_hours_fail_every_43_9_seconds_not_minutes() -> None:
    mtbf_s = cluster_mtbf_s(16_384, 200 * HOUR)
    assert mtbf_s == pytest.approx(43.945, abs=1e-3)
    # 5.12 s are 2 TiB at 400 GiB/s; at 400 GB/s, 2 TiB take 5.498 s.
    stall_s = 2 * 2**40 / (400 * 2**30)
    assert stall_s == pytest.approx(5.12)
    assert pytest.approx(5.498, abs=1e-3) == 2 * 2**40 / 400e9
    assert young_s(stall_s, mtbf_s) == pytest.approx(21.2, abs=0.05)
    assert young_s(0.02 * stall_s, mtbf_s) == pytest.approx(3.0, abs=0.01)
    # A stall of 12 % of the MTBF is not small: Young's interval is 18 % too long.
    assert daly_s(stall_s, mtbf_s) == pytest.approx(17.94, abs=0.01)
    assert exact_s(stall_s, mtbf_s) == pytest.approx(17.95, abs=0.01)


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_intervals_that_daly_published(mtbf_min: float, published_min: float) -> None:
    """Captions of figures 3 to 5 of Daly 2006: dumps of 5 min."""
    digits = 0 if published_min > 10 else 1
    assert round(daly_s(5.0, mtbf_min), digits) == published_min


def test_a_stall_beyond_two_mtbfs_is_written_once_an_mtbf() -> None:
    assert daly_s(200.0, 100.0) == 100.0
    assert daly_first_s(2.0, 100.0, 44.0) == pytest.approx(math.sqrt(2 * 2 * 144))


@given(mtbfs, parts, st.floats(1.0001, 8.0))
def test_the_exact_optimum_is_a_minimum_of_the_cost(mtbf_s: float, part: float, factor: float) -> None:
    stall_s = part * mtbf_s
    failing = Failing(mtbf_s=mtbf_s, stall_s=stall_s, restart_s=stall_s, latency_s=stall_s / 3)
    optimum = exact_s(stall_s, mtbf_s)
    assert 0 < optimum <= mtbf_s
    at = lost(optimum, failing).total
    assert at <= lost(optimum * factor, failing).total * (1 + 1e-9)
    assert at <= lost(optimum / factor, failing).total * (1 + 1e-9)


@given(mtbfs, parts)
def test_the_formula_that_is_used_is_within_5_percent_of_the_exact_one(mtbf_s: float, part: float) -> None:
    stall_s = part * mtbf_s
    exact = exact_s(stall_s, mtbf_s)
    if part < 1.0:
        assert optimum_s(stall_s, mtbf_s) == pytest.approx(exact, rel=0.05)
    chosen = young_s(stall_s, mtbf_s) if part <= SMALL else daly_s(stall_s, mtbf_s)
    assert optimum_s(stall_s, mtbf_s) == chosen


@given(mtbfs, parts, st.floats(1.01, 100.0))
def test_more_failures_and_cheaper_checkpoints_make_the_interval_shorter(
    mtbf_s: float, part: float, factor: float
) -> None:
    stall_s = part * mtbf_s
    for interval in (young_s, exact_s):
        assert interval(stall_s, mtbf_s / factor) < interval(stall_s, mtbf_s)
        assert interval(stall_s / factor, mtbf_s) < interval(stall_s, mtbf_s)


@given(mtbfs, st.floats(1e-4, 1.0), st.floats(1e-3, 3.0), st.floats(1.01, 10.0))
def test_every_cost_grows_with_failures_restarts_and_latency(
    mtbf_s: float, part: float, interval: float, factor: float
) -> None:
    failing = Failing(mtbf_s=mtbf_s, stall_s=part * mtbf_s, restart_s=part * mtbf_s, latency_s=0.1 * mtbf_s)
    interval_s = interval * mtbf_s
    now = lost(interval_s, failing)
    assert now.io > 0 and now.rework > 0 and now.restart > 0
    assert now.efficiency == pytest.approx(1 / (1 + now.io + now.rework + now.restart))
    for name, value in (("mtbf_s", mtbf_s / factor), ("restart_s", 0.9 * mtbf_s * factor)):
        worse = Failing(**{**_fields(failing), name: value})
        if name == "restart_s" and value <= failing.restart_s:
            continue
        assert lost(interval_s, worse).total > now.total
    later = Failing(**{**_fields(failing), "latency_s": 0.1 * mtbf_s * factor})
    assert lost(interval_s, later).rework > now.rework


def _fields(failing: Failing) -> dict[str, float]:
    return {name: getattr(failing, name) for name in ("mtbf_s", "stall_s", "restart_s", "latency_s")}


@given(mtbfs, st.floats(1e-5, 0.5), st.floats(1e-4, 0.3))
def test_the_snapped_interval_is_the_better_of_its_neighbours(
    mtbf_s: float, part: float, step: float
) -> None:
    failing = Failing(mtbf_s=mtbf_s, stall_s=part * mtbf_s, restart_s=1.0)
    step_s = step * mtbf_s
    wanted = exact_s(failing.stall_s, mtbf_s)
    steps = snapped_steps(wanted, step_s, failing)
    assert steps >= 1
    assert abs(steps - wanted / step_s) <= 1
    at = lost(steps * step_s, failing).total
    for other in (max(1, steps - 1), steps + 1):
        assert at <= lost(other * step_s, failing).total * (1 + 1e-9)
    held = snapped_steps(wanted, step_s, failing, least_s=10 * wanted)
    assert held * step_s >= 10 * wanted * (1 - 1e-9)


def test_the_best_interval_of_a_slow_write_is_the_write() -> None:
    failing = Failing(mtbf_s=43.945, stall_s=0.1, restart_s=5.0, latency_s=5.0)
    assert best(failing) == lost(5.0, failing).total > lost(exact_s(0.1, 43.945), failing).total


def test_a_hopeless_cluster_has_an_infinite_cost() -> None:
    failing = Failing(mtbf_s=1.0, stall_s=5_000.0, restart_s=1.0)
    assert lost(1.0, failing).total == math.inf
    assert lost(1.0, failing).efficiency == 0.0


LEVELS = [
    Level(name="memory", stall_s=0.2, share=0.80, restart_s=2.0),
    Level(name="disk", stall_s=3.0, share=0.15, restart_s=20.0),
    Level(name="store", stall_s=40.0, share=0.05, restart_s=180.0),
]


def test_levels_are_nested_near_their_own_optima() -> None:
    mtbf_s, step_s = 70_312.5, 5.0
    intervals = nested(LEVELS, mtbf_s, step_s)
    assert intervals.base_s % step_s == 0 and intervals.every[0] == 1
    for number, level in enumerate(LEVELS):
        own = young_s(level.stall_s, level.mtbf_s(mtbf_s))
        assert intervals.interval_s(number) == pytest.approx(own, rel=0.5)
        if number:
            assert intervals.every[number] % intervals.every[number - 1] == 0
    found = lost_by_level(LEVELS, intervals, mtbf_s)
    assert [round(one.total, 5) for one in found] == [
        round(level.stall_s / interval + level.share / mtbf_s * (interval / 2 + level.restart_s), 5)
        for level, interval in zip(LEVELS, map(intervals.interval_s, range(3)), strict=True)
    ]
    only_last = Failing(mtbf_s=mtbf_s, stall_s=40.0, restart_s=180.0)
    assert sum(one.total for one in found) < best(only_last)
    assert intervals == NestedIntervals(base_s=intervals.base_s, every=intervals.every)
