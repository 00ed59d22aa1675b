"""`zbmd demo`: train a language model with four supervised ranks, kill one of them, and recover.

The last line of standard output is one JSON object with what happened. `--verify` also runs the job
undisturbed and in one plain process, and compares the weights bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.replay.process_capture import CAPTURE_VARIABLE
from zbmd.tools.cli.console import Console
from zbmd.tools.cli.options import add_ranks
from zbmd.tools.demo.watch import KillPlan, Watch
from zbmd.tools.runs.commands import audit_run
from zbmd.tools.runs.result import save_result
from zbmd.training.config import TrainingConfig
from zbmd.training.data.corpus import CORPUS_FILE, Corpus, bigram_loss, fit_bigram
from zbmd.training.model.gpt import GPT
from zbmd.training.model.weights import WEIGHTS_NAME, load_weights
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError

WORLD_SIZE = 4
STEPS = 780
QUICK_STEPS = 45
OVERHEAD_ROUNDS = 60
EVALUATED_WINDOWS = 96
JOB = "zbmd.training.sharded"
FINAL_WINDOWS = 512
"""Held-out windows that the final weights are evaluated on."""

EXAMPLES = """examples:
  zbmd demo                            780 steps, one kill: about four minutes on two cores
  zbmd demo --quick                    45 steps: a smoke test
  zbmd demo --verify --kill-seed 7     compare the weights with those of a run without a kill, bit for bit
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of the demo: `steps` on `world_size` ranks, with one kill drawn from `kill_seed`."""

    world_size: int
    steps: int
    kill_seed: int
    verify: bool
    out: Path
    data: str | None
    capture: str | None = None

    def recipe(self, out: Path, *, plain: bool = False) -> TrainOptions:
        """The job, in directory `out`."""
        return TrainOptions(
            out=out,
            data=self.data,
            training=TrainingConfig(steps=self.steps),
            evaluate_windows=EVALUATED_WINDOWS,
            checkpoint_every=50,
            plain=plain,
        )


def plan_kill(options: DemoOptions) -> KillPlan:
    """A random rank, at a random moment after a third of the run; the same for the same seed."""
    rng = random.Random(options.kill_seed)
    first, last = max(2, -(-options.steps // 3)), max(3, options.steps - 5)
    return KillPlan(
        rank=rng.randrange(options.world_size),
        step=rng.randint(first, last),
        fraction=rng.random(),
    )


async def run_job(
    options: DemoOptions, out: Path, plans: tuple[KillPlan, ...], *, capture: str | None = None
) -> Watch:
    """Run the training job once under a host, with the planned kills; record it in directory `capture`.

    Raises `UserError` if it fails.
    """
    recipe = options.recipe(out)
    tokens = recipe.training.global_batch * recipe.model.context
    config = HostConfig(
        target=JOB,
        is_module=True,
        arguments=(recipe.encode(),),
        world_size=options.world_size,
        environment={} if capture is None else {CAPTURE_VARIABLE: capture},
        preload=(f"{JOB}.run",),
    )
    async with Console(ranks_to_stderr=True) as console:
        watch = Watch(
            console,
            steps=options.steps,
            tokens_per_step=tokens,
            flops_per_step=6.0 * GPT(recipe.model).layout.parameter_count * tokens,
            plans=plans,
        )
        host = Host(config, output=console, observer=watch)
        watch.ranks = lambda: host.ranks
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, host.stop, f"{number.name} was received")
        ended = await host.run()
    if ended.exit_code != 0 or watch.result is None:
        raise UserError(f"the training job did not finish: {ended.reason}")
    return watch


def _json_of(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that `python -m module` prints as its last line. Raises `UserError` if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise UserError(f"python -m {module} ended with exit code {done.returncode}: see above.")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(options: DemoOptions, watch: Watch) -> dict[str, Any]:
    """The demo's result, in the order in which it is printed."""
    audited, result = audit_run(options.out), watch.result
    assert result is not None
    held_out_loss, of_bigrams = evaluate(options)
    return {
        "steps": audited.steps,
        "world_size": options.world_size,
        "parameters": result["parameters"],
        "loss_first": watch.loss_first,
        "loss_last": watch.loss_last,
        "heldout_loss_last": held_out_loss,
        "heldout_loss_bigram": of_bigrams,
        "kills": len(watch.kills),
        "recoveries": sum(kill.recovered_ns is not None for kill in watch.kills),
        "detection_ms": [kill.detection_ms() for kill in watch.kills],
        "recovery_ms": [kill.recovery_ms() for kill in watch.kills],
        "steps_lost": audited.steps_lost,
        "samples_skipped": audited.samples_skipped,
        "samples_repeated": audited.samples_repeated,
        "weights_sha256": result["weights_sha256"],
        "tokens_per_second": watch.tokens_per_second(),
    }


