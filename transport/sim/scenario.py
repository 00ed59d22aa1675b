"""The frame of a simulated scenario: faults by the seed, then a healed core that must converge.

After TigerBeetle's VOPR: in the **safety** phase faults strike for a span of virtual time, and checkers hold
throughout. Then a random **core** of the processes is healed for good while the rest stays as it is, dead or
cut off: in the **liveness** phase the core must reach its goal within a bound of virtual time. The seed is
printed first, and names everything. `shrink` finds the smallest run that still fails in the same way.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol, runtime_checkable

from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.sim.faults import (
    ALL_FAULTS,
    Fault,
    FaultPlan,
    draw_plan,
    format_plan,
    names_of,
    parse_plan,
    renamed,
    weaker,
)
from zbmd.transport.sim.model import STORY_RECORDS, History, Record, RunEnd, SimulationFailure

# ---- shrinking

RUNS_MAX = 200
"""Most repetitions of a failing run."""


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


RANKS_MAX = 1024
LENGTH_MAX = 1_000_000
EVENTS_MAX = 2_000_000
"""The events that either phase may take."""
STORY_LINES = 40
DIGITS_MAX = 9
"""Of the number of faults to draw."""


class SimulatedWorld(Protocol):
    """A world as the frame sees it: `Simulation` and `World` are such."""

    seed: int | str

    @property
    def supported(self) -> frozenset[type[Fault]]:
        """The faults that may strike it."""
        ...

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        ...

    @property
    def events(self) -> int:
        """Events so far."""
        ...

    @property
    def history(self) -> History:
        """The history so far."""
        ...

    def add_checker(self, name: str, check: Callable[[], None], *, stride: int = 1) -> None:
        """Call `check()` after every `stride`-th event."""
        ...

    def apply(self, fault: Fault) -> None:
        """Have the fault strike at its time."""
        ...

    def heal(self, core: frozenset[str], *, revive: bool) -> None:
        """End all faults among `core`, for good."""
        ...

    def run(
        self,
        *,
        until: Callable[[], bool] | None = None,
        for_ns: int | None = None,
        max_events: int = EVENTS_MAX,
    ) -> RunEnd:
        """Run it."""
        ...

    def digest(self) -> str:
        """Of the history so far."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Checker(Protocol):
    """Something that must hold at all times. Small, with a state of its own if it needs one."""

    @property
    def name(self) -> str:
        """Its name in a failure."""
        ...

    @property
    def stride(self) -> int:
        """It is asked after every so many events."""
        ...

    def check(self) -> None:
        """Raise `AssertionError` if it does not hold."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The size of a run. What `length` counts is the scenario's: steps, messages, rounds."""

    ranks: int = 4
    faults: int = 8
    length: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= RANKS_MAX or not 1 <= self.length <= LENGTH_MAX or self.faults < 0:
            raise UserError(f"give 1..{RANKS_MAX} ranks, 0 faults or more and a length of 1..{LENGTH_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioStage:
    """A scenario, built and ready to run."""

    world: SimulatedWorld
    victims: tuple[str, ...]
    """The processes that faults may strike, and of which the core is drawn."""
    converged: Callable[[frozenset[str]], bool]
    """Whether the healed core has done what it must; the processes that are no victims are well too."""
    span_ns: int
    """Span of virtual time in which faults strike."""
    liveness_ns: int
    """Virtual time within which the core must reach its goal."""
    checkers: tuple[Checker, ...] = ()
    core_min: int | None = None
    """The fewest victims that can make progress alone; None: all are needed."""
    restarts_itself: bool = False
    """The scenario brings the dead back (as a supervisor does): a crash is only that, and healing revives
    nobody."""


class Scenario(Protocol):
    """One way to try the system: makes a world of either kind, given a seed."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def description(self) -> str:
        """One line."""
        ...

    @property
    def kinds(self) -> tuple[type[Fault], ...]:
        """The faults that it is meant to stand."""
        ...

    def build(self, seed: int | str, options: Options) -> ScenarioStage:
        """The world at its start, no fault yet planned. Everything random comes from `seed`."""
        ...


class RunOutcome(Enum):
    """The outcome of a run: a `FailureKind`, or none."""

    OK = "ok"
    CRASH = "crash"
    SAFETY = "safety"
    LIVENESS = "liveness"

    @property
    def exit_code(self) -> int:
        """For a command: 0, and apart from 1 (it broke itself) and 2 (bad input) one for each failure."""
        return {RunOutcome.OK: 0, RunOutcome.CRASH: 10, RunOutcome.SAFETY: 11, RunOutcome.LIVENESS: 12}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioReport:
    """The result of a run, and how to repeat it."""

    scenario: str
    seed: int | str
    options: Options
    plan: FaultPlan
    outcome: RunOutcome
    reason: str
    digest: str
    events: int
    virtual_ns: int
    core: frozenset[str]
    story: tuple[Record, ...]

    @property
    def command(self) -> str:
        """The command line that repeats the run, faults and all."""
        return (
            f"zbmd sim run {shlex.quote(self.scenario)} --seed {shlex.quote(str(self.seed))} "
            f"--ranks {self.options.ranks} --length {self.options.length} "
            f"--faults {shlex.quote(format_plan(self.plan) or '0')}"
        )

    def __str__(self) -> str:
        lines = [f"{self.scenario} seed {self.seed}: {self.outcome.value}: {self.reason}"]
        lines += [f"    {record}" for record in self.story]
        return "\n".join([*lines, f"again: {self.command}"])


def parse_faults(text: str) -> int | FaultPlan:
    """The value of `--faults`: how many to draw, or a plan. Raises `UserError`."""
    digits = text.strip()
    return int(digits) if digits.isdecimal() and len(digits) <= DIGITS_MAX else parse_plan(text)


def plan_of(scenario: Scenario, stage: ScenarioStage, seed: int | str, options: Options) -> FaultPlan:
    """The faults that the seed draws for a stage."""
    kinds = [kind for kind in ALL_FAULTS if kind in scenario.kinds and kind in stage.world.supported]
    rng = random.Random(f"{seed}/plan")
    restart = not stage.restarts_itself
    return draw_plan(rng, stage.victims, stage.span_ns, kinds, options.faults, restart=restart)


def run_scenario(
    scenario: Scenario,
    seed: int | str,
    options: Options,
    plan: FaultPlan | None = None,
    *,
    tell: Callable[[str], None] | None = print,
    digested: bool = True,
) -> ScenarioReport:
    """Run one seed through both phases. `plan`: default what the seed draws. `tell` gets the seed first.

    Without `digested` no more of the history is kept than a failure tells, and its digest is empty: the run
    is the same, and takes less time and memory.

    Failures of the simulated are in the report; errors of the scenario's own, such as a plan that names
    nobody, are raised.
    """
    if tell is not None:
        tell(f"{scenario.name}: seed {seed}, {options.ranks} ranks, length {options.length}")
    stage = scenario.build(seed, options)
    world = stage.world
    if not digested:
        world.history.keep_last(STORY_RECORDS)
    try:
        if plan is None:
            plan = plan_of(scenario, stage, seed, options)
        for fault in plan:
            world.apply(fault)
        for checker in stage.checkers:
            world.add_checker(checker.name, checker.check, stride=checker.stride)
        core = draw_core(random.Random(f"{seed}/core"), stage)
        outcome, reason, story = _play(stage, core)
        return ScenarioReport(
            scenario=scenario.name,
            seed=seed,
            options=options,
            plan=plan,
            outcome=outcome,
            reason=reason,
            digest=world.digest() if digested else "",
            events=world.events,
            virtual_ns=world.now_ns,
            core=core,
            story=story,
        )
    finally:
        world.close()


def draw_core(rng: random.Random, stage: ScenarioStage) -> frozenset[str]:
    """A core that can make progress: all the victims, or a random part of at least `core_min`."""
    if stage.core_min is None:
        return frozenset(stage.victims)
    if not 0 < stage.core_min <= len(stage.victims):
        raise LocalProtocolError(f"a core of {stage.core_min} of {len(stage.victims)} victims")
    return frozenset(rng.sample(stage.victims, rng.randint(stage.core_min, len(stage.victims))))


def _play(stage: ScenarioStage, core: frozenset[str]) -> tuple[RunOutcome, str, tuple[Record, ...]]:
    world = stage.world
    try:
        world.run(for_ns=stage.span_ns, max_events=EVENTS_MAX)
        world.heal(core, revive=not stage.restarts_itself)
        end = world.run(until=lambda: stage.converged(core), for_ns=stage.liveness_ns, max_events=EVENTS_MAX)
    except SimulationFailure as failure:
        return RunOutcome(failure.kind.value), failure.what, failure.story
    if end is RunEnd.REACHED:
        return RunOutcome.OK, "the core converged", ()
    what = f"{_names(core)} were healed and did not converge in {stage.liveness_ns / 1e9:g} s: {end.value}"
    return RunOutcome.LIVENESS, what, ()


def _names(core: Iterable[str]) -> str:
    return ", ".join(sorted(core))
