"""Kill a rank of a small training job at every declared point, and check that the weights stay the same.

    python -m zbmd.tools.kill_sweep              every point, every rank, two passes each
    python -m zbmd.tools.kill_sweep --second     and a second kill at every point of the recovery
    python -m zbmd.tools.kill_sweep --zero 3     the job with its state shared out, by any of the others
    python -m zbmd.tools.kill_sweep --mesh dp=2,pp=2 -n 4    a run on a mesh
    python -m zbmd.tools.kill_sweep --list       the points, in words

Each case is one run of the job under a host, with `ZBMD_FAULT` naming who dies where. The points inside
collectives are those of the programs: `collective.point:N` is the N-th instruction boundary passed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from zbmd.actors.host import Host, HostConfig
from zbmd.actors.host_events import HostEvent, RankDown, RankReport
from zbmd.actors.host_output import OutputLine
from zbmd.actors.rank_log import log_to_stderr
from zbmd.actors.runtime_env import LINKS_VARIABLE
from zbmd.actors.view import OnLoss
from zbmd.tools.cli import audit_run
from zbmd.training import job as training_job
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.tensor import run as mesh_run
from zbmd.training.tensor.options import TrainOptions
from zbmd.training.tensor.records import METRICS_NAME
from zbmd.training.zero import job as zero_job
from zbmd.transport import faults
from zbmd.transport.errors import UserError

WORLD_SIZE = 3
JOB_MODULE = training_job.__name__
"""Imported here too, since its imports declare the points."""
STEPS = 5
SHAPE = ("--width", "32", "--heads", "2", "--layers", "1", "--context", "16", "--shards", "6")
ZERO_RECOVERY_POINTS = ("zero.meet", "mirror.restore", "mirror.restore_middle", "mirror.restored", "zero.met")
ZERO_AREAS = frozenset({"zero", "mirror", "collective"})
MESH_RECOVERY_POINTS = ("mesh.meet", "mirror.restore", "mirror.restore_middle", "mirror.restored", "mesh.met")
MESH_AREAS = frozenset({"mesh", "mirror", "pipeline", "collective"})
OTHER_AREAS = frozenset({"zero", "mirror", "pipeline", "mesh"})
"""Areas of points that a job with ZeRO passes, a run on a mesh, and those that another job does not."""
RECOVERY_POINTS = ("commit.view", "commit.report", "fetch.begin", "fetch.middle", "fetch.end", "step.begin")
COLLECTIVE_CASES_MAX = 400
"""Instruction boundaries tried on one rank; its sweep ends at the first one behind its last."""

TOLD_LINES = 30
"""Lines of the ranks' output that are kept of a run."""

RESTARTS_MAX = 8
RECOVERY_BOUNDARIES = 30
"""Instruction boundaries of a replacement that are tried: its first barrier and its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one run. `failures`: a line for each rank that ended unexpectedly; `told`: the end of
    what the ranks wrote."""

    digest: str
    failures: tuple[str, ...]
    told: str

    @property
    def deaths(self) -> int:
        """How many ranks ended unexpectedly."""
        return len(self.failures)


@dataclass(slots=True)
class _Run:
    """Observer and output of a run."""

    digest: str = ""
    lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=TOLD_LINES))

    async def write_line(self, line: OutputLine) -> None:
        """Keep a rank's line, in case the run fails."""
        self.lines.append(f"[rank{line.rank}]: {line.text.decode(errors='replace')}")

    async def __call__(self, event: HostEvent) -> None:
        """Keep the result."""
        if isinstance(event, RankReport) and event.payload.get("kind") == "result":
            self.digest = event.payload["weights_sha256"]


