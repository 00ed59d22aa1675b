"""What ZeRO keeps on a rank, and what the copies at buddies cost, in real ranks of one host.

    python -m zbmd.tools.lab.bench.training.zero                       2, 4 and 8 ranks, stages 1 to 3
    python -m zbmd.tools.lab.bench.training.zero --ranks 2 --steps 40  for times: as many ranks as cores
    python -m zbmd.tools.lab.bench.training.zero --offload /mnt/nvme   not in files of a temporary folder

Peaks are of the arrays that a rank really had, the highest of all ranks, beside 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and
16Ψ/N bytes for Ψ parameters in bfloat16 with float32 masters. Each step is done by a trainer without copies,
by one with them, and by one whose masters and moments are in a file ("file": its bytes, and what of them was
in memory between steps), in turn; times are medians, and ratios are those of each round.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import uvloop

from zbmd.actors.cluster.jobs.host import HostConfig
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.group.group import Group, group
from zbmd.tools.bench.run_ranks import run_ranks
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.cli.options import add_json, script_parser
from zbmd.tools.train.command import recipe_of
from zbmd.training.job.mesh import DATA_AXIS, Mesh, MeshGroups
from zbmd.training.job.task import StepResult
from zbmd.training.redundancy.buddy import COPIES, BuddyReplica
from zbmd.training.redundancy.file import FileRedundancy
from zbmd.training.redundancy.interface import Digests
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.redundancy.stamped import NO_NOTE, StateName
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.sharded.run import open_recipe
from zbmd.training.sharded.stages import ONE_EACH, shard_layouts
from zbmd.training.sharded.zero_trainer import ZeroTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.step_hook import NO_HOOK, StepHook
from zbmd.training.zero.layout import MemoryKind
from zbmd.training.zero.options import ZeroOptions, arena_bytes_needed
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

# A rank: trains with and without copies of its shard, and from a file.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Peak bytes of this rank, and times: of each step, and of copies and waits for them a step.

    offloaded_bytes: of the file; resident_bytes: of it in memory between steps, at most.
    """

    parameters: int
    state_bytes: int
    buddy_bytes: int
    previous_bytes: int
    working_bytes: int
    step_ns: list[int]
    mirrored_ns: list[int]
    offloaded_ns: list[int]
    offloaded_bytes: int
    resident_bytes: int
    copy_ns: int
    waited_ns: int


def measured(worker: Worker, made: Group, recipe: Recipe, options: ZeroOptions, folder: Path) -> RankCost:
    """Do the recipe's steps with all trainers, after one of each to warm up."""
    groups = MeshGroups.along_data(made)
    plain = ZeroTrainer(recipe, groups, options)
    filed = ZeroTrainer(
        recipe, groups, options, offload=lambda elements: _file(folder, plain, made.size, elements)
    )
    file = filed.file
    assert file is not None, "it was given one"
    keeper = FileRedundancy(
        worker,
        filed.own,
        file,
        place=filed.own.rank,
        ranks=made.size,
        known=0,
        on_update=_ignore_update,
        on_commit=_ignore_commit,
        note=lambda _: NO_NOTE,
    )
    kept = ZeroTrainer(recipe, groups, options, keep_previous=True)
    mirror = BuddyReplica(
        worker,
        kept.own,
        place=kept.own.rank,
        ranks=made.size,
        copies=kept.own.mirror_copies(),
        known=0,
        on_update=_ignore_update,
        on_commit=_ignore_commit,
    )
    try:
        kept.enter(groups, mirror.meet(made))
        filed.enter(groups, keeper.meet(made))
        turns = ((plain, NO_HOOK), (kept, mirror), (filed, keeper))
        for trainer, watch in turns:
            trainer.run_step(watch)
        mirror.busy_ns = mirror.waited_ns = 0
        times: list[list[int]] = []
        resident_bytes = 0
        for _ in range(recipe.config.steps):
            times.append([_timed(trainer, watch) for trainer, watch in turns])
            resident_bytes = max(resident_bytes, file.resident_bytes())
        steps = len(times)
        shard_bytes = kept.own.slots[0].nbytes
        return RankCost(
            parameters=recipe.model.layout.parameter_count,
            state_bytes=plain.memory.state_bytes_most,
            buddy_bytes=kept.memory.most[MemoryKind.MIRROR] - shard_bytes,
            previous_bytes=kept.memory.most[MemoryKind.MIRROR] - SLOTS * shard_bytes,
            working_bytes=plain.memory.most[MemoryKind.WORKING],
            step_ns=[one[0] for one in times],
            mirrored_ns=[one[1] for one in times],
            offloaded_ns=[one[2] for one in times],
            offloaded_bytes=sum(slot.nbytes for slot in file.slots),
            resident_bytes=resident_bytes,
            copy_ns=mirror.busy_ns // steps,
            waited_ns=mirror.waited_ns // steps,
        )
    finally:
        file.remove()
        for watcher in (mirror, keeper):
            watcher.epoch_over()
            watcher.close()