def evaluate(options: DemoOptions) -> tuple[float, float]:
    """The loss of the final weights on the held-out text, and of a bigram table of the training text."""
    recipe = options.recipe(options.out)
    corpus = Corpus(options.out / CORPUS_FILE, context=recipe.model.context)
    judged = Recipe(GPT(recipe.model), corpus, recipe.training)
    weights = load_weights(options.out / WEIGHTS_NAME)[0]
    windows = corpus.windows(corpus.evaluation_ids(FINAL_WINDOWS))
    return judged.held_out_loss(weights, windows_max=FINAL_WINDOWS), bigram_loss(fit_bigram(corpus), windows)


def measure_overhead(options: DemoOptions, rounds: int) -> dict[str, Any]:
    """Time the stack on one rank against a plain loop."""
    with tempfile.TemporaryDirectory(prefix="zbmd-overhead-") as scratch:
        data = () if options.data is None else ("--data", options.data)
        found = _json_of("zbmd.tools.demo.overhead", "--rounds", str(rounds), "--out", scratch, *data)
    return {
        "overhead_percent": found["overhead_percent"],
        "overhead_interval_percent": found["overhead_interval_percent"],
        "overhead_noise_floor_percent": found["noise_floor_percent"],
        "overhead_noise_floor_interval_percent": found["noise_floor_interval_percent"],
    }


def verify(options: DemoOptions) -> dict[str, str]:
    """The weights of the same job undisturbed, and of the same job in one plain process."""
    _say("the same job undisturbed")
    calm = uvloop.run(run_job(options, options.out / "undisturbed", ()))
    assert calm.result is not None
    _say("the same job in one plain process, without supervision (this takes about twice as long)")
    plain = _json_of(JOB, options.recipe(options.out / "plain", plain=True).encode())
    return {
        "weights_sha256_undisturbed": calm.result["weights_sha256"],
        "weights_sha256_plain": plain["weights_sha256"],
    }


def _say(text: str) -> None:
    print(f"[demo]: {text}", file=sys.stderr, flush=True)


def run_demo(options: DemoOptions, overhead_rounds: int) -> dict[str, Any]:
    """Everything the demo does. Raises `UserError`."""
    plan = plan_kill(options)
    _say(
        f"{options.world_size} ranks, {options.steps} steps; kill seed {options.kill_seed}: rank {plan.rank} "
        f"dies in step {plan.step + 1}; everything is kept in {options.out}"
    )
    watch = uvloop.run(run_job(options, options.out, (plan,), capture=options.capture))
    found = report(options, watch)
    _say("what the stack costs: one rank's steps beside a plain loop, in turn")
    found |= measure_overhead(options, overhead_rounds)
    if options.verify:
        digests = verify(options)
        found |= digests
        found["verified"] = set(digests.values()) == {found["weights_sha256"]}
    save_result(options.out, found, (kill.death() for kill in watch.kills))
    if not found.get("verified", True):
        raise UserError(f"the weights differ: {json.dumps(found)}")
    return found


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the commands of `zbmd`."""
    parser = commands.add_parser(
        "demo",
        help="train on several ranks, kill one, and recover",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    job = parser.add_argument_group("training job")
    add_ranks(job, WORLD_SIZE)
    job.add_argument("--steps", type=int, metavar="N", help=f"training steps (default: {STEPS})")
    job.add_argument("--quick", action="store_true", help=f"run only {QUICK_STEPS} steps: a smoke test")
    job.add_argument(
        "--data", metavar="PATH", help="file, directory or glob to train on (default: Python's own library)"
    )
    kill = parser.add_argument_group("failure")
    kill.add_argument(
        "--kill-seed", type=int, metavar="N", help="draws which rank dies at which step (default: fresh)"
    )
    kill.add_argument(
        "--verify", action="store_true", help="compare the weights with those of undisturbed and plain runs"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, metavar="DIR", help="directory of the run (default: a new one in zbmd-runs)"
    )
    output.add_argument(
        "--capture",
        metavar="DIR",
        help=f"record the run with the kill in DIR, for zbmd replay (default: {CAPTURE_VARIABLE})",
    )
    parser.set_defaults(run_command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    """Run the demo; the last line of standard output is its result. Exit code 1: a run failed."""
    fresh = random.SystemRandom().randrange(10**6)
    # Removed from the environment: the runs that the demo compares with are not recorded.
    capture = os.environ.pop(CAPTURE_VARIABLE, None)
    options = DemoOptions(
        world_size=arguments.ranks,
        steps=arguments.steps or (QUICK_STEPS if arguments.quick else STEPS),
        kill_seed=fresh if arguments.kill_seed is None else arguments.kill_seed,
        verify=arguments.verify,
        out=arguments.out or Path("zbmd-runs") / time.strftime("demo-%Y%m%d-%H%M%S"),
        data=arguments.data,
        capture=arguments.capture or capture,
    )
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        found = run_demo(options, 8 if arguments.quick else OVERHEAD_ROUNDS)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found), flush=True)
    return 0
