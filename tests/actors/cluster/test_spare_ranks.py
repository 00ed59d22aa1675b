"""Spare ranks: their machine, and a simulated cluster in which they are killed at any moment."""

from __future__ import annotations

from typing import get_args

import pytest

from zbmd.actors.cluster.jobs import spare_machine as m
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.simulated.spares_scenario import SparesNode, SparesScenario
from zbmd.transport import sim
from zbmd.transport.clock.deadlines import SECOND_NS
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

JOB = 7
ONE, TWO = RankKey(JOB, 1, 2), RankKey(JOB, 2, 2)


class Pool:
    """A pool whose time is given in seconds, and what it does but for its timer."""

    def __init__(self, wanted: int = 1, *, restarts_max: int = 3) -> None:
        self.machine = m.SparePool(
            wanted,
            restarts_max=restarts_max,
            window_ns=60 * SECOND_NS,
            answer_ns=SECOND_NS,
            settle_ns=SECOND_NS,
            start_ns=30 * SECOND_NS,
            grace_ns=2 * SECOND_NS,
        )
        self.timer_ns = 0

    def put(self, event: m.Event, at_s: float) -> list[m.Action]:
        actions = self.machine.handle(event, now_ns=round(at_s * SECOND_NS))
        self.machine.check_invariants()
        self.timer_ns = next((a.at_ns for a in actions if isinstance(a, SetTimer)), self.timer_ns)
        return [action for action in actions if not isinstance(action, SetTimer)]

    def fire(self) -> list[m.Action]:
        return self.put(TimerFired(), self.timer_ns / SECOND_NS)

    def with_waiting(self) -> Pool:
        """The view is entered, and all spares have come to where they wait."""
        assert self.put(m.ViewEntered(), 1) == []
        for fork in self.fire():
            assert isinstance(fork, m.ForkSpare)
            assert self.put(m.SpareForked(number=fork.number), 2) == []
            assert self.put(m.SpareWaits(number=fork.number), 3) == []
        return self


def test_a_spare_becomes_the_lost_rank_and_another_is_started_after_the_recovery() -> None:
    pool = Pool().with_waiting()
    assert pool.put(m.RankWanted(key=ONE), 10) == [m.AssignRank(number=1, key=ONE)]
    assert pool.put(m.RankAccepted(number=1), 10.1) == [m.Proceed(number=1, key=ONE)]
    assert pool.put(m.ViewEntered(), 11) == []
    assert pool.timer_ns == 12 * SECOND_NS
    assert pool.fire() == [m.ForkSpare(number=2)]


def test_before_a_view_there_are_no_spares_and_ranks_are_forked() -> None:
    pool = Pool()
    assert pool.put(m.RankWanted(key=ONE), 0) == [m.ForkRank(key=ONE)]
    assert pool.timer_ns == 0


def test_of_two_lost_ranks_one_is_the_spare_and_one_is_forked() -> None:
    pool = Pool().with_waiting()
    assert pool.put(m.RankWanted(key=ONE), 10) == [m.AssignRank(number=1, key=ONE)]
    assert pool.put(m.RankWanted(key=TWO), 10) == [m.ForkRank(key=TWO)]


def test_a_spare_that_dies_as_it_is_assigned_costs_no_restart() -> None:
    pool = Pool(2).with_waiting()
    pool.put(m.RankWanted(key=ONE), 10)
    lost = m.NotifyLost(number=1, reason="killed", is_last=False)
    assert pool.put(m.SpareEnded(number=1, reason="killed"), 10.1) == [m.AssignRank(number=2, key=ONE), lost]
    lost = m.NotifyLost(number=2, reason="killed", is_last=False)
    assert pool.put(m.SpareEnded(number=2, reason="killed"), 10.2) == [m.ForkRank(key=ONE), lost]


def test_a_spare_that_does_not_answer_is_killed_before_the_rank_is_forked() -> None:
    pool = Pool().with_waiting()
    pool.put(m.RankWanted(key=ONE), 10)
    assert pool.timer_ns == 11 * SECOND_NS
    assert pool.fire() == [m.EndSpare(number=1, kill=True)]
    assert pool.put(m.RankAccepted(number=1), 11.1) == [], "too late: it has been killed"
    assert pool.put(m.SpareEnded(number=1, reason="killed"), 11.2)[0] == m.ForkRank(key=ONE)


