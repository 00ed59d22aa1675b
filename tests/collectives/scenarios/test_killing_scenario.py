"""Kills between two effects as faults of a plan, and the commit scenario on the simulator's frame."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.scenarios.commit import CommitScenario, build
from zbmd.collectives.scenarios.commit_world import CommitOptions, draw_kills, names_of
from zbmd.transport.sim import (
    Crash,
    Fault,
    HistoryKind,
    Options,
    RunOutcome,
    ScenarioReport,
    format_plan,
    parse_plan,
    run_scenario,
)

OPTIONS = CommitOptions(world_size=2, steps=1, kills=0)


def test_every_kill_point_is_a_fault() -> None:
    calm, _ = build(3, OPTIONS)
    calm.run()
    names = names_of(2)
    points = [point for point in calm.kill_points() if point.process in names]
    faults = calm.kill_faults(names)
    assert len(points) == len(faults) > 30
    for point, fault in zip(points, faults, strict=True):
        by_point, _ = build(3, OPTIONS)
        by_point.crash_during(point)
        by_point.run()
        by_plan, _ = build(3, OPTIONS)
        for read in parse_plan(format_plan((fault,))):
            by_plan.apply(read)
        by_plan.run()
        assert without_faults(by_plan.history) == without_faults(by_point.history), point


def without_faults(history: object) -> list[str]:
    return [str(record) for record in history if record.kind is not HistoryKind.FAULT]  # type: ignore[attr-defined]


def test_a_healed_world_kills_nobody() -> None:
    simulation, world = build(3, OPTIONS)
    for at_ns in range(10**6, 10**8, 10**6):
        simulation.apply(Crash(process="rank0", at_ns=at_ns, for_ns=0))
    simulation.heal(frozenset(names_of(2)), revive=False)
    simulation.run()
    assert world.finished == {0, 1}
    assert not any(record.kind is HistoryKind.CRASH for record in simulation.history)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 9))
@settings(max_examples=15)
def test_a_plan_is_drawn_by_its_seed_alone(seed: int, count: int) -> None:
    def draw() -> tuple[Fault, ...]:
        rng = random.Random(seed)
        return draw_kills(rng, names_of(2), count, lambda: build(seed, OPTIONS)[0])

    plan = draw()
    assert plan == draw()
    assert len(plan) == count
    assert [fault.at_ns for fault in plan] == sorted(fault.at_ns for fault in plan)


def test_a_second_kill_falls_into_the_recovery_from_the_first() -> None:
    again = 0
    for seed in range(40):
        plan = CommitScenario().draw_plan(seed, Options(ranks=2, length=1, faults=2))
        simulation, _ = build(seed, CommitScenario().options_of(seed, Options(ranks=2, length=1, faults=2)))
        for fault in plan:
            simulation.apply(fault)
        simulation.run()
        crashes = [record for record in simulation.history if record.kind is HistoryKind.CRASH]
        again += len(crashes) == 2 and max(crash.incarnation for crash in crashes) == 2
    assert again >= 3


def run(seed: int, options: Options) -> ScenarioReport:
    scenario = CommitScenario()
    return run_scenario(scenario, seed, options, scenario.draw_plan(seed, options), tell=None)


@given(
    seed=st.integers(0, 2**32), ranks=st.integers(1, 5), length=st.integers(1, 4), faults=st.integers(0, 4)
)
@settings(max_examples=25)
def test_the_job_stands_what_it_is_meant_to(seed: int, ranks: int, length: int, faults: int) -> None:
    report = run(seed, Options(ranks=ranks, length=length, faults=faults))
    assert report.outcome is RunOutcome.OK, report


def test_the_runs_are_of_all_kinds() -> None:
    """Replaced and shrunk groups, lost states, noticed corruption: none of them is only imagined."""
    shrunk = lost = noticed = finished = 0
    for seed in range(400):
        options = Options(ranks=2, length=3, faults=3)
        job = CommitScenario().options_of(seed, options)
        simulation, world = build(seed, job)
        for fault in CommitScenario().draw_plan(seed, options):
            simulation.apply(fault)
        simulation.run()
        shrunk += job.shrink
        lost += world.state_lost
        noticed += world.corruption_noticed
        finished += world.finished == {0, 1}
        assert not world.corruption_noticed or job.corrupting
    assert min(shrunk, lost, noticed, finished) > 3, (shrunk, lost, noticed, finished)
