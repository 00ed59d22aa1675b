"""The scenarios of resilient loops: what they run into, that the machine stands it, and what they find."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.scenarios.hosted_job import JobOptions, draw_kills, names_of
from zbmd.training.scenarios.left_loop import LeftScenario
from zbmd.training.scenarios.loop import LoopRank, LoopScenario, NumberedShares
from zbmd.training.scenarios.sharded_loop import HybridScenario, ShardScenario
from zbmd.training.torch import transaction as tx
from zbmd.transport.sim import Options, RunOutcome, SimulationFailure, run_scenario

WAYS = ("commits", "promotes", "repeats", "takes", "shrinks", "grows")
SCENARIOS = (LoopScenario(), ShardScenario(), HybridScenario(), LeftScenario())
SEEDS_MAX, EVENTS_MAX = 600, 20_000


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


def run(scenario: LoopScenario, seed: int, job: JobOptions) -> set[str]:
    """Run a loop to its end, under the kills that its seed draws; return what has happened in it."""
    rng, names = random.Random(f"{seed}/kills"), names_of(job.world_size)
    sound = type(scenario)()
    kills = draw_kills(rng, names, job.kills, lambda: sound.rehearsed(seed, job))
    simulation, world = scenario.made(seed, job)
    for fault in kills:
        simulation.apply(fault)
    simulation.run(max_events=EVENTS_MAX)
    assert scenario.is_over(simulation, world), f"{job} with seed {seed} has not ended: {world}"
    return world.ways


def drawn(seed: int) -> JobOptions:
    """Return a small job, with some kills, from whose seeds few are needed to see everything."""
    if seed % 5 == 0:
        return JobOptions(world_size=2, steps=2, kills=6)  # who may lose the state with both
    size, shrink, late = 3 + seed % 3, seed % 4 > 0, seed % 4 > 2
    return JobOptions(world_size=size, steps=8 if late else 3, kills=2, shrink=shrink, late=late)


def drawn_to_replace(seed: int) -> JobOptions:
    return JobOptions(world_size=2 + seed % 4, steps=4, kills=1 + seed % 4)


@pytest.mark.parametrize(
    ("scenario", "draw", "wanted"),
    [
        (LoopScenario(), drawn, (*WAYS, "is lost", "ends without votes")),
        (ShardScenario(), drawn, (*WAYS, "is lost", "waits", "divides")),
        (LeftScenario(), drawn_to_replace, (*WAYS[:4], "comes from memory", "has no memory", "is lost")),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_the_runs_are_of_all_kinds(
    scenario: LoopScenario, draw: Callable[[int], JobOptions], wanted: Sequence[str]
) -> None:
    """Everything that the scenario provides for happens in some of its runs."""
    ways = Counter[str]()
    for seed in range(SEEDS_MAX):
        ways.update(run(scenario, seed, draw(seed)))
        if set(wanted) <= ways.keys():
            return
    raise AssertionError(f"nothing of {set(wanted) - ways.keys()} in {ways}")


class PromotesUnshared(tx.Transactions):
    """A planted bug: a rank that is ahead of others goes on with them as they are."""

    def _go_on(self) -> list[tx.Action]:
        if self.version < self._target and not self.fresh and not self.sharded:
            self.version = self._target  # and never makes the update
        return super()._go_on()


class DividesAtOnce(tx.Transactions):
    """A planted bug: a part is adopted as soon as it is there, whether or not others have theirs."""

    def handle(self, event: tx.Event, *, now_ns: int) -> list[tx.Action]:
        actions = super().handle(event, now_ns=now_ns)
        return [*self.handle(tx.Agreed(), now_ns=now_ns)] if isinstance(event, tx.Divided) else actions


class KeepsAtOnce(tx.Transactions):
    """A planted bug: a rank takes its copy for there as it begins."""

    def _go_on(self) -> list[tx.Action]:
        actions = super()._go_on()
        self.keeps = self.sharded and not self.fresh
        return actions


class ForgetsWhatWasDivided(tx.Transactions):
    """A planted bug: who has not seen all agree never adopts, although another has."""

    def _met(self, event: tx.Met) -> list[tx.Action]:
        self.ready = None
        return super()._met(event)


class VotesBeforeItLeaves(tx.Transactions):
    """A planted bug: a rank votes before its gradients are in memory that outlives it."""

    def _prepared(self, event: tx.Prepared) -> list[tx.Action]:
        return self._vote(event) if self.leaves else super()._prepared(event)


class NeedsNoBuddy(tx.Transactions):
    """A planted bug: a rank takes memory for there, in whatever way others have none."""

    def _go_on(self) -> list[tx.Action]:
        self.leaves, self.keeps = True, False
        return super()._go_on()


class EndsAVoter(tx.Transactions):
    """A planted bug: a rank that has voted is ended when others have seen all votes, and finished."""

    def _ended(self, event: tx.Ended) -> list[tx.Action]:
        return self._fail(event.reason)


class ForgetsItsLastUpdate(tx.Transactions):
    """A planted bug: such a rank ends as it is, without what the others have committed."""

    def _ended(self, event: tx.Ended) -> list[tx.Action]:
        self.version -= 1
        return super()._ended(event)


class ComputesItsOwnShare(NumberedShares):
    """A planted bug: a rank goes on with the shares of a batch that it had with the first ranks."""

    def own(self, rank: int) -> tuple[int, ...]:
        return (rank,)


def planted(scenario: LoopScenario, bug: type[tx.Transactions] | type[NumberedShares]) -> LoopScenario:
    """Return the scenario over a bug."""
    rank: type[LoopRank] = type(scenario).rank
    part = "machine_type" if issubclass(bug, tx.Transactions) else "shares_type"
    found = type(scenario)()
    object.__setattr__(found, "rank", type("Planted", (rank,), {part: bug}))
    return found


@pytest.mark.parametrize(
    ("scenario", "bug", "first"),
    [
        (LoopScenario(), PromotesUnshared, 0),
        (LoopScenario(), EndsAVoter, 0),
        (LoopScenario(), ForgetsItsLastUpdate, 0),
        (LoopScenario(), ComputesItsOwnShare, 0),
        (LeftScenario(), VotesBeforeItLeaves, 0),
        (LeftScenario(), NeedsNoBuddy, 0),
        (ShardScenario(), EndsAVoter, 0),
        (ShardScenario(), ComputesItsOwnShare, 0),
        (ShardScenario(), DividesAtOnce, 48),
        (ShardScenario(), KeepsAtOnce, 0),
        (ShardScenario(), ForgetsWhatWasDivided, 48),
    ],
    ids=lambda each: getattr(each, "name", "") or getattr(each, "__name__", ""),
)
def test_a_planted_bug_is_found(scenario: LoopScenario, bug: type[tx.Transactions], first: int) -> None:
    """By one of some seeds: of `first` and those after it few are needed."""
    broken, job = planted(scenario, bug), JobOptions(world_size=5, steps=2, kills=3, shrink=True)
    for seed in range(first, first + SEEDS_MAX):
        try:
            run(broken, seed, job)
        except SimulationFailure:
            return
    raise AssertionError(f"{SEEDS_MAX} runs over {bug.__name__} have found nothing")
