"""Measure activation checkpointing (`--recompute on`): the largest batch under a limit, and what it costs.

    python -m zbmd.tools.lab.bench.training.recompute                  a process may have 768 MiB
    python -m zbmd.tools.lab.bench.training.recompute --limit-mib 1024 --width 512

Each trial is a process of its own that trains on one rank, two steps or more, under RLIMIT_DATA: all of its
private memory, with the interpreter, the state and every activation. The largest batch, sequences in one
pass, is found by halving, with and without recomputation. The steps are timed at the larger of the batches
that fit without it, in processes in turn; `peak` is the highest resident memory of a trial of the largest
batch, `estimate` what `zbmd train` expects of activations there.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from zbmd.tools.bench.stats import ROUNDS_MAX
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.model.gpt import GPT
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.step.memory_estimate import activation_bytes
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError

MIB = 1 << 20
STEPS_LEAST = 2
"""The second step has what the first has kept beside it."""
BATCH_MAX = 1 << 12
OUT_OF_MEMORY = 3
"""Exit code of a trial that has met the limit."""
GAIN_GOAL, COST_GOAL = 1.8, 1.35
MODULE = "zbmd.tools.lab.bench.training.recompute"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One process: what it trains. `limit_bytes`: of private memory."""

    model: GPTConfig
    text: str
    recompute: bool
    batch: int
    steps: int
    limit_bytes: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial that fits: the peak of resident memory, bytes, and the seconds of each step."""

    peak_bytes: int
    steps_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCost:
    """The result. `time_ratio`: of a step with recomputation over one without, at `timed_batch`."""

    limit_bytes: int
    parameters: int
    batch: int
    batch_recomputed: int
    gain: float
    peak_bytes: int
    peak_recomputed_bytes: int
    estimate_bytes: int
    estimate_recomputed_bytes: int
    timed_batch: int
    step_s: float
    step_recomputed_s: float
    time_ratio: float


def train(trial: Trial) -> Found:
    """Train as `trial` says, under its limit, in this process. Raises `MemoryError`."""
    resource.setrlimit(resource.RLIMIT_DATA, (trial.limit_bytes, trial.limit_bytes))
    config = TrainingConfig(steps=trial.steps, shards=1, sequences_per_shard=trial.batch)
    corpus = Corpus(Path(trial.text), context=trial.model.context)
    trainer = PlainTrainer(Recipe(GPT(trial.model, recompute=trial.recompute), corpus, config))
    steps_s: list[float] = []
    for _ in range(trial.steps):
        began = time.perf_counter()
        trainer.run_step()
        steps_s.append(time.perf_counter() - began)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Found(peak_bytes=peak_bytes, steps_s=steps_s)


def run(trial: Trial) -> Found | None:
    """Run a trial in a process of its own; None: out of memory. Raises `UserError` if it fails otherwise."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", MODULE, "--trial", msgspec.json.encode(trial).decode()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == OUT_OF_MEMORY:
        return None
    if done.returncode != 0:
        raise UserError(f"a trial failed with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Found)


def largest(fits: Callable[[int], bool], *, least: int = 0, most: int = BATCH_MAX) -> int:
    """Return the largest batch, up to `most`, that fits. All up to `least` are known to fit; 0: none does."""
    known, beyond = least, most + 1
    while known < most and beyond > most:
        tried = min(most, max(1, 2 * known))
        if fits(tried):
            known = tried
        else:
            beyond = tried
    while beyond - known > 1:
        middle = (known + beyond) // 2
        if fits(middle):
            known = middle
        else:
            beyond = middle
    return known


def measure(model: GPTConfig, text: Path, *, limit_bytes: int, rounds: int, steps: int) -> RecomputeCost:
    """Find both largest batches, and time steps. Raises `UserError` if not even one sequence fits."""
    peaks: dict[bool, dict[int, int]] = {False: {}, True: {}}

    def trial(recompute: bool, batch: int, steps: int = STEPS_LEAST) -> Found | None:
        return run(
            Trial(
                model=model,
                text=str(text),
                recompute=recompute,
                batch=batch,
                steps=steps,
                limit_bytes=limit_bytes,
            )
        )

    def fits(recompute: bool, batch: int) -> bool:
        found = trial(recompute, batch)
        if found is not None:
            peaks[recompute][batch] = found.peak_bytes
        return found is not None

    without = largest(lambda batch: fits(False, batch))
    recomputed = largest(lambda batch: fits(True, batch), least=without)
    if without == 0:
        raise UserError(f"not even one sequence fits into {limit_bytes // MIB} MiB: raise --limit-mib")
    pairs = [
        [_step_s(trial(recompute, without, steps + 1)) for recompute in (False, True)] for _ in range(rounds)
    ]

    def estimate(recompute: bool, batch: int) -> int:
        return activation_bytes(model, rows=batch * model.context, recompute=recompute)

    return RecomputeCost(
        limit_bytes=limit_bytes,
        parameters=GPT(model).layout.parameter_count,
        batch=without,
        batch_recomputed=recomputed,
        gain=recomputed / without,
        peak_bytes=peaks[False][without],
        peak_recomputed_bytes=peaks[True][recomputed],
        estimate_bytes=estimate(False, without),
        estimate_recomputed_bytes=estimate(True, recomputed),
        timed_batch=without,
        step_s=statistics.median(pair[0] for pair in pairs),
        step_recomputed_s=statistics.median(pair[1] for pair in pairs),
        time_ratio=statistics.median(pair[1] / pair[0] for pair in pairs),
    )


def _step_s(found: Found | None) -> float:
    """Return the median step of a trial, without its first."""
    if found is None:
        raise UserError("a batch that has fitted does not fit again: other limits have changed")
    return statistics.median(found.steps_s[1:])


def _be_trial(text: str) -> int:
    try:
        found = train(msgspec.json.decode(text, type=Trial))
    except MemoryError as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    print(msgspec.json.encode(found).decode())
    return 0


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the result. Exit code 1: a goal is missed."""
    parser = script_parser("lab.bench.training.recompute", __doc__)
    parser.add_argument("--limit-mib", type=int, default=768, help="of a process (%(default)s)")
    parser.add_argument("--width", type=int, default=192, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--context", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--family", choices=("zbmd", "gpt2"), default="zbmd", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of timed trials (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed in each (%(default)s)")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    add_json(parser)
    asked = parser.parse_args(argv)
    if asked.trial is not None:
        return _be_trial(asked.trial)
    if not 1 <= asked.rounds <= ROUNDS_MAX or asked.steps < 1 or asked.limit_mib < 1:
        raise UserError(f"give 1 to {ROUNDS_MAX} rounds, and positive --steps and --limit-mib")
    model = GPTConfig(
        width=asked.width, layers=asked.layers, heads=asked.heads, context=asked.context, family=asked.family
    )
    with tempfile.TemporaryDirectory(prefix="zbmd-recompute-") as scratch:
        folder = Path(scratch)
        text = prepare_corpus(str(write_text(folder / "text")), folder, context=model.context)
        limit_bytes = asked.limit_mib * MIB
        cost = measure(model, text, limit_bytes=limit_bytes, rounds=asked.rounds, steps=asked.steps)
    if asked.json:
        print(msgspec.json.encode(asdict(cost)).decode())
    else:
        print("\n".join(lines_of(cost)))
    return 0 if cost.gain >= GAIN_GOAL and cost.time_ratio <= COST_GOAL else 1


def lines_of(cost: RecomputeCost) -> list[str]:
    """Return the result as text."""
    return [
        f"{cost.parameters / 1e6:.1f} M parameters, {cost.limit_bytes // MIB} MiB of memory a process",
        f"largest batch: {cost.batch} sequences (peak {cost.peak_bytes // MIB} MiB, of which activations are "
        f"estimated at {cost.estimate_bytes // MIB}), {cost.batch_recomputed} recomputed "
        f"({cost.peak_recomputed_bytes // MIB}, {cost.estimate_recomputed_bytes // MIB}): "
        f"{cost.gain:.2f} times",
        f"a step of {cost.timed_batch} sequences: {1e3 * cost.step_s:.0f} ms, "
        f"{1e3 * cost.step_recomputed_s:.0f} recomputed: {cost.time_ratio:.2f} times",
    ]


if __name__ == "__main__":
    sys.exit(main())
