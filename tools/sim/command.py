"""`zbmd sim`: run the system in a simulated world, where one seed is one history.

`zbmd sim hunt` tries fresh seeds on all cores until time is up or one fails; then it shrinks the run that
failed and prints the command line that repeats it. Exit codes: 0 nothing found, 10 crash, 11 safety,
12 liveness, 1 the simulation itself broke, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import rich.console
import rich.progress

from zbmd.tools.cli.options import add_command, add_ranks
from zbmd.tools.sim import collectives as sim_collectives
from zbmd.tools.sim.hunt import JOBS_MAX, RUN_S_MAX, RUNS_MAX, Hunt, HuntBroken, Quarry
from zbmd.tools.sim.scenarios import SCENARIOS, plan_of, quietly, scenario_named
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.sim import (
    Fault,
    FaultPlan,
    Options,
    RunOutcome,
    Scenario,
    ScenarioReport,
    ScenarioStage,
    admitted,
    parse_faults,
    run_scenario,
    shrink,
)
from zbmd.transport.sim.scenario import RUNS_MAX as SHRINK_RUNS_MAX

SEED_BITS = 48
BROKEN = 1
INTERRUPTED = 130
MINUTES_MAX = 7 * 24 * 60
LINE_EVERY_S = 10.0
"""Interval of progress lines where there is no terminal."""
STORY_LINES = 40

EXAMPLES = """examples:
  zbmd sim hunt --minutes 10                     all scenarios, fresh seeds, all cores
  zbmd sim hunt --scenario commit --seconds 30
  zbmd sim run commit --seed 7 --ranks 3 --length 2 --faults 1 --trace
  zbmd sim run links --seed 7 --faults 'crash:process=rank1,at=5ms,for=2ms'
  zbmd sim collectives --ranks 10000             all-reduce on a modelled network of 1,250 hosts
"""

Tell = Callable[[int], None]


@runtime_checkable
class Remembers(Protocol):
    """A world that keeps its history."""

    @property
    def history(self) -> Sequence[object]:
        """Events in order; each prints as one line."""
        ...


class Watched(Scenario):
    """A scenario, and the history of the world that it built last."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._stage: ScenarioStage | None = None

    @property
    def name(self) -> str:
        """See `Scenario`."""
        return self._scenario.name

    @property
    def description(self) -> str:
        """See `Scenario`."""
        return self._scenario.description

    @property
    def kinds(self) -> tuple[type[Fault], ...]:
        """See `Scenario`."""
        return self._scenario.kinds

    def build(self, seed: int | str, options: Options) -> ScenarioStage:
        """See `Scenario`."""
        self._stage = self._scenario.build(seed, options)
        return self._stage

    def admits(self, seed: int | str, options: Options, plan: FaultPlan) -> bool:
        """See `zbmd.transport.sim.admitted`."""
        return admitted(self._scenario, seed, options, plan)

    def history(self) -> Sequence[object]:
        """Of the last run; empty if its world keeps none."""
        world = None if self._stage is None else self._stage.world
        return world.history if isinstance(world, Remembers) else ()