def _file(folder: Path, like: ZeroTrainer, ranks: int, elements: int) -> StateFile:
    name = StateName(run=os.getppid(), place=like.own.rank, ranks=ranks, elements=elements)
    return StateFile(folder, name, again=False)


def _timed(trainer: ZeroTrainer, watch: StepHook) -> int:
    began_ns = now_ns()
    trainer.run_step(watch)
    return now_ns() - began_ns


def _ignore_update(done: StepResult) -> None:
    """Ignore it."""


def _ignore_commit(version: int, digests: Digests) -> None:
    """Ignore it."""


async def run_rank() -> None:
    """Measure on this rank, and report."""
    launched = RankEnvironment.read(os.environ)
    ranks = 1 if launched is None else launched.world_size
    asked = recipe_of(sys.argv[1:], ranks=ranks)
    recipe, options = open_recipe(asked, ranks), asked.zero_options
    folder, config = asked.offload or asked.out / "offload", recipe.config
    layouts = shard_layouts(recipe.model.config, Mesh.of(ranks, {DATA_AXIS: ranks}), ONE_EACH)
    arena_bytes = sum(arena_bytes_needed(layouts, config, options, copies=copies) for copies in (0, COPIES))
    async with join(arena=arena_bytes) as worker:
        made = await group(worker)
        cost = await asyncio.to_thread(measured, worker, made, recipe, options, folder)
        worker.report({"cost": asdict(cost)})
        await made.barrier()
        await made.close()


RANKS = (2, 4, 8)
STAGES = (1, 2, 3)
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
    """Return the bytes that a stage promises a rank: weights and gradients in 16 bits, 12 bytes of state."""
    per_parameter = {1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}
    return round(parameters * per_parameter[stage])


async def measure(
    directory: Path, *, ranks: int, stage: int, steps: int, shape: Sequence[str], offload: Path | None = None
) -> ZeroCost:
    """Run one stage on so many ranks. Raises `UserError` if the run fails."""
    data = write_text(directory / "text")
    config = HostConfig(
        target="zbmd.tools.lab.bench.training.zero",
        is_module=True,
        arguments=(
            *(*shape, "--data", str(data), "--out", str(directory), "--steps", str(steps)),
            *("--zero", str(stage), "--precision", "bf16"),
            *(("--offload", str(offload)) if offload is not None else ()),
        ),
        world_size=ranks,
        preload=("zbmd.training.sharded.zero_trainer",),
    )
    costs = [
        msgspec.convert(report["cost"], RankCost) for report in await run_ranks(config) if "cost" in report
    ]
    if len(costs) != ranks:
        raise UserError(f"{len(costs)} of {ranks} ranks reported what they measured")
    first = costs[0]
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
    if RankEnvironment.read(os.environ) is not None:
        uvloop.run(run_rank())
        return 0
    parser = script_parser("lab.bench.training.zero", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--steps", type=int, default=5, help="of each trainer (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (%(default)s)")
    parser.add_argument("--offload", type=Path, metavar="FOLDER", help="where states in files lie")
    add_json(parser)
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
