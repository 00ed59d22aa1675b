"""`python -m zbmd.training --zero STAGE`: the training job with its state shared out over the ranks.

Every rank's shard has a copy at a buddy (`mirror`), so a rank that is killed is replaced, its shard pulled
from there, and the run ends with the bits of one that nothing disturbed. With `--offload` the shard is in a
file, which the replacement opens. The world keeps its size: shards are cut for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import Worker, join
from zbmd.actors.view import View
from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.collectives.commit.driver import StepFailed
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.group import Group, group_of
from zbmd.training.autograd import spans
from zbmd.training.checkpoint.sharded import SavedState, checkpoint_in, open_state, write_shards
from zbmd.training.model.gpt import GPT
from zbmd.training.model.weights import WEIGHTS_NAME, save_weights
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import storage_dtype
from zbmd.training.profiler.profiler import open_profiler
from zbmd.training.redundancy.buddy import COPIES, BuddyReplica
from zbmd.training.redundancy.file import FileRedundancy
from zbmd.training.redundancy.interface import Digests, JobEnd, Redundancy, through_epochs
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.redundancy.state_file import Note, StateFile, StateName, require_folder
from zbmd.training.replicated.job import (
    JobOptions,
    JobResult,
    check_data,
    log_header,
    open_recipe,
    plan_of,
    report_losses,
    require_beginning,
    result_of,
)
from zbmd.training.run.journal import adopted_report, report_result, step_report
from zbmd.training.run.ledger import LOG_NAME, CommitLog, CommitRecord, read_header
from zbmd.training.run.repeated_oom import raise_for
from zbmd.training.step.memory_estimate import RankMemory, StepOutOfMemory, activation_bytes, require_memory
from zbmd.training.step.recipe import Recipe
from zbmd.training.zero.rank import ZeroRank, slot_elements
from zbmd.training.zero.trainer import ZeroOptions, ZeroStepResult, ZeroTrainer, arena_bytes_needed, shards_of
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import OutOfMemory, PeerLost, UserError
from zbmd.transport.native._native import now_ns

BEGIN_POINT = faults.declare("zero.begin", "before a step")
MEET_POINT = faults.declare("zero.meet", "in a new epoch, before its members say what they hold")
MET_POINT = faults.declare("zero.met", "when they have agreed on what they go on from")
SAVED_POINT = faults.declare("zero.saved", "when the weights are on disk, before the ranks part")
PARTED_POINT = faults.declare("zero.parted", "when the ranks part, before this one has left")

NOTE_HEAD = 4
"""Numbers of a step's record beside the losses of its logical shards."""
RECORDS_KEPT = 3
"""Steps whose record a rank keeps, its last ones: the next one to be logged is among them."""


_SMALLER = "Choose a higher --zero stage, a smaller model, fewer sequences a shard, or more ranks."


async def run_zero(options: JobOptions, zero: ZeroOptions) -> JobResult | None:
    """The job on this rank; the lowest rank tells and returns the result, the others return None.

    Raises `UserError` for what only a person can mend: settings, a state that was lost, a divergence.
    """
    launched = RankEnvironment.read(os.environ)
    ranks = 1 if launched is None else launched.world_size
    again = launched is not None and launched.incarnation > 1
    here = 1 if launched is None else launched.ranks_per_host
    arena_bytes = check_memory(options, zero, ranks=ranks, ranks_here=here)
    recipe = open_recipe(options, prepare=not again)
    if not again:
        require_beginning(options, recipe, zero_plan_of(recipe, zero))
    try:
        async with join(arena=arena_bytes, enter=False) as worker:
            return await ZeroJob(worker, recipe, options, zero, again=again).run()
    except StepFailed as error:
        path = checkpoint_in(options.out)
        how = f"Go on with --resume {path} and" if path else "Start again with"
        raise UserError(f"{error}. {how} a new --out.") from error
    except TrainingDiverged as error:
        raise UserError(str(error)) from error
    except StepOutOfMemory as error:
        raise_for(error, options.out, launched)
    except (OutOfMemory, MemoryError) as error:
        raise UserError(
            f"ZeRO-{zero.stage} of this model over {ranks} ranks does not fit into memory: {error}. "
            f"{_SMALLER}"
        ) from error


def check_memory(options: JobOptions, zero: ZeroOptions, *, ranks: int, ranks_here: int) -> int:
    """Bytes of arena that each of `ranks` needs, of which `ranks_here` are on this host.

    Raises `UserError` for a model for which there is no memory, before any of it is taken.
    """
    training = options.training
    arena_bytes = arena_bytes_needed(GPT(options.model), training, zero, ranks=ranks, copies=COPIES)
    needs = RankMemory(
        state_bytes=arena_bytes,
        activation_bytes=activation_bytes(
            options.model,
            rows=training.sequences_per_shard * options.model.context,
            passes=max(stop - start for start, stop in assign_shards(training.shards, ranks)),
        ),
    )
    require_memory(options.model, needs, ranks=ranks_here, advice=_SMALLER)
    return arena_bytes


