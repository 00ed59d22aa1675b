"""A run on a mesh that outlives its ranks: the state of each is at other ranks, too, or in a file.

Ranks along `dp` hold the same state; where they do not, a buddy copies it at every step. A rank that is
killed is replaced, takes its state from there, and the step is run again: the run ends with the bits of one
that nothing disturbed. The purpose of the run (`MeshTask`) is notified of each step once it is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.actors.view import View
from zbmd.collectives.commit.driver import StepFailed
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.group import Group, group
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.profiler.lines import StepLine
from zbmd.training.profiler.profiler import Profiler, open_profiler
from zbmd.training.redundancy.buddy import BuddyReplica
from zbmd.training.redundancy.file import FileRedundancy
from zbmd.training.redundancy.interface import Digests, JobEnd, Redundancy, through_epochs
from zbmd.training.redundancy.state_file import Note, StateFile
from zbmd.training.run.journal import adopted_report
from zbmd.training.sharded.mesh import Mesh, MeshGroups
from zbmd.training.sharded.stages import SLOTS
from zbmd.training.sharded.trainer import MeshStep, MeshTrainer
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import PeerLost
from zbmd.transport.shm.death_notice import DeathNotice

ResultT = TypeVar("ResultT")
TaskResultT = TypeVar("TaskResultT", covariant=True)

BEGIN_POINT = faults.declare("mesh.begin", "before a step on a mesh")
MEET_POINT = faults.declare("mesh.meet", "in a new epoch on a mesh, before its members say what they hold")
MET_POINT = faults.declare("mesh.met", "when they have agreed on what they go on from")
SAVED_POINT = faults.declare("mesh.saved", "when what a run makes is on disk, before the ranks part")
PARTED_POINT = faults.declare("mesh.parted", "when the ranks part, before this one has left")

RECORDS_KEPT = 3
"""Last steps whose values a rank keeps; the next one to be reported is among them."""
_BASE, _HAS, _LOSS, _NORM, _COMPUTE, _WAITED, _SCALE, _SKIPPED, _NUMBERS = range(9)


class MeshTask(Protocol[TaskResultT]):
    """The purpose of a run. All but `committed` is called on all ranks together, on the training thread."""

    steps: int
    """To be done in all."""
    out: Path
    """The directory of the run."""
    known: int
    """Steps that are known to have been done, from what this run has written."""

    def trainer(self, groups: MeshGroups) -> MeshTrainer:
        """This rank's trainer, with the state that the run begins with. Called once, by each for itself."""
        ...

    def copies(self, trainer: MeshTrainer) -> list[np.ndarray]:
        """Room for two states of any rank, that peers can read."""
        ...

    def agree(self, world: Group) -> None:
        """Learn in a new view what its members know and a newcomer does not."""
        ...

    def committed(self, done: MeshStep) -> None:
        """A step is safe; told on every rank, in the order of steps, and maybe again behind a loss."""
        ...

    def profiled(self, line: StepLine, mfu: float | None) -> None:
        """Take the profile of a step of this rank, after it."""
        ...

    def reached(self, trainer: MeshTrainer, keeper: Redundancy) -> None:
        """All have come to `trainer.step`; again behind a loss."""
        ...

    def finish(self, trainer: MeshTrainer) -> TaskResultT | None:
        """The last step is safe: put on disk what the run makes, and say what came of it."""
        ...


