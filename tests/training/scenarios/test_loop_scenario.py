"""The scenarios of resilient loops: what they run into, and that the machine stands it."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.scenarios.loop import LoopScenario, ShardScenario
from zbmd.transport.sim import Options, RunOutcome, run_scenario

WAYS = ("commits", "promotes", "repeats", "takes", "is lost")
SCENARIOS = (LoopScenario(), ShardScenario())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@given(
    seed=st.integers(0, 2**32), ranks=st.integers(1, 5), length=st.integers(1, 4), faults=st.integers(0, 4)
)
@settings(max_examples=25)
def test_the_loop_stands_what_it_is_meant_to(
    scenario: LoopScenario, seed: int, ranks: int, length: int, faults: int
) -> None:
    options = Options(ranks=ranks, length=length, faults=faults)
    report = run_scenario(scenario, seed, options, scenario.draw_plan(seed, options), tell=None)
    assert report.outcome is RunOutcome.OK, report


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_runs_are_of_all_kinds(scenario: LoopScenario) -> None:
    """Everything that the scenario provides for happens in some of its runs."""
    ways: Counter[str] = Counter()
    for seed in range(140):
        few = Options(ranks=2, length=2, faults=6)  # who may lose the state with both
        options = few if seed % 2 == 0 else Options(ranks=3 + seed % 4 // 2, length=3, faults=3)
        simulation, world = scenario.made(seed, scenario.options_of(seed, options))
        for fault in scenario.draw_plan(seed, options):
            simulation.apply(fault)
        simulation.run(until=partial(getattr, world, "state_lost"))
        ways.update(world.ways)
    assert all(ways[way] for way in WAYS), ways