def check_zero(options: JobOptions, zero: ZeroOptions, *, ranks: int, is_named: bool) -> None:
    """Raise `UserError` for what cannot be on `ranks` ranks of this host, before one is started.

    is_named: as of `check_data`.
    """
    check_memory(options, zero, ranks=ranks, ranks_here=ranks)
    if zero.offload is not None:
        elements = _elements(GPT(options.model), options, zero, ranks)
        note = NOTE_HEAD + options.training.shards
        require_folder(zero.offload, elements=elements, ranks=ranks, note=note)
    check_data(options, plan=lambda recipe: zero_plan_of(recipe, zero), is_named=is_named)


def _elements(model: GPT, options: JobOptions, zero: ZeroOptions, ranks: int) -> int:
    return slot_elements(shards_of(model, ranks), options.training.optimizer, storage_dtype(zero.storage))


def zero_plan_of(recipe: Recipe, zero: ZeroOptions) -> str:
    """As `plan_of`; stages and the number of ranks change no bit."""
    return plan_of(recipe, precision=zero.storage, loss_scale=zero.loss_scale)


class ZeroJob:
    """One rank's side of the job, through all of its epochs. again: whether this is a replacement."""

    def __init__(
        self, worker: Worker, recipe: Recipe, options: JobOptions, zero: ZeroOptions, *, again: bool = False
    ) -> None:
        self._worker, self._recipe, self._options, self._zero = worker, recipe, options, zero
        self._plan = zero_plan_of(recipe, zero)
        self._saved: SavedState | None = None
        if options.resume is not None:
            self._saved = open_state(options.resume, plan=self._plan)
        path, base = options.out / LOG_NAME, 0 if self._saved is None else self._saved.version
        if again and path.exists():  # what the run began with may have been written over since
            base = read_header(path).base_version
        self._base = base
        self._log = CommitLog(path, log_header(worker, recipe, self._plan, base))
        self._trainer: ZeroTrainer | None = None
        self._keeper: Redundancy | None = None
        self._again = again
        self._file: StateFile | None = None
        self._group: Group | None = None
        self._records: dict[int, ZeroStepResult] = {}
        self._profiler = open_profiler(options.out, recipe.model, sequences=recipe.config.sequences_per_shard)

    async def run(self) -> JobResult | None:
        """Train to the end, in as many epochs as it takes. Raises `StepFailed`, `TrainingDiverged`."""
        forget = report_losses(self._worker)
        try:
            return await through_epochs(self._worker, self._epoch)
        except (StepFailed, TrainingDiverged):  # all ranks end, and nobody will ask for it
            self._remove_state()
            raise
        finally:
            forget()
            if self._group is not None:
                await self._group.close()
            if self._keeper is not None:
                await asyncio.to_thread(self._keeper.close)
            if self._saved is not None:
                self._saved.close()
            self._profiler.close()
            self._log.close()

    async def _epoch(self, view: View | None) -> JobEnd[JobResult] | None:
        if self._group is not None:
            await self._group.close()
            self._group = None
        if view is None:
            return None
        self._group = group_of(self._worker, view)
        return await asyncio.to_thread(self._in_epoch, self._group)

    # ---- on the thread that trains

    def _in_epoch(self, group: Group) -> JobEnd[JobResult] | None:
        """Train in one epoch; the end, if that was the last one."""
        trainer, keeper = self._opened(group)
        self._profiler.follow(group)
        try:
            faults.hit(MEET_POINT)
            version = keeper.meet(group)
            self._share_record(group, self._base + version)
            faults.hit(MET_POINT)
            trainer.enter(group, version, base=self._base)
            if version:
                self._reached(group, trainer, keeper)
            with self._profiler.recording():
                while trainer.step < self._recipe.config.steps:
                    faults.hit(BEGIN_POINT)
                    self._profiler.begin_step(trainer.step + 1)
                    trainer.run_step(keeper)
                    self._reached(group, trainer, keeper)
            self._profiler.end_step()
            return JobEnd(self._finish(group, trainer, keeper))
        except (PeerLost, OperationAborted):
            return None
        finally:
            group.abort()
            keeper.epoch_over()
            self._log.close()

    def _opened(self, group: Group) -> tuple[ZeroTrainer, Redundancy]:
        if self._trainer is None or self._keeper is None:
            if self._zero.offload is not None:
                self._file = self._state_file(group, self._zero.offload)
            self._trainer = ZeroTrainer(
                self._worker, group, self._recipe, self._zero, keep_previous=True, offload=self._file
            )
            if self._saved is not None:
                self._trainer.begin_from(self._saved)
            self._keeper = self._keeper_of(self._trainer.own, group)
        return self._trainer, self._keeper

    def _state_file(self, group: Group, folder: Path) -> StateFile:
        place = group.members.index(self._worker.rank)
        elements = _elements(self._recipe.model, self._options, self._zero, group.size)
        note = NOTE_HEAD + self._recipe.config.shards
        name = StateName(run=self._worker.job, place=place, ranks=group.size, elements=elements, note=note)
        return StateFile(folder, name, again=self._again)

    def _keeper_of(self, own: ZeroRank, group: Group) -> Redundancy:
        known = self._log.last_version() - self._base
        if self._file is not None:
            self._take_notes(self._file)
            return FileRedundancy(
                self._worker,
                own,
                self._file,
                place=own.rank,
                ranks=group.size,
                known=known,
                on_update=self._keep,
                on_commit=self._committed,
                note=self._row_of,
            )
        return BuddyReplica(
            self._worker,
            own,
            place=own.rank,
            ranks=group.size,
            copies=own.mirror_copies(),
            known=known,
            on_update=self._keep,
            on_commit=self._committed,
        )

    def _reached(self, group: Group, trainer: ZeroTrainer, keeper: Redundancy) -> None:
        """All have come to `trainer.step`; again behind a loss. Write the checkpoint, if it is time."""
        every, step = self._options.checkpoint_every, trainer.step
        if step != self._recipe.config.steps and (not every or step % every):
            return
        with spans.CHECKPOINT:
            keeper.settle()  # nobody goes back behind what the files hold
            scale = trainer.own.loss_scale.values
            pieces = trainer.own.pieces()
            write_shards(group, self._options.out, pieces, version=step, plan=self._plan, loss_scale=scale)

    def _keep(self, done: ZeroStepResult) -> None:
        self._records[done.step] = done
        self._records.pop(done.step - RECORDS_KEPT, None)

    def _share_record(self, group: Group, step: int) -> None:
        """Tell who has not done `step` what it reported: whoever logs it must know that."""
        for later in [one for one in self._records if one > step]:
            del self._records[later]
        for row in group.blocking.all_gather(self._row_of(self._records.get(step))).tolist():
            if row[0] and step not in self._records:
                self._keep(_done_of(row, step))
        if step > self._base:
            self._worker.report(adopted_report(step, group.epoch))

    def _take_notes(self, file: StateFile) -> None:
        """Know of a predecessor's file what its last steps reported: all ranks may be new at once."""
        whole = ((file.version_in(slot), file.noted(slot)) for slot in range(SLOTS))
        for version, row in sorted((v, row.tolist()) for v, row in whole if v and len(row)):
            self._keep(_done_of(row, self._base + version))

    def _row_of(self, done: ZeroStepResult | None) -> Note:
        row = np.zeros(NOTE_HEAD + self._recipe.config.shards)
        if done is not None:
            row[:NOTE_HEAD] = 1.0, done.grad_norm, done.loss_scale, done.skipped
            row[NOTE_HEAD:] = [done.losses[shard] for shard in range(len(row) - NOTE_HEAD)]
        return row

    def _committed(self, version: int, digests: Digests) -> None:
        """Every shard of `version` has its copy: the lowest rank logs it."""
        if version and self._is_lowest():
            self._append(self._base + version, digests)

    def _is_lowest(self) -> bool:
        return self._group is not None and self._group.members[0] == self._worker.rank

    def _append(self, version: int, digests: Digests) -> None:
        assert self._group is not None, "a version is logged in an epoch"
        done, config = self._records[version], self._recipe.config
        ids = self._recipe.sample_ids(version - 1)
        record = CommitRecord(
            version=version,
            epoch=self._group.epoch,
            members=tuple(self._group.members),
            shards={shard: tuple(ids[shard].tolist()) for shard in range(config.shards)},
            losses=done.losses,
            rng_key=(config.seed, version - 1),
            digest=xxhash.xxh3_128_hexdigest(np.array(digests, np.uint64).data),
            at_ns=now_ns(),
        )
        self._log.append(record)
        scaled = {"loss_scale": done.loss_scale, "skipped": done.skipped} if done.loss_scale != 1.0 else {}
        self._worker.report({**step_report(record, done.grad_norm), **scaled})

    def _finish(self, group: Group, trainer: ZeroTrainer, keeper: Redundancy) -> JobResult | None:
        """The weights on disk and the last record in the log; then all ranks may part."""
        keeper.settle()
        weights, result = trainer.weights(), None
        if self._is_lowest():
            save_weights(self._options.out / WEIGHTS_NAME, weights, self._options.model, step=trainer.step)
            loss_last = self._records[trainer.step].loss
            result = result_of(self._options, self._recipe, weights, loss_last)
            report_result(self._worker, result)
        faults.hit(SAVED_POINT)
        group.blocking.barrier()
        faults.hit(PARTED_POINT)
        self._remove_state()
        return result

    def _remove_state(self) -> None:
        if self._file is not None:
            self._file.remove()


def _done_of(row: Sequence[float], step: int) -> ZeroStepResult:
    """What `step` reported, from a row that has it."""
    _, grad_norm, loss_scale, skipped, *losses = row
    return ZeroStepResult(
        step=step,
        losses=dict(enumerate(losses)),
        grad_norm=grad_norm,
        loss_scale=loss_scale,
        skipped=int(skipped),
    )