def test_a_rank_that_is_lost_during_a_recovery_takes_the_next_spare_and_none_is_started_meanwhile() -> None:
    pool = Pool(2).with_waiting()
    pool.put(m.RankWanted(key=ONE), 10)
    assert pool.put(m.RankWanted(key=TWO), 10.1) == [m.AssignRank(number=2, key=TWO)]
    assert pool.put(m.RankAccepted(number=2), 10.2) == [m.Proceed(number=2, key=TWO)]
    assert pool.put(m.RankAccepted(number=1), 10.3) == [m.Proceed(number=1, key=ONE)]
    pool.put(m.ViewEntered(), 12)
    assert pool.fire() == [m.ForkSpare(number=3), m.ForkSpare(number=4)]


def test_spares_that_end_by_themselves_are_replaced_until_there_are_too_many() -> None:
    pool, lasts = Pool(restarts_max=2).with_waiting(), list[bool]()
    for number in (1, 2, 3):
        *_, lost = pool.put(m.SpareEnded(number=number, reason="exit code 1"), 10 + number)
        assert isinstance(lost, m.NotifyLost)
        lasts.append(lost.is_last)
        if not lost.is_last:
            assert pool.fire() == [m.ForkSpare(number=number + 1)]
            pool.put(m.SpareForked(number=number + 1), 10 + number)
    assert lasts == [False, False, True]
    assert pool.put(m.ViewEntered(), 20) == []
    assert pool.put(m.RankWanted(key=ONE), 21) == [m.ForkRank(key=ONE)]


def test_a_script_that_never_asks_for_a_rank_is_killed_and_counts() -> None:
    pool = Pool(restarts_max=0)
    pool.put(m.ViewEntered(), 1)
    assert pool.fire() == [m.ForkSpare(number=1)]
    pool.put(m.SpareForked(number=1), 2)
    assert pool.timer_ns == 32 * SECOND_NS
    assert pool.fire() == [m.EndSpare(number=1, kill=True)]
    lost = m.NotifyLost(number=1, reason="killed", is_last=True)
    assert pool.put(m.SpareEnded(number=1, reason="killed"), 33) == [lost]


def test_spares_end_with_their_job_and_one_that_is_assigned_answers_first() -> None:
    pool = Pool(2).with_waiting()
    pool.put(m.RankWanted(key=ONE), 10)
    assert pool.put(m.EndAsked(), 10.1) == [m.EndSpare(number=2)]
    assert pool.put(m.EndAsked(), 10.1) == []
    assert pool.put(m.SpareEnded(number=2, reason="killed"), 10.2) == []
    assert pool.put(m.RankAccepted(number=1), 10.3) == [m.Proceed(number=1, key=ONE)]
    assert pool.put(m.ViewEntered(), 11) == []
    assert not pool.machine.spares


def test_a_node_that_has_ranks_again_has_spares_again() -> None:
    pool = Pool().with_waiting()
    assert pool.put(m.EndAsked(), 10) == [m.EndSpare(number=1)]
    assert pool.put(m.SpareEnded(number=1, reason="killed"), 11) == []
    assert pool.put(m.RankWanted(key=ONE), 12) == [m.ForkRank(key=ONE)]
    assert pool.put(m.ViewEntered(), 13) == []
    assert pool.fire() == [m.ForkSpare(number=2)]


def test_an_unknown_spare_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="no spare 5"):
        Pool().put(m.SpareWaits(number=5), 0)


def run(seed: int) -> sim.ScenarioReport:
    scenario, options = SparesScenario(), sim.Options(ranks=2 + seed % 3, length=2, faults=seed % 3)
    return sim.run_scenario(scenario, seed, options, scenario.draw_plan(seed, options), tell=None)


def test_spares_are_killed_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set[type[m.Action]]()

    def noting(node: SparesNode, pool: m.SparePool, action: m.Action, now_ns: int) -> None:
        found.add(type(action))
        right(node, pool, action, now_ns)

    right = SparesNode._do
    monkeypatch.setattr(SparesNode, "_do", noting)
    for seed in range(6):
        assert (report := run(seed)).outcome is sim.RunOutcome.OK, report
    assert found == {*get_args(m.Action)}, "some never happens"


def test_the_simulation_finds_a_machine_that_forgets_the_rank_of_a_spare_that_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgets(pool: m.SparePool, spare: m.Spare, reason: str, now_ns: int) -> None:
        spare.key = None
        right(pool, spare, reason, now_ns)

    right = m.SparePool._ended
    monkeypatch.setattr(m.SparePool, "_ended", forgets)
    assert any(run(seed).outcome is not sim.RunOutcome.OK for seed in range(6))
