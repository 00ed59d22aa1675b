"""The pace of checkpoints converges on the optimum of simulated failures, and keeps its bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.tools.plan.simulation import Failures, Setup, best_interval, one_level, simulate
from zbmd.training.checkpoint.intervals import Failing, exact_s, lost
from zbmd.training.checkpoint.pace import (
    AUTO,
    CHANGE,
    FIRST_STEPS,
    LONGEST_S,
    PRIOR_MTBF_S,
    SHORTEST_S,
    Begun,
    CheckpointPace,
    Dropped,
    Note,
    Pace,
    Stepped,
    WorkLost,
    Written,
    mtbf_s,
    parse_every,
)
from zbmd.transport.errors import LocalProtocolError, UserError


def write(machine: CheckpointPace, step: int, stall_s: float | None, latency_s: float = 0.0) -> list[Note]:
    machine.handle(Begun(step))
    return machine.handle(Written(step, stall_s, latency_s))


def run_with_failures(
    machine: CheckpointPace, *, failing: Failing, step_s: float, failures: int, rng: np.random.Generator
) -> None:
    """A job of exponential failures, each of which throws it back to its last checkpoint."""
    step = saved = 0
    for uptime_s in rng.exponential(failing.mtbf_s, failures):
        clock = failing.restart_s
        while True:
            clock += step_s
            if clock > uptime_s:
                break
            step += 1
            machine.handle(Stepped(step_s))
            if machine.is_due(step):
                machine.handle(Begun(step))
                clock += failing.stall_s
                if clock > uptime_s:
                    break
                machine.handle(Written(step, failing.stall_s, failing.latency_s))
                machine.check_invariants()
                saved = step
        machine.handle(Dropped())
        known, step = machine.pace, saved
        machine.__init__(hosts=1, step=saved, known=known)  # type: ignore[misc] -- as a run that is resumed
        machine.handle(WorkLost())


@pytest.mark.parametrize(
    ("mtbf_s", "stall_s", "step_s"), [(20_000.0, 60.0, 50.0), (36_000.0, 9.0, 97.0), (14_400.0, 400.0, 60.0)]
)
def test_it_converges_on_the_optimum_of_simulated_exponential_failures(
    mtbf_s: float, stall_s: float, step_s: float
) -> None:
    """Also where the stall is not small beside the MTBF, and Young's interval would be too long."""
    failing = Failing(mtbf_s=mtbf_s, stall_s=stall_s, restart_s=5.0)
    machine, rng = CheckpointPace(hosts=1), np.random.default_rng(3)
    run_with_failures(machine, failing=failing, step_s=step_s, failures=1_000, rng=rng)
    chosen_s, setup = machine.pace.checkpoint_every * step_s, Setup(work_mtbfs=60.0, trials=200, seed=5)
    failures = Failures(mtbf_s=mtbf_s)
    best = best_interval(exact_s(stall_s, mtbf_s), failing, failures, setup)
    assert chosen_s == pytest.approx(best.interval_s, rel=0.2)
    assert simulate(chosen_s, one_level(failing), failures, setup).lost <= 1.02 * best.lost
    assert machine.pace.mtbf_s == pytest.approx(mtbf_s, rel=0.2)


@given(
    stall_s=st.floats(0.0, 1e4),
    latency_s=st.floats(0.0, 1e4),
    step_s=st.floats(1e-4, 1e3),
    failures=st.integers(0, 50),
    hosts=st.integers(1, 10_000),
)
def test_an_interval_is_whole_steps_within_its_bounds(
    stall_s: float, latency_s: float, step_s: float, failures: int, hosts: int
) -> None:
    machine, latency_s = CheckpointPace(hosts=hosts), max(stall_s, latency_s)
    for step in range(1, 13):
        machine.handle(Stepped(step_s))
        if machine.is_due(step):
            write(machine, step, stall_s, latency_s)
        machine.check_invariants()
    for _ in range(failures):
        machine.handle(WorkLost())
    every, slack = machine.pace.checkpoint_every, 1.0 + 2 * CHANGE
    assert isinstance(every, int) and every >= 1
    interval_s = every * step_s
    if every > 1 and every != FIRST_STEPS:
        assert interval_s <= (max(LONGEST_S, latency_s, SHORTEST_S) + step_s) * slack
    assert interval_s * slack >= min(latency_s, LONGEST_S) - step_s


