"""What ZeRO keeps on a rank, and what the copies at buddies cost, in real ranks of one host.

    python -m zbmd.tools.lab.bench.training.zero                       2, 4 and 8 ranks, stages 1 to 3
    python -m zbmd.tools.lab.bench.training.zero --ranks 2 --steps 40  for times: as many ranks as there are
        cores
    python -m zbmd.tools.lab.bench.training.zero --offload /mnt/nvme   the folder of those files, not a
        temporary
        one

Peaks are of the arrays that a rank really had, the highest of all ranks, beside 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and
16Ψ/N bytes for Ψ parameters in bfloat16 with float32 masters. Each step is done by a trainer without copies,
by one with them, and by one whose masters and moments are in a file ("file": its bytes, and what of them was
in memory between steps), in turn; times are medians, and ratios are those of each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import uvloop

from zbmd.actors.host.events import HostEvent, RankReport
from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.process.output import OutputLine
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.lab.bench.training import zero_rank as bench_zero_rank
from zbmd.transport.errors import UserError

RANKS = (2, 4, 8)
STAGES = (1, 2, 3)
TOLD_LINES_MAX = 40
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCost:
    """Of one stage on so many ranks: peak bytes a rank, and medians of times."""

    ranks: int
    stage: int
    parameters: int
    state_bytes: int
    goal_bytes: int
    buddy_bytes: int
    previous_bytes: int
    working_bytes: int
    step_ms: float
    mirrored_ratio: float
    offloaded_bytes: int
    resident_bytes: int
    offloaded_ratio: float
    copy_ms: float
    waited_ms: float


def goal_bytes(parameters: int, stage: int, ranks: int) -> int:
    """What the stage promises a rank, bytes: weights and gradients in 16 bits, 12 bytes of state."""
    per_parameter = {1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}
    return round(parameters * per_parameter[stage])


@dataclass(slots=True)
class _Run:
    """Observer and output of a run."""

    reports: list[bench_zero_rank.RankCost] = field(default_factory=list[bench_zero_rank.RankCost])
    lines: list[str] = field(default_factory=list[str])

    async def write_line(self, line: OutputLine) -> None:
        """Keep a rank's line, in case the run fails."""
        self.lines = [*self.lines[1 - TOLD_LINES_MAX :], line.text.decode(errors="replace")]

    async def __call__(self, event: HostEvent) -> None:
        """Keep what a rank has measured."""
        if isinstance(event, RankReport) and event.payload.get("kind") == bench_zero_rank.KIND:
            self.reports.append(msgspec.convert(event.payload["cost"], bench_zero_rank.RankCost))


async def measure(
    directory: Path, *, ranks: int, stage: int, steps: int, shape: Sequence[str], offload: Path | None = None
) -> ZeroCost:
    """Run one stage on so many ranks. Raises `UserError` if the run fails."""
    run = _Run()
    data = write_text(directory / "text")
    config = HostConfig(
        target="zbmd.tools.lab.bench.training.zero_rank",
        is_module=True,
        arguments=(
            *(*shape, "--data", str(data), "--out", str(directory), "--steps", str(steps)),
            *("--zero", str(stage), "--storage", "bfloat16"),
            *(("--offload", str(offload)) if offload is not None else ()),
        ),
        world_size=ranks,
        preload=("zbmd.training.zero.job",),
    )
    ended = await Host(config, output=run, observer=run).run()
    if ended.exit_code != 0 or len(run.reports) != ranks:
        raise UserError(f"{ranks} ranks did not end well: {ended.reason}\n" + "\n".join(run.lines))
    costs, first = run.reports, run.reports[0]
    times = [(cost.step_ns, cost.mirrored_ns, cost.offloaded_ns) for cost in costs]
    ratios = [(b / a, c / a) for one in times for a, b, c in zip(*one, strict=True)]
    return ZeroCost(
        ranks=ranks,
        stage=stage,
        parameters=first.parameters,
        state_bytes=max(cost.state_bytes for cost in costs),
        goal_bytes=goal_bytes(first.parameters, stage, ranks),
        buddy_bytes=max(cost.buddy_bytes for cost in costs),
        previous_bytes=max(cost.previous_bytes for cost in costs),
        working_bytes=max(cost.working_bytes for cost in costs),
        step_ms=statistics.median(ns for cost in costs for ns in cost.step_ns) / 1e6,
        mirrored_ratio=statistics.median(ratio[0] for ratio in ratios),
        offloaded_bytes=max(cost.offloaded_bytes for cost in costs),
        resident_bytes=max(cost.resident_bytes for cost in costs),
        offloaded_ratio=statistics.median(ratio[1] for ratio in ratios),
        copy_ms=max(cost.copy_ns for cost in costs) / 1e6,
        waited_ms=max(cost.waited_ns for cost in costs) / 1e6,
    )


def line_of(cost: ZeroCost) -> str:
    """A row of the table."""
    return (
        f"{cost.ranks:5} {cost.stage:5} {cost.state_bytes / MIB:10.2f} {cost.goal_bytes / MIB:10.2f} "
        f"{cost.state_bytes / cost.goal_bytes:7.3f} {cost.buddy_bytes / MIB:10.2f} "
        f"{cost.previous_bytes / MIB:10.2f} {cost.working_bytes / MIB:10.2f} {cost.step_ms:9.1f} "
        f"{cost.mirrored_ratio:7.3f} {cost.copy_ms:8.2f} {cost.waited_ms:8.2f} "
        f"{cost.offloaded_bytes / MIB:9.2f} {cost.resident_bytes / MIB:7.2f} {cost.offloaded_ratio:6.2f}"
    )


HEAD = (
    "ranks stage  state MiB   goal MiB   ratio  buddy MiB   prev MiB   work MiB   step ms  mirror"
    "  copy ms  wait ms  file MiB  in mem   file"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a row for each number of ranks and stage. Exit code 1: a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m zbmd.tools.lab.bench.training.zero",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--steps", type=int, default=5, help="of each trainer (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (%(default)s)")
    parser.add_argument("--offload", type=Path, metavar="FOLDER", help="where states in files lie")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each row")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    shape = (
        *("--width", str(arguments.width), "--layers", str(arguments.layers), "--context", "32"),
        *("--heads", "2", "--shards", "8", "--sequences-per-shard", "1"),
    )
    print(HEAD if not arguments.json else "", end="" if arguments.json else "\n")
    for ranks in arguments.ranks:
        for stage in arguments.stages:
            with tempfile.TemporaryDirectory(prefix="zbmd-zero-") as scratch:
                try:
                    run = measure(
                        Path(scratch),
                        ranks=ranks,
                        stage=stage,
                        steps=arguments.steps,
                        shape=shape,
                        offload=arguments.offload,
                    )
                    cost = uvloop.run(run)
                except UserError as error:
                    print(f"error: {error}", file=sys.stderr)
                    return 1
            told = msgspec.json.encode(asdict(cost)).decode() if arguments.json else line_of(cost)
            print(told, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
