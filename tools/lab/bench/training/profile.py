"""Measure the profiler: steps with and without spans, and with sampled ops, in turn; and what each of them
costs.

Steps are timed by the processor time of their thread, so that what else the machine does counts little; steps
without spans are also laid beside each other, which tells how far the noise goes. The share is the cost of a
span, by the spans of a step, and of the line at its end, beside the time of a step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.tools.demo.overhead import Medians, medians
from zbmd.training import ops
from zbmd.training.autograd import spans
from zbmd.training.autograd._spans import RECORD_BYTES, SpanRecorder
from zbmd.training.autograd.tape import Tape, Tensor
from zbmd.training.config import TrainingConfig
from zbmd.training.profiler.lines import read_profiles
from zbmd.training.profiler.profiler import Profiler, open_profiler
from zbmd.training.profiler.ring import read_ring, ring_path
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import open_recipe

WARM_UP_ROUNDS = 3
CALLS = 20_000
LINES = 200
TAPE_OPS = 200
REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Medians):
    """Percent of a step without spans; ns and µs are the least of several."""

    step_ms: float
    spans_per_step: float
    span_ns: float
    span_without_recorder_ns: float
    line_us: float
    share_percent: float
    """spans_per_step of span_ns, and a line, of step_ms."""
    sampled_percent: float
    """A sampled step, spans included, beside one without spans: the median."""
    sampled_high_percent: float
    """Three of four sampled steps cost less."""
    ops_per_sample: float
    op_us: float
    """Cost of the watch for an op and its rule together; of small arrays, so that little else is in it."""
    sampled_share_percent: float
    """ops_per_sample of half of op_us, of step_ms."""
    rounds: int


def measure(directory: Path, rounds: int, data: str | None) -> Cost:
    """Steps of the default model, in this thread. Raises `UserError`."""
    steps = 4 * (rounds + WARM_UP_ROUNDS)
    options = TrainOptions(out=directory, data=data, training=TrainingConfig(steps=steps))
    recipe = open_recipe(options)
    trainer, sequences = PlainTrainer(recipe), recipe.config.sequences_per_shard
    of_ops = directory / "ops"
    with (
        open_profiler(directory, recipe.model, sequences=sequences) as profiler,
        open_profiler(of_ops, recipe.model, sequences=sequences, ops_every=1) as sampling,
    ):

        def profiled(by: Profiler) -> None:
            with by.recording():
                by.begin_step(trainer.step)
                with by.operations():
                    trainer.run_step()
                by.end_step()

        on: list[float] = []
        sampled: list[float] = []
        off: list[tuple[float, float]] = []
        for number in range(rounds + WARM_UP_ROUNDS):
            # Each is first, second, third and fourth as often as the others.
            turn: list[tuple[int, Callable[[], object]]] = [
                (0, trainer.run_step),
                (1, partial(profiled, profiler)),
                (2, trainer.run_step),
                (3, partial(profiled, sampling)),
            ]
            took = {which: _timed(work) for which, work in turn[number % 4 :] + turn[: number % 4]}
            if number >= WARM_UP_ROUNDS:
                on.append(took[1])
                sampled.append(took[3])
                off.append((took[0], took[2]))
        records = read_ring(ring_path(directory, 0, 1)).records
        lines = [line for life in read_profiles(of_ops) for line in life.ops]
        line_us, op_us = _line_us(profiler), _op_us(sampling)
    calls = [sum(row.calls for row in line.ops) for line in lines]
    of_samples = [100.0 * (a / ((b + c) / 2) - 1.0) for a, (b, c) in zip(sampled, off, strict=True)]
    per_step = len(records) / (rounds + WARM_UP_ROUNDS)
    step_ms = 1e3 * statistics.median(first for first, _ in off)
    recorded_ns, unheard_ns = _span_ns()
    overhead = [100.0 * (a / ((b + c) / 2) - 1.0) for a, (b, c) in zip(on, off, strict=True)]
    floor = [100.0 * (b / c - 1.0) for b, c in off]
    return Cost(
        **medians(overhead, floor),
        step_ms=step_ms,
        spans_per_step=per_step,
        span_ns=recorded_ns,
        span_without_recorder_ns=unheard_ns,
        line_us=line_us,
        sampled_percent=statistics.median(of_samples),
        sampled_high_percent=sorted(of_samples)[len(of_samples) * 3 // 4],
        ops_per_sample=statistics.mean(calls),
        op_us=op_us,
        sampled_share_percent=100.0 * statistics.mean(calls) * op_us / 2e3 / step_ms,
        share_percent=100.0 * (per_step * recorded_ns / 1e6 + line_us / 1e3) / step_ms,
        rounds=rounds,
    )


def _timed(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def _span_ns() -> tuple[float, float]:
    """Return the cost of a span, with and without a recorder."""

    def one() -> None:
        with spans.FORWARD[3]:
            pass

    def least_ns() -> float:
        return min(timeit.repeat(one, number=CALLS, repeat=REPEATS, timer=time.thread_time)) / CALLS * 1e9

    recorder = SpanRecorder(bytearray(8 + RECORD_BYTES * 1024), 8)
    unheard_ns = least_ns()
    with recorder.recording():
        recorder.begin_step(1)
        recorded_ns = least_ns()
        recorder.end_step()
    return recorded_ns, unheard_ns


def _op_us(profiler: Profiler) -> float:
    """Measure what the watch adds to an op, forwards and backwards together."""
    data = np.ones((4, 4), np.float32)

    def passes() -> None:
        tape = Tape(np)
        x = Tensor(data)
        for _ in range(TAPE_OPS):
            x = ops.squared_relu(tape, x)
        tape.play(x, np.ones_like(data))

    def least_us() -> float:
        return min(timeit.repeat(passes, number=1, repeat=LINES, timer=time.thread_time)) / TAPE_OPS * 1e6

    plain_us = least_us()
    with profiler.recording():
        profiler.begin_step(1)
        with profiler.operations():
            watched_us = least_us()
        profiler.end_step()
    return watched_us - plain_us


def _line_us(profiler: Profiler) -> float:
    """Measure the end of a step: its sums, and its line in the file."""

    def one() -> None:
        profiler.begin_step(1)

    return min(timeit.repeat(one, number=LINES, repeat=REPEATS, timer=time.thread_time)) / LINES * 1e6


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the result as one JSON line."""
    parser = script_parser("lab.bench.training.profile", __doc__)
    parser.add_argument("--rounds", type=int, default=60, help="rounds that count (%(default)s)")
    parser.add_argument("--data", help="file, directory or glob to train on")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="zbmd-bench-profile-") as directory:
        cost = measure(Path(directory), max(1, arguments.rounds), arguments.data)
    print(msgspec.json.encode(asdict(cost)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
