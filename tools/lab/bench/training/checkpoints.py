"""Measure what a checkpoint costs the steps beside it: written by a snapshot process, and by the ranks.

    python -m zbmd.tools.lab.bench.training.checkpoints                      2 ranks, 150 MiB of state
    python -m zbmd.tools.lab.bench.training.checkpoints --width 1024 --layers 7        1 GiB of it
    python -m zbmd.tools.lab.bench.training.checkpoints --writers held --rounds 5      a snapshot each step

The runs have the same steps: without checkpoints, and with one each `--every` steps by either writer. The
cost is the time of all steps beside and after a checkpoint until the next one, less that of as many steps of
the first run: the stall, and what copying and writing take of the processors that ranks use. The stall is
what the rank that waits longest for copies of its state waits longer than in the first run, by its profile.
`held` is a run without checkpoints whose state a snapshot process holds after each step: its cost is that of
a step.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.process.output import OutputLine
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.node.run import snapshot_keeper
from zbmd.tools.train.command import recipe_of
from zbmd.training.profiler.lines import read_profiles
from zbmd.transport.errors import UserError

WARM_UP: Final = 12
"""First steps that do not count: the snapshot process comes in these."""
LINES_KEPT: Final = 20
SNAPSHOTS_S: Final = 5.0
STALL: Final = "checkpoint"
"""The category of a profile: what a step waits for while a state is written."""
NONE, HELD, SNAPSHOTS, RANKS = "none", "held", "snapshots", "ranks"
WRITERS: Final = (HELD, SNAPSHOTS, RANKS)


class CheckpointCost(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one writer; seconds. Shares: of a step, for a checkpoint; load: of the machine."""

    writer: str
    step_s: float
    cost_s: float
    share: float
    stall_s: float
    stall_share: float
    checkpoints: int
    load: float


@dataclass(slots=True)
class _Observer:
    """Takes the times of committed steps, and the last lines of a run."""

    at_ns: list[int] = field(default_factory=list[int])
    lines: list[str] = field(default_factory=list[str])

    async def write_line(self, line: OutputLine) -> None:
        """Keep a rank's line, in case the run fails."""
        self.lines = [*self.lines[1 - LINES_KEPT :], line.text.decode(errors="replace")]

    async def __call__(self, event: HostEvent) -> None:
        """Note a committed step."""
        if isinstance(event, RankReport) and event.payload.get("kind") == "step":
            self.at_ns.append(int(event.payload["at_ns"]))


async def steps_of(
    directory: Path, shape: Sequence[str], *, writer: str, every: int, count: int
) -> tuple[float, float]:
    """Return the mean time of a step of a run with `count` checkpoints, and its waits for each, in seconds.

    Raises `UserError` if the run fails.
    """
    steps = WARM_UP - WARM_UP % every + every * (count + 1)
    words = [*shape, "--steps", str(steps), "--data", str(write_text(directory / "text"))]
    words += ["--out", str(directory / writer), "--evaluate-every", "0"]
    words += ["--checkpoint-every", str(every) if writer in (SNAPSHOTS, RANKS) else "0"]
    config = HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(recipe_of(words, ranks=2).encode(),),
        world_size=2,
        preload=("zbmd.training.sharded.run",),
    )
    idle_s = SNAPSHOTS_S if writer in (HELD, SNAPSHOTS) else 0.0
    observer = _Observer()
    keeper = snapshot_keeper(config, idle_s, observer.lines.append)
    ended = await Host(config, output=observer, observer=observer, snapshots=keeper).run()
    if ended.exit_code:
        raise UserError(f"the run by {writer} failed: {ended.reason}\n" + "\n".join(observer.lines))
    first = steps - 1 - every * count  # the last step waits for its checkpoint
    stalls_ns = [
        sum(line.ns.get(STALL, 0) for line in life.steps if first < line.step < steps)
        for life in read_profiles(directory / writer)
    ]
    step_s = (observer.at_ns[steps - 2] - observer.at_ns[first - 1]) / 1e9 / (steps - 1 - first)
    return step_s, max(stalls_ns) / 1e9 / count


def measured(
    shape: Sequence[str], writers: Sequence[str], *, every: int, count: int, rounds: int
) -> list[CheckpointCost]:
    """Return the figures of no writer and of these, from the medians of interleaved rounds."""
    found: dict[str, list[tuple[float, float]]] = {writer: [] for writer in (NONE, *writers)}
    for _ in range(rounds):
        for writer in found:
            with tempfile.TemporaryDirectory(prefix="zbmd-checkpoints-") as name:
                run = steps_of(Path(name), shape, writer=writer, every=every, count=count)
                found[writer].append(uvloop.run(run))
    plain_s, waits_s = (statistics.median(each) for each in zip(*found[NONE], strict=True))
    costs: list[CheckpointCost] = []
    for writer, runs in found.items():
        step_s, stall_s = (statistics.median(each) for each in zip(*runs, strict=True))
        steps, saves = 1 if writer == HELD else every, writer in (SNAPSHOTS, RANKS)
        costs.append(
            CheckpointCost(
                writer=writer,
                step_s=round(step_s, 4),
                cost_s=round((step_s - plain_s) * steps, 4),
                share=round((step_s - plain_s) * steps / plain_s, 3),
                stall_s=round(stall_s - waits_s, 4),
                stall_share=round((stall_s - waits_s) / plain_s, 4),
                checkpoints=rounds * count if saves else 0,
                load=round(os.getloadavg()[0], 1),
            )
        )
    return costs


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each writer."""
    parser = script_parser("lab.bench.training.checkpoints", __doc__)
    parser.add_argument("--width", type=int, default=512, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    parser.add_argument("--every", type=int, default=6, help="steps of a checkpoint (%(default)s)")
    parser.add_argument("--count", type=int, default=3, help="checkpoints of a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of all runs (%(default)s)")
    parser.add_argument("--writers", nargs="+", choices=WRITERS, default=WRITERS, help="to measure (all)")
    add_json(parser)
    arguments = parser.parse_args(argv)
    log_to_stderr()
    shape = ["--width", str(arguments.width), "--layers", str(arguments.layers), "--heads", "8"]
    shape += ["--context", "64", "--sequences-per-shard", "1", "--shards", "2"]

    given = {name: getattr(arguments, name) for name in ("every", "count", "rounds")}
    for one in measured(shape, arguments.writers, **given):
        if arguments.json:
            print(msgspec.json.encode(one).decode(), flush=True)
        else:
            what = "a snapshot" if one.writer == HELD else "a checkpoint"
            cost = f"{what} costs {one.cost_s:.3f} s, {one.share:.1%} of a step, and stalls it "
            cost += f"for {one.stall_s * 1e3:.1f} ms, {one.stall_share:.1%}"
            print(f"{one.writer:10} step {one.step_s:.3f} s  {cost}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
