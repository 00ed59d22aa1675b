"""One recovery budget, and what is derived from it: in order, within the budget, and told with reasons."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zbmd.transport.clock import deadlines as budget
from zbmd.transport.clock.deadlines import (
    DeadlineKind,
    Deadlines,
    derive,
    format_duration,
    parse_duration,
    parse_recovery_budget,
)
from zbmd.transport.errors import UserError

BUDGETS_NS = st.integers(budget.RECOVERY_BUDGET_NS_MIN, budget.RECOVERY_BUDGET_NS_MAX)
MS = 1_000_000


@given(BUDGETS_NS)
@example(budget.RECOVERY_BUDGET_NS_MIN)
@example(budget.RECOVERY_BUDGET_NS_MAX)
def test_every_budget_gives_deadlines_in_order_and_within_it(recovery_budget_ns: int) -> None:
    deadlines = derive(recovery_budget_ns)
    deadlines.check_invariants()
    assert deadlines.notice_ns < deadlines.confirmation_ns < deadlines.suspicion_ns
    assert deadlines.suspicion_ns < deadlines.tcp_user_timeout_ms * MS
    assert max(deadlines.same_host_path_ns, deadlines.across_hosts_path_ns) <= recovery_budget_ns
    shares_ns = sum(each.value_ns for each in deadlines.explain() if each.kind is DeadlineKind.SHARE)
    found_ns = deadlines.notice_ns + deadlines.confirmation_ns + deadlines.suspicion_ns
    repair_ns = deadlines.same_host_path_ns - deadlines.notice_ns - deadlines.confirmation_ns
    assert shares_ns == found_ns + repair_ns, "every share is part of a path"


@given(BUDGETS_NS, BUDGETS_NS)
def test_a_longer_budget_shortens_no_deadline(a_ns: int, b_ns: int) -> None:
    short, long = derive(min(a_ns, b_ns)), derive(max(a_ns, b_ns))
    for less, more in zip(short.explain(), long.explain(), strict=True):
        assert less.value_ns <= more.value_ns, less.name


@given(BUDGETS_NS)
def test_the_kernel_takes_the_values_for_tcp(recovery_budget_ns: int) -> None:
    deadlines = derive(recovery_budget_ns)
    assert 1 <= deadlines.tcp_keepalive_idle_s <= 32767
    assert 1 <= deadlines.tcp_keepalive_interval_s <= 32767
    assert 1 <= deadlines.tcp_keepalive_count <= 127
    assert 0 < deadlines.tcp_user_timeout_ms < 2**31


def test_the_default_is_a_second_and_what_follows_from_it() -> None:
    deadlines = derive()
    assert deadlines.recovery_budget_ns == 1000 * MS
    assert (deadlines.notice_ns, deadlines.confirmation_ns) == (20 * MS, 250 * MS)
    assert (deadlines.heartbeat_ns, deadlines.suspicion_ns) == (50 * MS, 400 * MS)
    assert (deadlines.hello_ns, deadlines.dial_ns, deadlines.view_ns) == (5000 * MS, 6000 * MS, 10_000 * MS)
    assert (deadlines.stop_grace_ns, deadlines.stop_kill_ns) == (1000 * MS, 500 * MS)
    assert (deadlines.same_host_path_ns, deadlines.across_hosts_path_ns) == (820 * MS, 950 * MS)


def test_every_field_is_explained() -> None:
    names = [field.name for field in dataclasses.fields(Deadlines) if field.name != "recovery_budget_ns"]
    explained = derive().explain()
    assert [name.rpartition("_")[0] for name in names] == [each.name for each in explained]
    assert len({each.name for each in explained}) == len(explained)
    for each in explained:
        assert len(each.reason) > 10
        assert "budget" in each.rule


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"confirmation_ns": 10 * MS}, "not in order"),
        ({"suspicion_ns": 900 * MS}, "of 1000000000 ns"),
        ({"tcp_user_timeout_ms": 300}, "not in order"),
        ({"heartbeat_ns": 200 * MS}, "lost heartbeats"),
        ({"dial_ns": 4000 * MS}, "not in order"),
        ({"flush_ns": 2000 * MS}, "not in order"),
        ({"resume_ns": 0}, "not positive"),
        ({"resume_ns": 400 * MS}, "of 1000000000 ns"),
        ({"tcp_keepalive_idle_s": 40_000}, "kernel's limits"),
    ],
)
def test_what_contradicts_is_found(changed: dict[str, int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        dataclasses.replace(derive(), **changed).check_invariants()


@pytest.mark.parametrize("text", ["99ms", "1ns", "601s", "24h", "99.9999ms"])
def test_a_budget_out_of_range_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(UserError, match=r"out of range\. Give 100ms to 10min"):
        parse_recovery_budget(text)


@pytest.mark.parametrize("text", ["", "1", "soon", "-1s", "0s", "1e3s", "8760h"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="duration"):
        parse_recovery_budget(text)


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [(1, "1ns"), (1500, "1.5us"), (250 * MS, "250ms"), (1000 * MS, "1s"), (90_000 * MS, "1.5min")],
)
def test_durations_are_written_as_they_are_read(duration_ns: int, text: str) -> None:
    assert format_duration(duration_ns) == text
    assert round(parse_duration(text) * 1e9) == duration_ns


@given(st.integers(1, 7 * 24 * 3600 * 10**9))
def test_a_duration_reads_back_to_four_digits(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == pytest.approx(duration_ns / 1e9, rel=1e-3)


@given(BUDGETS_NS)
def test_a_budget_in_nanoseconds_reads_back_exactly(recovery_budget_ns: int) -> None:
    assert parse_recovery_budget(f"{recovery_budget_ns}ns") == recovery_budget_ns