class MeshJob(Generic[ResultT]):
    """One rank's side of a run, through all of its epochs.

    `replicas`: whether ranks along `dp` stand for each other, so that no buddies have copies.
    """

    def __init__(
        self, worker: Worker, mesh: Mesh, task: MeshTask[ResultT], *, replicas: bool = False
    ) -> None:
        self._worker, self._mesh, self._task, self._replicas = worker, mesh, task, replicas
        self._world: Group | None = None
        self._groups: MeshGroups | None = None
        self._trainer: MeshTrainer | None = None
        self._keeper: Redundancy | None = None
        self._profiler: Profiler | None = None
        self._base = 0
        """The step that version 0 of the state begins."""
        self._records: dict[int, MeshStep] = {}

    async def run(self) -> ResultT | None:
        """Train to the end. Raises `StepFailed` if the state is lost, and `TrainingDiverged`."""
        try:
            return await through_epochs(self._worker, self._epoch)
        except (StepFailed, TrainingDiverged):  # all ranks end, and nobody will ask for it
            self._remove_state()
            raise
        finally:
            await self._leave_groups()
            if self._keeper is not None:
                await asyncio.to_thread(self._keeper.close)
            if self._profiler is not None:
                self._profiler.close()

    async def _epoch(self, view: View | None) -> JobEnd[ResultT] | None:
        await self._leave_groups()
        if view is None:
            return None
        groups = self._groups = await self._groups_in(view)
        return None if groups is None else await asyncio.to_thread(self._in_epoch, groups)

    async def _groups_in(self, view: View) -> MeshGroups | None:
        """This rank's groups; None if the view does not last so long.

        A rank that loses any member of the view gives up, not only one of the sub-group being made: the
        others there may have lost one elsewhere, and will not come.
        """
        making = asyncio.ensure_future(self._make_groups(view))

        def lost(_rank: int, _incarnation: int, _notice: DeathNotice) -> None:
            making.cancel()

        undo = self._worker.on_peer_lost(lost)
        try:
            if self._worker.segment.lost_mask() & sum(1 << member.rank for member in view.members):
                making.cancel()  # it was lost before we listened
            await asyncio.wait([making])
        finally:
            undo()
            making.cancel()
            await asyncio.wait([making])
        return None if making.cancelled() else making.result()

    async def _make_groups(self, view: View) -> MeshGroups | None:
        try:
            world = self._world = await group(self._worker, after=view.epoch - 1)
            return await MeshGroups.of(world, self._mesh) if world.epoch == view.epoch else None
        except (PeerLost, OperationAborted):
            return None

    async def _leave_groups(self) -> None:
        groups, world = self._groups, self._world
        self._groups = self._world = None
        if groups is not None:
            await groups.close()
        if world is not None:
            await world.close()

    # ---- on the thread that trains

    def _in_epoch(self, groups: MeshGroups) -> JobEnd[ResultT] | None:
        """Train in one epoch; the end, if that was the last one."""
        try:
            self._task.agree(groups.world)
            trainer, keeper = self._opened(groups)
            return self._train(groups, trainer, keeper)
        except (PeerLost, OperationAborted):
            if self._trainer is not None:
                self._trainer.close(gave_up=True)
            return None
        finally:
            groups.give_up()
            if self._trainer is not None:
                self._trainer.close()
            if self._keeper is not None:
                self._keeper.epoch_over()

    def _opened(self, groups: MeshGroups) -> tuple[MeshTrainer, Redundancy]:
        if self._trainer is None or self._keeper is None:
            trainer = self._trainer = self._task.trainer(groups)
            self._base = trainer.step
            if trainer.file is not None:
                self._take_notes(trainer.file)
            self._keeper = self._keeper_of(trainer, groups.world)
        return self._trainer, self._keeper

    def _keeper_of(self, trainer: MeshTrainer, world: Group) -> Redundancy:
        place, known = world.members.index(self._worker.rank), max(0, self._task.known - self._base)
        if trainer.file is not None:
            return FileRedundancy(
                self._worker,
                trainer,
                trainer.file,
                place=place,
                ranks=world.size,
                known=known,
                on_update=self._keep,
                on_commit=self._committed,
                note=self._row_of,
            )
        return BuddyReplica(
            self._worker,
            trainer,
            place=place,
            ranks=world.size,
            copies=[] if self._replicas else self._task.copies(trainer),
            keys=self._mesh.state_keys(),
            known=known,
            on_update=self._keep,
            on_commit=self._committed,
        )

    def _take_notes(self, file: StateFile) -> None:
        """Know of a predecessor's file where the run began, and what its last steps reported.

        All ranks may have been killed at once, and the checkpoint that the run began with been written over.
        """
        whole = ((file.version_in(slot), file.noted(slot)) for slot in range(SLOTS))
        for version, row in sorted((v, row.tolist()) for v, row in whole if v and len(row) == _NUMBERS):
            self._base = int(row[_BASE])
            self._keep(_step_of(row, self._base + version - 1))

    def _remove_state(self) -> None:
        if self._trainer is not None and self._trainer.file is not None:
            self._trainer.file.remove()

    def _train(self, groups: MeshGroups, trainer: MeshTrainer, keeper: Redundancy) -> JobEnd[ResultT]:
        faults.hit(MEET_POINT)
        version = keeper.meet(groups.world)
        self._share(groups.world, version)
        faults.hit(MET_POINT)
        trainer.enter(groups, self._base, version)
        if version:
            self._worker.report(adopted_report(version, groups.world.epoch))
            self._task.reached(trainer, keeper)
        profiler = self._profiled(groups, trainer)
        with profiler.recording():
            while trainer.step < self._task.steps:
                faults.hit(BEGIN_POINT)
                self._tell(profiler, profiler.begin_step(trainer.step + 1))
                trainer.run_step(keeper)
                profiler.held(trainer.held_most)
                self._task.reached(trainer, keeper)
        self._tell(profiler, profiler.end_step())
        keeper.settle()
        result = self._task.finish(trainer)
        faults.hit(SAVED_POINT)
        groups.world.blocking.barrier()
        faults.hit(PARTED_POINT)
        self._remove_state()
        return JobEnd(result)

    def _profiled(self, groups: MeshGroups, trainer: MeshTrainer) -> Profiler:
        if self._profiler is None:
            recipe = trainer.recipe
            sequences, dtype = recipe.config.sequences_per_shard, trainer.state_dtype.name
            self._profiler = open_profiler(self._task.out, recipe.model, sequences=sequences, dtype=dtype)
        self._profiler.follow(groups.world, groups.data, groups.pipeline, groups.tensor)
        return self._profiler

    def _tell(self, profiler: Profiler, line: StepLine | None) -> None:
        if line is not None:
            self._task.profiled(line, profiler.mfu(line))

    def _keep(self, done: MeshStep) -> None:
        self._records[done.step] = done
        self._records.pop(done.step - RECORDS_KEPT, None)

    def _share(self, world: Group, version: int) -> None:
        """Tell newcomers where the run began, and what the last step reported: any of them may log it.

        A newcomer reads the checkpoint that the run began with, which the run may have written over since:
        the least step is the right one.
        """
        mine = self._row_of(self._records.get(self._base + version - 1))
        every = world.blocking.all_gather(mine)
        self._base = int(every[:, _BASE].min())
        step = self._base + version - 1
        for later in [one for one in self._records if one > step]:
            del self._records[later]
        found = next((row for row in every if row[_HAS] and version), None)
        if found is not None and step not in self._records:
            self._keep(_step_of(found.tolist(), step))

    def _row_of(self, done: MeshStep | None) -> Note:
        row = np.zeros(_NUMBERS)
        row[_BASE] = self._base
        if done is not None:
            row[_HAS:_SCALE] = 1.0, done.loss, done.grad_norm, done.compute_ns, done.waited_ns
            row[_SCALE:] = done.loss_scale, done.skipped
        return row

    def _committed(self, version: int, _: Digests) -> None:
        if version:
            self._task.committed(self._records[self._base + version - 1])


def _step_of(row: Sequence[float], step: int) -> MeshStep:
    """What `step` reported, from a row that has it."""
    return MeshStep(
        step=step,
        loss=row[_LOSS],
        grad_norm=row[_NORM],
        compute_ns=int(row[_COMPUTE]),
        waited_ns=int(row[_WAITED]),
        loss_scale=row[_SCALE],
        skipped=int(row[_SKIPPED]),
    )
