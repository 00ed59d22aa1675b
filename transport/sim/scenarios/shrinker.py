"""Shrinking: the smallest run that still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim.faults import FaultPlan, names_of, renamed, weaker
from zbmd.transport.sim.scenarios.scenario import Options, RunOutcome, Scenario, ScenarioReport, run_scenario

RUNS_MAX = 200
"""How often a failing run is repeated at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The smallest failing run found, and what it took."""

    report: ScenarioReport
    runs: int
    exhausted: bool
    """Whether the bound on runs ended the search."""


def shrink(
    scenario: Scenario,
    failed: ScenarioReport,
    *,
    runs_max: int = RUNS_MAX,
    rerun: Callable[[Options, FaultPlan], ScenarioReport] | None = None,
) -> Shrunk:
    """Find a smaller run that fails with the same outcome: fewer faults and ranks, shorter, milder.

    Greedy: each candidate that still fails becomes the run to shrink, until none of its neighbours does.
    Faults go by delta debugging (Zeller & Hildebrandt, "Simplifying and isolating failure-inducing input",
    2002): halves first, then ever smaller parts. `rerun`: default a simulation of the same seed. Raises
    `LocalProtocolError` if `failed` did not fail.
    """
    if failed.outcome is RunOutcome.OK:
        raise LocalProtocolError(f"seed {failed.seed} did not fail: there is nothing to shrink")

    def simulate(options: Options, plan: FaultPlan) -> ScenarioReport:
        return run_scenario(scenario, failed.seed, options, plan, tell=None)

    again = simulate if rerun is None else rerun
    best, runs = failed, 0
    tried = {(failed.options, failed.plan)}
    while True:
        for options, plan in candidates(best.options, best.plan):
            if (options, plan) in tried or not admitted(scenario, failed.seed, options, plan):
                continue
            if runs >= runs_max:
                return Shrunk(report=best, runs=runs, exhausted=True)
            tried.add((options, plan))
            runs += 1
            report = again(options, plan)
            if report.outcome is failed.outcome:
                best = report
                break
        else:
            return Shrunk(report=best, runs=runs, exhausted=False)


@runtime_checkable
class AdmitsPlans(Protocol):
    """A scenario that promises something only under some plans: others fail it for no reason of interest."""

    def admits(self, seed: int | str, options: Options, plan: FaultPlan) -> bool:
        """Whether the promise holds under such a plan."""
        ...


def admitted(scenario: Scenario, seed: int | str, options: Options, plan: FaultPlan) -> bool:
    """Whether the scenario is meant to stand this plan."""
    return not isinstance(scenario, AdmitsPlans) or scenario.admits(seed, options, plan)


def candidates(options: Options, plan: FaultPlan) -> Iterator[tuple[Options, FaultPlan]]:
    """Smaller runs, the greatest steps first. Pure: the same for the same run."""
    for fewer in _parts(plan):
        yield replace(options, faults=len(fewer)), fewer
    for ranks in _below(options.ranks, 1):
        folded = _folded(plan, ranks)
        yield replace(options, ranks=ranks, faults=len(folded)), folded
    for length in _below(options.length, 1):
        yield replace(options, length=length), plan
    for index, fault in enumerate(plan):
        for simpler in weaker(fault):
            yield options, (*plan[:index], simpler, *plan[index + 1 :])


def _parts(plan: FaultPlan) -> Iterator[FaultPlan]:
    """The plan without one of its 1, 2, 4, … equal parts."""
    size = len(plan)
    while size >= 1:
        for start in range(0, len(plan), size):
            yield plan[:start] + plan[start + size :]
        size //= 2


def _below(number: int, least: int) -> Iterator[int]:
    """From the least upwards, in halving distances to `number`."""
    distance = number - least
    while distance > 0:
        yield number - distance
        distance //= 2


def _folded(plan: FaultPlan, ranks: int) -> FaultPlan:
    """The plan for fewer ranks: what strikes one that goes strikes one that stays."""
    names = {name for fault in plan for name in names_of(fault)}
    stays = {name: _fold(name, ranks) for name in names}
    return tuple(made for fault in plan if (made := renamed(fault, stays)) is not None)


def _fold(name: str, ranks: int) -> str:
    """Names that end in no number are there whatever the number of ranks."""
    stem = name.rstrip("0123456789")
    return f"{stem}{int(name[len(stem) :]) % ranks}" if stem != name else name
