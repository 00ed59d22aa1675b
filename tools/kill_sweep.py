"""Kill a rank of a small training job at every declared point, and check that the weights stay the same.

    python -m zbmd.tools.kill_sweep              every point, every rank, two passes each
    python -m zbmd.tools.kill_sweep --second     and a second kill at every point of the recovery
    python -m zbmd.tools.kill_sweep --zero 3     the job with its state shared out, by any of the others
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

import uvloop

from zbmd.actors.host import Host, HostConfig
from zbmd.actors.host_events import HostEvent, RankReport
from zbmd.actors.host_output import OutputLine
from zbmd.actors.rank_log import log_to_stderr
from zbmd.actors.runtime_env import LINKS_VARIABLE
from zbmd.actors.view import OnLoss
from zbmd.tools.cli import audit_run
from zbmd.training import job as training_job
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
OTHER_AREAS = frozenset({"zero", "mirror", "pipeline"})
"""Areas of points that a job with ZeRO passes, and those that one without does not."""
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
) -> Outcome:
    """Run the small job once with `fault` in `ZBMD_FAULT`; its ledger is checked. links: as `ZBMD_LINKS`.
    zero: the stage that shares its state out, 0 for none.

    Raises `UserError` if the run fails or the ledger does not balance.
    """
    run = _Run()
    config = HostConfig(
        target="zbmd.training",
        is_module=True,
        arguments=(
            *(*SHAPE, "--steps", str(STEPS), "--data", str(data), "--out", str(out)),
            *(("--zero", str(zero)) if zero else ()),
        ),
        world_size=world_size,
        on_loss=on_loss,
        max_restarts=RESTARTS_MAX,
        environment={faults.FAULT_VARIABLE: fault, LINKS_VARIABLE: links},
        preload=(zero_job.__name__ if zero else JOB_MODULE,),
    )
    host = Host(config, output=run, observer=run)
    ended = await host.run()
    told = "\n".join(run.lines)
    if ended.exit_code != 0 or not run.digest:
        raise UserError(f"with {fault!r} the job did not finish: {ended.reason}\n{told}")
    audited = audit_run(out)
    if (audited.steps, audited.steps_lost, audited.samples_skipped, audited.samples_repeated) != (
        STEPS,
        0,
        0,
        0,
    ):
        raise UserError(f"with {fault!r} the ledger does not balance: {audited}")
    failures = tuple(
        f"rank {down.rank}, incarnation {down.incarnation}: {down.reason}" for down in ended.failures
    )
    return Outcome(digest=run.digest, failures=failures, told=told)


def write_text(path: Path) -> Path:
    """Write a small text to train on, always the same."""
    path.write_bytes(
        b"".join(b"line %d: the quick brown fox jumps over %d lazy dogs\n" % (i, i * i) for i in range(400))
    )
    return path


def points_of(*, zero: bool) -> list[str]:
    """The points that the job may pass."""
    areas = {point: point.partition(".")[0] for point in sorted(faults.declared())}
    return [
        point for point, area in areas.items() if (area in ZERO_AREAS if zero else area not in OTHER_AREAS)
    ]


def single_kills(world_size: int, *, zero: bool = False) -> Iterator[str]:
    """One kill: every point outside collectives on every rank at two passes; inside them, at a stride."""
    for rank in range(world_size):
        for point in points_of(zero=zero):
            if point == "collective.point":
                for count in range(1, COLLECTIVE_CASES_MAX + 1):
                    yield f"rank{rank}:{point}:{count}"
            elif not point.startswith(("fetch.", "recall.", "mirror.restore")):  # a first life never does
                yield f"rank{rank}:{point}"
                yield f"rank{rank}:{point}:2"


def second_kills(world_size: int, *, zero: bool = False) -> Iterator[str]:
    """Rank 1 dies in its third step; then its replacement, or a survivor, dies in what follows.

    With ZeRO its replacement alone: with a survivor all copies of a shard may go, and the run ends.
    """
    if zero:
        yield from (f"rank1:zero.update:3,rank1#2:{point}" for point in ZERO_RECOVERY_POINTS)
        for count in range(1, RECOVERY_BOUNDARIES + 1):
            yield f"rank1:zero.update:3,rank1#2:collective.point:{count}"
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


def sweep(cases: Sequence[str], world_size: int, *, zero: int = 0) -> Coverage:
    """Run every case and print what became of it. zero: see `run_small_job`."""
    coverage = Coverage(points=tuple(points_of(zero=zero > 0)))
    behind_last: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="zbmd-sweep-") as scratch:
        data = write_text(Path(scratch, "text"))
        calm = uvloop.run(run_small_job(Path(scratch, "calm"), data, world_size=world_size, zero=zero)).digest
        for number, fault in enumerate(cases):
            place = fault.rpartition(":")[0]
            if place in behind_last:
                continue
            began = time.perf_counter()
            out = Path(scratch, str(number))
            found = uvloop.run(run_small_job(out, data, fault=fault, world_size=world_size, zero=zero))
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
    parser.add_argument("-n", type=int, default=WORLD_SIZE, help="ranks (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for point, description in sorted(faults.declared().items()):
            print(f"{point:20} {description}")
        return 0
    log_to_stderr()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    zero = arguments.zero > 0
    cases = list(single_kills(arguments.n, zero=zero))
    cases += second_kills(arguments.n, zero=zero) if arguments.second else ()
    try:
        coverage = sweep(
            [case for case in cases if arguments.only is None or arguments.only in case],
            arguments.n,
            zero=arguments.zero,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if coverage.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