@given(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=1, max_size=30))
def test_the_same_events_make_the_same_decisions(stalls: list[float]) -> None:
    """A rank that replays another's records decides as that would have."""
    machines, step = (CheckpointPace(hosts=4), CheckpointPace(hosts=4)), 0
    for stall_s in stalls:
        step += machines[0].pace.checkpoint_every
        found = []
        for machine in machines:
            machine.handle(Stepped(2.0))
            found.append([note.pace for note in write(machine, step, stall_s, stall_s)])
        assert found[0] == found[1] and machines[0].is_due(step + 7) == machines[1].is_due(step + 7)


def test_the_prior_is_outweighed_by_the_first_failure() -> None:
    assert mtbf_s(0, 0.0, 1) == pytest.approx(PRIOR_MTBF_S)
    assert mtbf_s(0, 0.0, 30) == pytest.approx(PRIOR_MTBF_S / 30)
    assert mtbf_s(1, 3_600.0, 1) < 0.1 * PRIOR_MTBF_S
    assert mtbf_s(44, 3_600.0, 1) < 7_200.0, "44 restarts in an hour"
    assert mtbf_s(0, 90 * 86_400.0, 1) > 10 * PRIOR_MTBF_S, "three months without a failure"


def test_more_failures_shorten_the_interval_and_longer_stalls_lengthen_it() -> None:
    machine = CheckpointPace(hosts=8)
    machine.handle(Stepped(1.0))
    (first,) = write(machine, 10, 1.0, 2.0)
    assert first.changed and first.pace.checkpoint_every > 10 * FIRST_STEPS
    (lossy,) = machine.handle(WorkLost())
    assert lossy.changed and lossy.pace.checkpoint_every < first.pace.checkpoint_every / 2
    for step in range(1_000, 30_000, 1_000):
        write(machine, step, 100.0, 100.0)
    assert machine.pace.checkpoint_every > 3 * lossy.pace.checkpoint_every


def test_an_interval_is_kept_while_the_optimum_is_near_it() -> None:
    machine, step = CheckpointPace(hosts=8), 0
    machine.handle(Stepped(1.0))
    write(machine, 10, 1.0)
    kept = machine.pace.checkpoint_every
    for number in range(50):
        machine.handle(Stepped(1.0))
        step = 1_000 * (number + 1)
        (note,) = write(machine, step, 1.0 if number % 2 else 1.1)
        assert not note.changed and note.pace.checkpoint_every == kept
    failing = Failing(mtbf_s=machine.pace.mtbf_s, stall_s=1.05, restart_s=0.0)
    assert lost(kept, failing).total < 1.01 * lost(exact_s(1.05, failing.mtbf_s), failing).total


def test_a_checkpoint_that_a_loss_has_dropped_is_due_again() -> None:
    machine = CheckpointPace(hosts=1)
    assert not machine.is_due(FIRST_STEPS - 1) and machine.is_due(FIRST_STEPS)
    machine.handle(Begun(FIRST_STEPS))
    assert not machine.is_due(FIRST_STEPS + 1), "it is being written"
    machine.handle(Dropped())
    assert machine.is_due(FIRST_STEPS + 1)
    with pytest.raises(LocalProtocolError, match="step 11 has ended, None was begun"):
        machine.handle(Written(11, 1.0, 1.0))
    assert write(machine, 12, None, 9.0) == [], "a checkpoint that a step waited for measures no stall"
    assert machine.pace.stall_s == 0.0 and not machine.is_due(12 + FIRST_STEPS - 1)


def test_a_run_that_is_resumed_goes_on_with_its_pace() -> None:
    known = Pace(
        checkpoint_every=70, stall_s=1.0, latency_s=2.0, step_s=0.5, mtbf_s=1e5, failures=3.0, run_s=900.0
    )
    machine = CheckpointPace(hosts=2, step=140, known=known)
    assert not machine.is_due(209) and machine.is_due(210)
    assert machine.pace.failures == 3.0 and math.isclose(machine.pace.step_s, 0.5)


def test_what_is_no_interval_is_refused() -> None:
    assert parse_every(AUTO) == AUTO and parse_every("0") == 0
    with pytest.raises(UserError, match="expected auto or a number of steps, got 'often'"):
        parse_every("often")