def _list(arguments: argparse.Namespace) -> int:
    width = max(map(len, SCENARIOS))
    for name in SCENARIOS:
        print(f"{name:{width}}  {scenario_named(name).description}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    scenario = Watched(scenario_named(arguments.scenario))
    given, seed = parse_faults(arguments.faults), _seed(arguments.seed)
    plan: FaultPlan | None = None
    count = given if isinstance(given, int) else len(given)
    options = Options(ranks=arguments.ranks, length=arguments.length, faults=count)
    print(f"{scenario.name}: seed {seed}, {options.ranks} ranks, length {options.length}", flush=True)
    with quietly():
        plan = plan_of(scenario_named(arguments.scenario), seed, options) if isinstance(given, int) else given
    if plan is not None and not scenario.admits(seed, options, plan):
        raise UserError(
            f"{scenario.name} promises nothing under this plan: {scenario.description}. "
            "Give other faults, or how many to draw."
        )
    try:
        with quietly():
            report = run_scenario(scenario, seed, options, plan, tell=None)
    except LocalProtocolError as error:  # the plan names an unknown process or kind of fault
        raise UserError(str(error)) from error
    if arguments.trace:
        for record in scenario.history():
            print(record)
        print(f"{report.outcome.value}: {report.reason}")
    else:
        print(_story(report, scenario.history()))
    print(
        f"{report.events:,} events, {report.virtual_ns / 1e9:.3f} s of virtual time, digest {report.digest}"
    )
    return report.outcome.exit_code


def _story(report: ScenarioReport, history: Sequence[object]) -> str:
    """Describe a failure, the events before it and the command that repeats it; one line if none."""
    if report.outcome is RunOutcome.OK:
        return f"{report.outcome.value}: {report.reason}\nagain: {report.command}"
    if report.story:
        return str(report)
    told = "\n".join(f"    {record}" for record in history[-STORY_LINES:])
    what = f"{report.scenario} seed {report.seed}: {report.outcome.value}: {report.reason}"
    return f"{what}\n{told}\nagain: {report.command}"


def _hunt(arguments: argparse.Namespace) -> int:
    names = tuple(arguments.scenario or SCENARIOS)
    for name in names:
        scenario_named(name)
    seconds = arguments.minutes * 60 if arguments.seconds is None else arguments.seconds
    first = random.SystemRandom().randrange(1 << SEED_BITS) if arguments.seed is None else arguments.seed
    if not 0 < seconds <= MINUTES_MAX * 60 or not 1 <= arguments.jobs <= JOBS_MAX or arguments.runs < 1:
        raise UserError(f"give a time of up to {MINUTES_MAX} minutes, 1..{JOBS_MAX} jobs, and 1 run or more")
    quarry = Quarry(
        names=names,
        first_seed=first,
        ranks=arguments.ranks,
        length=arguments.length,
        faults=arguments.faults,
    )
    quarry.options(0)  # raises for a size that cannot be
    try:
        print(
            f"hunting from seed {first}: {', '.join(names)}; {seconds:g} s, {arguments.jobs} processes",
            flush=True,
        )
        with (
            quietly(),
            _progress(seconds) as tell,
            Hunt(quarry, jobs=arguments.jobs, runs_max=arguments.runs) as hunt,
        ):
            caught = hunt.wait(time.monotonic() + seconds, tell)
    except HuntBroken as error:
        print(f"error: {error}", file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if caught.hung is not None:
        print(f"liveness: a run has not ended after {RUN_S_MAX:g} s: {quarry.command(caught.hung)}")
        return RunOutcome.LIVENESS.exit_code
    if caught.report is None:
        print(f"{caught.runs:,} runs, nothing found")
        return 0
    return _show_catch(caught.report, caught.runs)


def _show_catch(found: ScenarioReport, runs: int) -> int:
    """Shrink what was found, tell its story, and how to see it again."""
    print(f"{found.outcome.value} in {found.scenario} after {runs:,} runs: {found.reason}")
    print(f"found: {found.command}", flush=True)
    if found.outcome is RunOutcome.OK:
        print("error: the run failed in its worker and passes here: something in it is not in the seed")
        return BROKEN
    scenario = Watched(scenario_named(found.scenario))
    try:
        with quietly():
            small = shrink(scenario, found)
            report = small.report
            run_scenario(scenario, report.seed, report.options, report.plan, tell=None)
    except KeyboardInterrupt:
        print("interrupted while shrinking", file=sys.stderr)
        return found.outcome.exit_code
    bound = f", all of the {SHRINK_RUNS_MAX} allowed" if small.exhausted else ""
    print(f"shrunk in {small.runs} runs{bound}:")
    print(_story(report, scenario.history()))
    return found.outcome.exit_code


@contextmanager
def _progress(seconds: float) -> Generator[Tell]:
    """Show the progress of a hunt: a bar on a terminal, occasional lines elsewhere."""
    begun_s = time.monotonic()

    def text(runs: int) -> str:
        return f"{runs:,} runs, {runs / max(1e-9, time.monotonic() - begun_s):,.0f} runs/s"

    if not sys.stderr.isatty():
        told_s = begun_s

        def tell_line(runs: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= LINE_EVERY_S:
                told_s = time.monotonic()
                print(f"{told_s - begun_s:.0f} s: {text(runs)}", file=sys.stderr, flush=True)

        yield tell_line
        return
    bar = rich.progress.Progress(
        rich.progress.BarColumn(bar_width=30),
        rich.progress.TaskProgressColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
        auto_refresh=False,  # no thread: the workers are forked
        transient=True,
    )
    with bar:
        task = bar.add_task(text(0), total=seconds)

        def tell_bar(runs: int) -> None:
            done_s = min(seconds, time.monotonic() - begun_s)
            bar.update(task, description=text(runs), completed=done_s, refresh=True)

        yield tell_bar


def _seed(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sim` and its commands."""
    sim = commands.add_parser(
        "sim",
        help="run the system in a simulated world from a seed; hunt for seeds that fail",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = sim.add_subparsers(required=True, metavar="ACTION")
    names = add_command(actions, "list", "list the scenarios", examples=("zbmd sim list",))
    names.set_defaults(run_command=_list)
    defaults = Options()
    run = add_command(
        actions,
        "run",
        "run one seed and print its outcome",
        examples=(
            "zbmd sim run commit --seed 7 --ranks 3 --length 2 --faults 1 --trace",
            "zbmd sim run links --seed 7 --faults 'crash:process=rank1,at=5ms,for=2ms'",
        ),
    )
    run.add_argument("scenario", metavar="SCENARIO", help=", ".join(SCENARIOS))
    run.add_argument("--seed", required=True, help="seed: one seed is one history")
    add_ranks(run, defaults.ranks, "processes to simulate")
    run.add_argument(
        "--length", type=int, default=defaults.length, help="steps or rounds (default: %(default)s)"
    )
    run.add_argument(
        "--faults",
        default=str(defaults.faults),
        metavar="COUNT|PLAN",
        help="faults to draw, or a plan: 'crash:process=rank1,at=5ms,for=2ms;…' (default: %(default)s)",
    )
    run.add_argument("--trace", action="store_true", help="print every event")
    run.set_defaults(run_command=_run)
    hunt = add_command(
        actions,
        "hunt",
        "try fresh seeds until one fails, and shrink that run",
        examples=("zbmd sim hunt --minutes 10", "zbmd sim hunt --scenario commit --seconds 30"),
    )
    for_how_long = hunt.add_mutually_exclusive_group()
    for_how_long.add_argument(
        "--minutes", type=float, default=2.0, help="how long to hunt (default: %(default)s)"
    )
    for_how_long.add_argument("--seconds", type=float, help="the same in seconds")
    hunt.add_argument(
        "--scenario",
        action="extend",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)} (default: all)",
    )
    hunt.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes that hunt (default: %(default)s)"
    )
    hunt.add_argument("--seed", type=int, help="the first seed (default: fresh)")
    add_ranks(hunt, None, "processes of each run (default: drawn, small numbers most often)")
    hunt.add_argument("--length", type=int, help="length of each run (default: drawn, short ones most often)")
    hunt.add_argument("--faults", type=int, help="faults of each run (default: drawn, few most often)")
    hunt.add_argument("--runs", type=int, default=RUNS_MAX, help="end after this many runs")
    hunt.set_defaults(run_command=_hunt)
    sim_collectives.add_parser(actions)
