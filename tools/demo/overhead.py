"""The cost of the stack: one rank's training steps beside a plain loop of the same model, in turn.

Each round times one step through the whole stack (groups, votes, ledger, records) and one step of each
of two plain twins, whose order changes from round to round. Every step so follows one with other memory, and
finds the caches as cold. The ratio of the twins is the noise floor: A against A.

Which pages a process's arrays lie in is drawn when it starts, and makes some percent between two sides for as
long as it lives, whatever the rounds. So a figure is of several runs (`--runs`), each a process of its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from zbmd.actors.process.log import log_to_stderr
from zbmd.training.config import TrainingConfig
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.task import StepResult, Trainer
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import open_recipe, train
from zbmd.training.sharded.task import EngineTask
from zbmd.training.step.step_hook import StepHook
from zbmd.transport.errors import UserError

WARMUP_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Medians:
    """Medians in percent of the plain side's time.

    `interval`: within it lies the median with 95 % certainty, by the noise of what was measured alone.
    `noise_floor`: the same for twin against twin, where nothing but noise can be found.
    """

    overhead_percent: float
    overhead_interval_percent: tuple[float, float]
    noise_floor_percent: float
    noise_floor_interval_percent: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead(Medians):
    """Over the rounds of one run."""

    stack_step_ms: float
    plain_step_ms: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadOfRuns(Medians):
    """Over runs, each with its own median over rounds."""

    each_percent: tuple[float, ...]
    rounds: int


def timed_task(before_step: Callable[[int], None]) -> type[EngineTask]:
    """Return a task that calls `before_step(version)` before each step, on the training thread."""

    class TimedTask(EngineTask):
        def trainer(self, groups: MeshGroups) -> Trainer:
            made = super().trainer(groups)
            run_step = made.run_step

            def timed(watch: StepHook) -> StepResult:
                before_step(made.step + 1)
                return run_step(watch)

            made.run_step = timed  # type: ignore[method-assign]
            return made

    return TimedTask


class _Rounds:
    """Times the rounds; called before every step of the stack."""

    def __init__(self, twins: tuple[PlainTrainer, PlainTrainer]) -> None:
        self._twins = twins
        self._stack_began_s: float | None = None
        self._plain_s = [0.0, 0.0]
        self.stack: list[float] = []
        self.plain: list[tuple[float, float]] = []

    def before_step(self, version: int) -> None:
        """Close the round of the step before, run the twins' steps, and begin the next round."""
        now = time.perf_counter()
        if self._stack_began_s is not None and version > WARMUP_ROUNDS + 1:
            self.stack.append(now - self._stack_began_s)
            self.plain.append((self._plain_s[0], self._plain_s[1]))
        for index in (0, 1) if version % 2 else (1, 0):
            began = time.perf_counter()
            self._twins[index].run_step()
            self._plain_s[index] = time.perf_counter() - began
        self._stack_began_s = time.perf_counter()

    def summary(self) -> Overhead:
        """The medians of what was timed."""
        overhead = [
            100.0 * (stack / ((first + second) / 2) - 1.0)
            for stack, (first, second) in zip(self.stack, self.plain, strict=True)
        ]
        floor = [100.0 * (first / second - 1.0) for first, second in self.plain]
        return Overhead(
            **medians(overhead, floor),
            stack_step_ms=1e3 * statistics.median(self.stack),
            plain_step_ms=1e3 * statistics.median(first for first, _ in self.plain),
            rounds=len(overhead),
        )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the true median lies with 95 % certainty.

    How many of n values lie below the median is binomial (n, 1/2), whatever their distribution; here by its
    normal approximation. `values` must not be empty.
    """
    ordered, n = sorted(values), len(values)
    low = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    return ordered[low], ordered[n - 1 - low]


def medians(overhead: Sequence[float], floor: Sequence[float]) -> dict[str, Any]:
    """The fields of `Medians`, of samples in percent: not empty."""
    return {
        "overhead_percent": statistics.median(overhead),
        "overhead_interval_percent": median_interval(overhead),
        "noise_floor_percent": statistics.median(floor),
        "noise_floor_interval_percent": median_interval(floor),
    }


def measure(options: TrainOptions) -> Overhead:
    """Run the job on this one rank with its plain twins in between. Raises `UserError`."""
    recipe = open_recipe(options)
    rounds = _Rounds((PlainTrainer(recipe), PlainTrainer(recipe)))
    uvloop.run(train(options, timed_task(rounds.before_step)))
    return rounds.summary()


def measure_runs(runs: int, options: TrainOptions, rounds: int) -> OverheadOfRuns:
    """Have so many processes measure, one after the other. Raises `UserError`."""
    found: list[Overhead] = []
    for number in range(runs):
        command = [sys.executable, "-m", "zbmd.tools.demo.overhead", "--rounds", str(rounds)]
        command += ["--out", str(options.out / f"run{number}")]
        command += ["--data", options.data] if options.data else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise UserError(f"run {number} ended with {done.returncode}: its words are above.")
        # The line before is that of the job itself.
        found.append(msgspec.json.decode(done.stdout.splitlines()[-1], type=Overhead))
        print(f"run {number + 1}/{runs}: {found[-1].overhead_percent:.2f} %", file=sys.stderr, flush=True)
    overhead = [one.overhead_percent for one in found]
    floor = [one.noise_floor_percent for one in found]
    return OverheadOfRuns(
        **medians(overhead, floor),
        each_percent=tuple(overhead),
        rounds=rounds,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the result as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m zbmd.tools.demo.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds that count, of each run (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="processes, one after the other (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--data", help="file, directory or glob to train on")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    options = TrainOptions(
        out=arguments.out,
        data=arguments.data,
        training=TrainingConfig(steps=arguments.rounds + WARMUP_ROUNDS + 1),
        checkpoint_every=0,
        evaluate_every=0,
    )
    try:
        several = arguments.runs > 1
        result = measure_runs(arguments.runs, options, arguments.rounds) if several else measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(asdict(result)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
