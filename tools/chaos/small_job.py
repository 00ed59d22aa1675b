"""A small training job for tests and tools: some steps under a host, with faults or without.

Its data, model and steps are always the same, so that its weights can be compared.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.hosted_job import KEEP_MEMORY_VARIABLE
from zbmd.actors.cluster.jobs.reports import HostEvent, RankDown, RunResult
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.rank.environment import LINKS_VARIABLE, RankEnvironment
from zbmd.actors.view import OnLoss
from zbmd.tools.bench.run_ranks import RanksOutput
from zbmd.tools.runs.commands import audit_run
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.job.records import METRICS_NAME
from zbmd.training.optim import OPTIMIZERS
from zbmd.training.optim.mixed_precision import SCALE_MOST, Precision
from zbmd.training.sharded import run as mesh_run
from zbmd.training.sharded.options import TrainOptions
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

RANKS_DEFAULT = 3
JOB_MODULE = mesh_run.__name__
"""Imported here too, since its imports declare the points."""
STEPS = 5
SHAPE = ("--width", "32", "--heads", "2", "--layers", "1", "--context", "16", "--shards", "6")
RESTARTS_MAX = 8
RUN_S_MAX = 400.0
"""A run takes a second or two where nothing else does. One that takes this long hangs."""
PROGRAM_LINES = 400
"""The last lines of a program that are kept: tracebacks of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """What became of one run. `failures`: a line for each rank that ended unexpectedly; `told`: the end of
    what the ranks wrote."""

    digest: str
    failures: tuple[str, ...]
    told: str

    @property
    def deaths(self) -> int:
        """Number of ranks that ended unexpectedly."""
        return len(self.failures)


def variables_for(fault: str) -> dict[str, str]:
    """Return what a run needs in its environment so that a rank passes the points of `fault`.

    A replacement pulls its state from another rank only if the memory of its predecessor is gone.
    """
    return {KEEP_MEMORY_VARIABLE: "off"} if "mirror.restore" in fault else {}


async def run_small_job(
    out: Path,
    data: Path,
    *,
    fault: str = "",
    on_loss: OnLoss = OnLoss.REPLACE,
    world_size: int = RANKS_DEFAULT,
    links: str = "auto",
    zero: int = 0,
    offload: Path | None = None,
    mesh: str = "",
    precision: Precision = "float32",
    optimizer: str = "adamw",
    counts: Path | None = None,
    limit_s: float = RUN_S_MAX,
    template: EarlyTemplate | None = None,
    changes: Mapping[str, int] | None = None,
    see: Callable[[HostEvent], None] | None = None,
) -> JobOutcome:
    """Run the small job once with `fault` in `ZBMD_FAULT`; its ledger is checked. links: as `ZBMD_LINKS`.
    zero: the stage that shards the state, 0 for none; offload: the folder of its files; mesh: empty for ranks
    along `dp`; optimizer: its name; counts: a directory that
    ranks write to how often they pass each point (`count_passes`), and none dies; limit_s: a run that takes
    longer has failed; template: one that was forked for this job; changes: in how a run of
    `zbmd train` is trained; see: is given what the host tells.

    Raises `UserError` if the run fails or the ledger does not balance.
    """
    output = RanksOutput(see)
    recipe = small_recipe(
        out,
        data,
        mesh,
        precision=precision,
        zero=zero,
        offload=offload,
        optimizer=optimizer,
        **(changes or {}),
    )
    target, arguments = "zbmd.training.sharded", [recipe.encode()]
    if counts is not None:
        target, arguments = __name__, [str(counts), target, *arguments]
    config = HostConfig(
        target=target,
        is_module=True,
        arguments=tuple(arguments),
        world_size=world_size,
        on_loss=on_loss,
        max_restarts=RESTARTS_MAX,
        environment={faults.FAULT_VARIABLE: fault, LINKS_VARIABLE: links},
        preload=(JOB_MODULE,),
    )
    ended = await ended_within(Host(config, output=output, observer=output, template=template), limit_s)
    told = "\n".join(output.lines)
    digests = [one["weights_sha256"] for one in output.reports if one.get("kind") == "result"]
    if ended.exit_code != 0 or not digests:
        raise UserError(f"with {fault!r} the job did not finish: {ended.reason}\n{told}")
    _check_records(out, fault)
    audited = audit_run(out)
    lost = audited.steps_lost + audited.samples_skipped + audited.samples_repeated
    if audited.steps != STEPS or lost:
        raise UserError(f"with {fault!r} the ledger does not balance: {audited}")
    return JobOutcome(digest=digests[-1], failures=failures_of(ended.failures), told=told)


