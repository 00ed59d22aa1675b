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
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankInfo, RankReport
from zbmd.actors.replay.process_capture import CAPTURE_VARIABLE
from zbmd.tools.cli.console import Console, Progress, Recovery
from zbmd.tools.cli.options import add_ranks
from zbmd.tools.runs.commands import audit_run
from zbmd.tools.runs.result import Death, save_result
from zbmd.training.config import TrainingConfig
from zbmd.training.data.corpus import CORPUS_FILE, Corpus, bigram_loss, fit_bigram
from zbmd.training.model.gpt import GPT
from zbmd.training.model.weights import WEIGHTS_NAME, load_weights
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.step.recipe import Recipe
from zbmd.transport.errors import UserError

RECENT_STEPS = 20
"""The step time by which a kill is placed is the median of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPlan:
    """Kill `rank` once `step` is committed, `fraction` of a step's time later."""

    rank: int
    step: int
    fraction: float


@dataclass(slots=True)
class Kill:
    """A kill that was dealt. Times are CLOCK_MONOTONIC, ns."""

    rank: int
    incarnation: int
    step: int
    epoch: int
    at_ns: int
    survivors: int
    notices_ns: list[int] = field(default_factory=list[int])
    recovered_ns: int | None = None
    step_after: int | None = None

    def detection_ms(self) -> float | None:
        """From the kill until the last survivor had noticed; None if one has not said so."""
        if len(self.notices_ns) < self.survivors:
            return None
        return (max(self.notices_ns) - self.at_ns) / 1e6

    def recovery_ms(self) -> float | None:
        """From the kill to the next step committed by the repaired group."""
        return None if self.recovered_ns is None else (self.recovered_ns - self.at_ns) / 1e6

    def death(self) -> Death:
        """Return the entry of `result.json`."""
        return Death(
            rank=self.rank,
            incarnation=self.incarnation,
            step=self.step,
            epoch=self.epoch,
            detection_ms=self.detection_ms(),
            recovery_ms=self.recovery_ms(),
        )


class Watch:
    """An observer of a host: shows progress, deals the planned kills, and keeps what the demo reports.

    `tokens_per_step` and `flops_per_step` are the job's. Set `ranks`, which gives the host's ranks as they
    are now, before the host runs.
    """

    ranks: Callable[[], dict[int, RankInfo]]

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        tokens_per_step: int,
        flops_per_step: float,
        plans: tuple[KillPlan, ...] = (),
    ) -> None:
        self.kills: list[Kill] = []
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.result: dict[str, Any] | None = None
        self._console = console
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_step
        self._plans = list(plans)
        self._commits: list[tuple[int, int]] = []
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)

    async def __call__(self, event: HostEvent) -> None:
        """Take one event of the host."""
        if not isinstance(event, RankReport):
            return
        match event.payload.get("kind"):
            case "step":
                await self._step(event.payload)
            case "lost":
                self._lost(event.payload)
            case "result":
                self.result = event.payload
            case _:
                pass  # a report for other watchers

    def tokens_per_second(self) -> float:
        """Tokens over the whole run, recoveries included."""
        (first, began_ns), (last, ended_ns) = self._commits[0], self._commits[-1]
        return (last - first) * self._tokens_per_step / ((ended_ns - began_ns) / 1e9)

    async def _step(self, report: dict[str, Any]) -> None:
        version, at_ns = int(report["version"]), int(report["at_ns"])
        self.loss_last = float(report["loss"])
        if self.loss_first is None:
            self.loss_first = self.loss_last
        if self._commits:
            self._recent_s.append((at_ns - self._commits[-1][1]) / 1e9)
        self._commits.append((version, at_ns))
        for kill in self.kills:
            if kill.recovered_ns is None and int(report["epoch"]) > kill.epoch:
                kill.recovered_ns, kill.step_after = at_ns, version
                await self._console.recovery(_told(kill))
        await self._show(version, report)
        if self._plans and version >= self._plans[0].step and self._recent_s:
            plan = self._plans.pop(0)
            delay_s = plan.fraction * statistics.median(self._recent_s)
            epoch = int(report["epoch"])
            asyncio.get_running_loop().call_later(delay_s, self._kill, plan, epoch)

    async def _show(self, version: int, report: dict[str, Any]) -> None:
        if report.get("held_out_loss") is not None:
            await self._console.note(f"held-out loss {report['held_out_loss']:.3f} nats/byte")
        per_step_s = statistics.median(self._recent_s) if self._recent_s else None
        progress = Progress(
            step=version,
            loss=self.loss_last,
            grad_norm=float(report["grad_norm"]),
            memory_bytes=sum(_resident_bytes(info.pid) for info in self.ranks().values()),
            tokens_per_s=self._tokens_per_step / per_step_s if per_step_s else None,
            tflops=self._flops_per_step / per_step_s / 1e12 if per_step_s else None,
        )
        await self._console.progress(progress, steps_total=self._steps)

    def _kill(self, plan: KillPlan, epoch: int) -> None:
        victim = self.ranks()[plan.rank]
        if not victim.pid:
            return  # the job has ended before this was called; pid 0 is this process's whole group
        survivors = sum(1 for info in self.ranks().values() if info.pid) - 1
        at_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        version = self._commits[-1][0]
        self.kills.append(Kill(plan.rank, victim.incarnation, version + 1, epoch, at_ns, survivors))

    def _lost(self, report: dict[str, Any]) -> None:
        for kill in self.kills:
            if (report["peer"], report["incarnation"]) == (kill.rank, kill.incarnation):
                kill.notices_ns.append(int(report["at_ns"]))


def _told(kill: Kill) -> Recovery:
    detection_ms, recovery_ms = kill.detection_ms(), kill.recovery_ms()
    return Recovery(
        rank=kill.rank,
        how="was killed (SIGKILL)",
        step=kill.step,
        detection_ns=None if detection_ms is None else round(detection_ms * 1e6),
        recovery_ns=None if recovery_ms is None else round(recovery_ms * 1e6),
        step_after=kill.step_after,
    )


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0


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