async def run_small_job(
    out: Path,
    data: Path,
    *,
    fault: str = "",
    on_loss: OnLoss = OnLoss.REPLACE,
    world_size: int = WORLD_SIZE,
    links: str = "auto",
    zero: int = 0,
    mesh: str = "",
) -> Outcome:
    """Run the small job once with `fault` in `ZBMD_FAULT`; its ledger is checked. links: as `ZBMD_LINKS`.
    zero: the stage that shares its state out, 0 for none; mesh: a run of `zbmd train` on one.

    Raises `UserError` if the run fails or the ledger does not balance.
    """
    run = _Run()
    target, arguments, preload = _job_of(out, data, zero=zero, mesh=mesh)
    config = HostConfig(
        target=target,
        is_module=True,
        arguments=arguments,
        world_size=world_size,
        on_loss=on_loss,
        max_restarts=RESTARTS_MAX,
        environment={faults.FAULT_VARIABLE: fault, LINKS_VARIABLE: links},
        preload=(preload,),
    )
    host = Host(config, output=run, observer=run)
    ended = await host.run()
    told = "\n".join(run.lines)
    if ended.exit_code != 0 or not run.digest:
        raise UserError(f"with {fault!r} the job did not finish: {ended.reason}\n{told}")
    if mesh:
        _check_records(out, fault)
        return Outcome(digest=run.digest, failures=_failures(ended.failures), told=told)
    audited = audit_run(out)
    if (audited.steps, audited.steps_lost, audited.samples_skipped, audited.samples_repeated) != (
        STEPS,
        0,
        0,
        0,
    ):
        raise UserError(f"with {fault!r} the ledger does not balance: {audited}")
    return Outcome(digest=run.digest, failures=_failures(ended.failures), told=told)


def _failures(failures: Sequence[RankDown]) -> tuple[str, ...]:
    return tuple(f"rank {down.rank}, incarnation {down.incarnation}: {down.reason}" for down in failures)


def _job_of(out: Path, data: Path, *, zero: int, mesh: str) -> tuple[str, tuple[str, ...], str]:
    """Module, arguments, and what is imported ahead of them."""
    if mesh:
        return "zbmd.training.tensor", (mesh_recipe(out, data, mesh).encode(),), mesh_run.__name__
    arguments = (*SHAPE, "--steps", str(STEPS), "--data", str(data), "--out", str(out))
    if zero:
        return "zbmd.training", (*arguments, "--zero", str(zero)), zero_job.__name__
    return "zbmd.training", arguments, JOB_MODULE