async def run_program(
    program: str,
    arguments: Sequence[str],
    ranks: int,
    on_loss: OnLoss = OnLoss.REPLACE,
    template: EarlyTemplate | None = None,
) -> JobOutcome:
    """Run a program (a path that ends in .py) or a module on ranks to its end.

    The digest is that of the weights in the result of rank 0; "" if there is none. Raises `UserError` if the
    run fails.
    """
    output = RanksOutput(lines=deque(maxlen=PROGRAM_LINES))
    config = HostConfig(
        target=program,
        is_module=not program.endswith(".py"),
        arguments=tuple(arguments),
        world_size=ranks,
        on_loss=on_loss,
        preload=(JOB_MODULE,),
    )
    ended = await ended_within(Host(config, output=output, observer=output, template=template), RUN_S_MAX)
    told = "\n".join(output.lines)
    if ended.exit_code != 0:
        raise UserError(f"{program} failed: {ended.reason}\n{told}")
    digest = next((one["weights_sha256"] for one in output.reports if one.get("kind") == "result"), "")
    return JobOutcome(digest=digest, failures=failures_of(ended.failures), told=told)


async def ended_within(host: Host, limit_s: float) -> RunResult:
    """Run a host; one that takes longer hangs, and is killed."""
    stop = f"the run hung: it was not over after {limit_s} s"
    limit = asyncio.get_running_loop().call_later(limit_s, lambda: host.stop(stop, kill=True))
    ended = await host.run()
    limit.cancel()
    return ended


def failures_of(failures: Sequence[RankDown]) -> tuple[str, ...]:
    """Return a line for each rank that ended unexpectedly."""
    return tuple(f"rank {down.rank}, incarnation {down.incarnation}: {down.reason}" for down in failures)


def small_recipe(
    out: Path,
    data: Path,
    mesh: str = "",
    *,
    precision: Precision = "float32",
    zero: int = 0,
    offload: Path | None = None,
    optimizer: str = "adamw",
    **changes: int,
) -> TrainOptions:
    """Return the small run of `zbmd train`: evaluations and a checkpoint are due, and float16 overflows.

    changes: in its `TrainingConfig`.
    """
    return TrainOptions(
        out=out,
        data=str(data),
        mesh=mesh or "dp=-1",
        zero=zero,
        precision=precision,
        offload=offload,
        loss_scale=SCALE_MOST,
        model=GPTConfig(width=32, heads=2, layers=2 if mesh else 1, context=16),
        training=TrainingConfig(
            **{"steps": STEPS, "shards": 6, "optimizer": OPTIMIZERS[optimizer], **changes}  # type: ignore[arg-type]
        ),
        evaluate_every=2,
        evaluate_windows=4,
        checkpoint_every=3,
    )


def _check_records(out: Path, fault: str) -> None:
    """Raise `UserError` unless each step was noted once, in order."""
    lines = [msgspec.json.decode(line) for line in (out / METRICS_NAME).read_bytes().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    if steps != list(range(1, STEPS + 1)):
        raise UserError(f"with {fault!r} steps {steps} are noted")


def write_text(path: Path) -> Path:
    """Write a small text to train on, always the same."""
    path.write_bytes(
        b"".join(b"line %d: the quick brown fox jumps over %d lazy dogs\n" % (i, i * i) for i in range(400))
    )
    return path


# How often each rank of a job passes each kill point: `chaos.sweep` learns from it where a kill can be.

NEVER: Final = 10**15
"""A pass that no run comes to."""

Passes = dict[str, int]
"""Number of passes of each point; points without a pass are left out."""


def _path(directory: Path, rank: int) -> Path:
    return directory / f"passes{rank}.json"


def read_passes(directory: Path, ranks: int) -> list[Passes]:
    """Return the passes of each rank of a run. Raises `UserError` if one is missing."""
    try:
        return [
            msgspec.json.decode(_path(directory, rank).read_bytes(), type=Passes) for rank in range(ranks)
        ]
    except (OSError, ValueError) as error:
        raise UserError(f"a rank has not written which kill points it passes: {error}") from error


def count_passes(argv: Sequence[str]) -> None:
    """Run a module or script as `__main__` in a rank, every point armed for a pass that never comes.

    argv: DIRECTORY MODULE ARGUMENT…, where MODULE may be a path that ends in .py; what was passed is written
    to DIRECTORY as it ends.
    """
    directory, module, *arguments = argv
    launched = RankEnvironment.read(os.environ)
    if launched is None:
        raise UserError("passes are counted in a rank: run zbmd.tools.chaos.sweep")
    points = ",".join(f"rank{launched.rank}:{point}:{NEVER}" for point in faults.declared())
    os.environ[faults.FAULT_VARIABLE] = points
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        passed = {point: NEVER - left for point, left in faults.left().items() if left < NEVER}
        _path(Path(directory), launched.rank).write_bytes(msgspec.json.encode(passed))


if __name__ == "__main__":
    count_passes(sys.argv[1:])
