"""What the stack costs: one rank's training steps beside a plain loop of the same model, in turn.

Each round times one step through the whole stack (actors, groups, votes, store, journal) and two steps of the
plain loop. The ratio of the two plain steps is the noise floor: A against A.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import uvloop

from zbmd.training.config import TrainingConfig
from zbmd.training.job import JobOptions, open_recipe, run
from zbmd.training.plain import PlainTrainer
from zbmd.transport.errors import UserError

WARMUP_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians over the rounds. Percentages are of the plain step's time."""

    overhead_percent: float
    noise_floor_percent: float
    stack_step_ms: float
    plain_step_ms: float
    rounds: int


class _Rounds:
    """Times the rounds; called before every step of the stack."""

    def __init__(self, plain: PlainTrainer) -> None:
        self._plain = plain
        self._stack_began_s: float | None = None
        self._plain_s: tuple[float, float] = (0.0, 0.0)
        self.stack: list[float] = []
        self.plain: list[tuple[float, float]] = []

    def before_step(self, version: int) -> None:
        """Close the round of the step before, run the plain steps, and begin the next round."""
        now = time.perf_counter()
        if self._stack_began_s is not None and version > WARMUP_ROUNDS + 1:
            self.stack.append(now - self._stack_began_s)
            self.plain.append(self._plain_s)
        self._plain_s = (self._time_plain(), self._time_plain())
        self._stack_began_s = time.perf_counter()

    def _time_plain(self) -> float:
        began = time.perf_counter()
        self._plain.run_step()
        return time.perf_counter() - began

    def summary(self) -> Overhead:
        """The medians of what was timed."""
        ratios = [
            stack / ((first + second) / 2)
            for stack, (first, second) in zip(self.stack, self.plain, strict=True)
        ]
        floor = [first / second for first, second in self.plain]
        return Overhead(
            overhead_percent=100.0 * (statistics.median(ratios) - 1.0),
            noise_floor_percent=100.0 * (statistics.median(floor) - 1.0),
            stack_step_ms=1e3 * statistics.median(self.stack),
            plain_step_ms=1e3 * statistics.median(first for first, _ in self.plain),
            rounds=len(ratios),
        )


def measure(options: JobOptions) -> Overhead:
    """Run the job on this one rank with a plain twin in between. Raises `UserError`."""
    rounds = _Rounds(PlainTrainer(open_recipe(options)))
    uvloop.run(run(options, before_step=rounds.before_step))
    return rounds.summary()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the result as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m zbmd.training.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds that count (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--data", help="file, directory or glob to train on")
    arguments = parser.parse_args(argv)
    options = JobOptions(
        out=arguments.out,
        data=arguments.data,
        training=TrainingConfig(steps=arguments.rounds + WARMUP_ROUNDS + 1),
        checkpoint_every=0,
        evaluate_every=0,
    )
    try:
        overhead = measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(asdict(overhead)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