def mesh_recipe(out: Path, data: Path, mesh: str) -> TrainOptions:
    """The small run on a mesh: a checkpoint and an evaluation are due on the way."""
    return TrainOptions(
        out=out,
        data=str(data),
        mesh=mesh,
        model=GPTConfig(width=32, heads=2, layers=2, context=16),
        training=TrainingConfig(steps=STEPS, shards=6),
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


def points_of(*, zero: bool, mesh: bool = False) -> list[str]:
    """The points that the job may pass."""
    areas = {point: point.partition(".")[0] for point in sorted(faults.declared())}
    if zero or mesh:
        wanted = ZERO_AREAS if zero else MESH_AREAS
        return [point for point, area in areas.items() if area in wanted]
    return [point for point, area in areas.items() if area not in OTHER_AREAS]


def single_kills(world_size: int, *, zero: bool = False, mesh: bool = False) -> Iterator[str]:
    """One kill: every point outside collectives on every rank at two passes; inside them, at a stride."""
    for rank in range(world_size):
        for point in points_of(zero=zero, mesh=mesh):
            if point == "collective.point":
                for count in range(1, COLLECTIVE_CASES_MAX + 1):
                    yield f"rank{rank}:{point}:{count}"
            elif not point.startswith(("fetch.", "recall.", "mirror.restore")):  # a first life never does
                yield f"rank{rank}:{point}"
                yield f"rank{rank}:{point}:2"


def second_kills(world_size: int, *, zero: bool = False, mesh: bool = False) -> Iterator[str]:
    """Rank 1 dies in its third step; then its replacement, or a survivor, dies in what follows.

    With ZeRO, and on a mesh, its replacement alone: with a survivor all copies of a shard may go, and the run
    ends.
    """
    if zero or mesh:
        before = "rank1:zero.update:3" if zero else "rank1:mesh.begin:3"
        points = ZERO_RECOVERY_POINTS if zero else MESH_RECOVERY_POINTS
        yield from (f"{before},rank1#2:{point}" for point in points)
        for count in range(1, RECOVERY_BOUNDARIES + 1):
            yield f"{before},rank1#2:collective.point:{count}"
        return
    first = "rank1:step.reduce:3"
    for point in RECOVERY_POINTS:
        yield f"{first},rank1#2:{point}"
    for count in range(1, RECOVERY_BOUNDARIES + 1):
        yield f"{first},rank1#2:collective.point:{count}"
    everybody = ",".join(f"rank{rank}:commit.finish" for rank in range(world_size))
    yield everybody  # the last version is preserved, and nobody who holds it is left
    yield f"{everybody},rank1#2:recall.begin"
    for rank in (0, 2):
        for point, count in (("commit.view", 2), ("commit.report", 3), ("step.begin", 4)):
            yield f"{first},rank{rank}:{point}:{count}"


@dataclass(slots=True)
class Coverage:
    """How often each point was tried, reached, and survived with the same bits."""

    tried: Counter[str] = field(default_factory=Counter[str])
    reached: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    points: tuple[str, ...] = ()

    def add(self, fault: str, deaths: int, *, same: bool) -> bool:
        """Note a case; return whether every kill of it took place."""
        entries = faults.parse(fault)
        reached = deaths >= len(entries)
        name = entries[-1].point + (" in a recovery" if len(entries) > 1 else "")
        self.tried[name] += 1
        self.reached[name] += reached
        if not same:
            self.wrong.append(fault)
        return reached

    def __str__(self) -> str:
        rows = [
            f"{name:32} {self.reached[name]:4} of {count:4} reached"
            for name, count in sorted(self.tried.items())
        ]
        missed = sorted(set(self.points) - {name.partition(" ")[0] for name in self.tried})
        rows.append(f"declared and not tried: {', '.join(missed) or 'none'}")
        total, reached = self.tried.total(), self.reached.total()
        rows.append(
            f"{total} cases, {reached} with every kill reached, {len(self.wrong)} with different bits"
        )
        return "\n".join(rows)


def sweep(cases: Sequence[str], world_size: int, *, zero: int = 0, mesh: str = "") -> Coverage:
    """Run every case and print what became of it. zero, mesh: see `run_small_job`."""
    coverage = Coverage(points=tuple(points_of(zero=zero > 0, mesh=mesh != "")))
    behind_last: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="zbmd-sweep-") as scratch:
        data = write_text(Path(scratch, "text"))

        def run(name: str, fault: str = "") -> Outcome:
            out = Path(scratch, name)
            job = run_small_job(out, data, fault=fault, world_size=world_size, zero=zero, mesh=mesh)
            return uvloop.run(job)

        calm = run("calm").digest
        for number, fault in enumerate(cases):
            place = fault.rpartition(":")[0]
            if place in behind_last:
                continue
            began = time.perf_counter()
            found = run(str(number), fault)
            same = found.digest == calm
            reached = coverage.add(fault, found.deaths, same=same)
            if not reached and "collective.point" in place:
                behind_last.add(place)
            took_s = time.perf_counter() - began
            print(
                f"{number + 1}/{len(cases)} {fault}: {found.deaths} deaths, "
                f"{'same bits' if same else 'DIFFERENT BITS'}, {took_s:.1f} s",
                flush=True,
            )
    print(coverage)
    return coverage


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep. Exit code 1: a run ended with other weights, or not at all."""
    parser = argparse.ArgumentParser(prog="python -m zbmd.tools.kill_sweep", description=__doc__)
    parser.add_argument("--second", action="store_true", help="also a second kill during the recovery")
    parser.add_argument("--only", help="only cases that contain this text")
    parser.add_argument("--list", action="store_true", help="print the points and end")
    parser.add_argument(
        "--zero", type=int, choices=(0, 1, 2, 3), default=0, help="stage; 0: none (%(default)s)"
    )
    parser.add_argument("--mesh", default="", help="of a run of zbmd train, such as dp=2,pp=2")
    parser.add_argument("-n", type=int, default=WORLD_SIZE, help="ranks (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for point, description in sorted(faults.declared().items()):
            print(f"{point:20} {description}")
        return 0
    log_to_stderr()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    zero, mesh = arguments.zero > 0, arguments.mesh != ""
    cases = list(single_kills(arguments.n, zero=zero, mesh=mesh))
    cases += second_kills(arguments.n, zero=zero, mesh=mesh) if arguments.second else ()
    try:
        coverage = sweep(
            [case for case in cases if arguments.only is None or arguments.only in case],
            arguments.n,
            zero=arguments.zero,
            mesh=arguments.mesh,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if coverage.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
