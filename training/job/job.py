"""A run that outlives its ranks: the state of each is at other ranks, too, or in a file.

Ranks along `dp` hold the same state; where they do not, a buddy copies it at every step. A rank that is
killed is replaced, takes its state from there, and the step is run again: the run ends with the bits of one
that nothing disturbed. The task learns of none of that. A step that is safe is written to the commit log,
with the ids of its samples.
"""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from zbmd.actors.rank.losses import unless_lost
from zbmd.actors.rank.member import Worker
from zbmd.actors.view import View
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.group import Group, group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint.sharded import SavedState, last_in, open_state
from zbmd.training.job.checkpoints import Checkpoints, Version
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.options import RunOptions
from zbmd.training.job.paced import PaceClock, Pacing
from zbmd.training.job.records import Records, keep_until
from zbmd.training.job.results import StepResults
from zbmd.training.job.signals import SIGNALS, signals_taken
from zbmd.training.job.slow_ranks import SlowRanks
from zbmd.training.job.task import StepResult, Task, Trainer
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.profiler.lines import Death, StepLine
from zbmd.training.profiler.profiler import Profiler
from zbmd.training.redundancy.buddy import BuddyReplica, KeptState
from zbmd.training.redundancy.coded.driver import CodedReplica
from zbmd.training.redundancy.cut_meeting import attend_with_nothing
from zbmd.training.redundancy.failures import StepFailed
from zbmd.training.redundancy.file import FileRedundancy
from zbmd.training.redundancy.interface import (
    Agenda,
    Digests,
    Following,
    JobEnd,
    Redundancy,
    ResizableState,
    Wish,
    spare_until,
    through_epochs,
)
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.redundancy.stamped import StampedSlots
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.run.journal import adopted_report, report_losses, step_report
from zbmd.training.run.ledger import LOG_NAME, CommitRecord, RunLog
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import PeerLost, UserError
from zbmd.transport.native._native import now_ns

ResultT = TypeVar("ResultT")

ARENA_SPARE_BYTES = 4 << 20
"""Of a rank's arena, beside what its state and gradients need."""

BEGIN_POINT = faults.declare("job.begin", "before a step")
LOGGED_POINT = faults.declare("job.logged", "when a step is in the log, before it is reported and noted")
MEET_POINT = faults.declare("job.meet", "in a new epoch, before its members say what they hold")
MET_POINT = faults.declare("job.met", "when they have agreed on what they go on from")
SAVED_POINT = faults.declare("job.saved", "when what a run makes is on disk, before the ranks part")
PARTED_POINT = faults.declare("job.parted", "when the ranks part, before this one has left")


class Job(Generic[ResultT]):
    """One rank's side of a run, through all of its epochs. again: whether this is a replacement."""

    def __init__(self, worker: Worker, task: Task[ResultT], options: RunOptions, *, again: bool) -> None:
        self._worker, self._task, self._options = worker, task, options
        self._world: Group | None = None
        """Of the ranks that train."""
        self._members: Group | None = None
        """Of all members of the view."""
        self._keys: Sequence[int] = ()
        """Of all members' shards in this epoch."""
        self._groups: MeshGroups | None = None
        self._trainer: Trainer | None = None
        self._keeper: Redundancy | None = None
        self._actors: ModelActors | None = None
        self._profiler: Profiler | None = None
        self._slow = SlowRanks(worker, options.out, options.on_straggler, self._is_lowest)
        self._deaths: list[Death] = []
        self._cut_ns = 0
        """When they ended the last step here; 0: that was before this epoch."""
        self._saved: SavedState | None = None
        if options.resume is not None:
            self._saved = open_state(options.resume, plan=task.plan)
        first = 0 if self._saved is None else self._saved.version
        self._following: Following | None = None
        self._wishes, self._asking = Wish.NOTHING, threading.Lock()
        self._asked = asyncio.Event()
        begins = worker.rank == 0 and not again
        pacing = Pacing(
            options.checkpoint_every if options.checkpoints else 0,
            partial(PaceClock, options.out, first, hosts=options.hosts, begins=begins),
            note=self._note_pace,
        )
        self._checkpoints = Checkpoints(
            options.storage,
            task.plan,
            pacing,
            log=options.out / LOG_NAME,
            retention=options.retention,
            codec=options.codec,
            hosts=options.hosts,
        )
        self._log = RunLog(
            options.out,
            run_id=f"{worker.job:016x}",
            first=first,
            plan=task.plan,
            seed=task.seed,
            resumed=options.resume,
            may_begin=worker.rank == 0,
            goes_back=options.resume is not None
            and not again,  # a lone process has the number of the last one
            on_begin=lambda: keep_until(options.out, first),
        )
        if again:
            self._take_newest(first)
        self._again = again
        self._records: Records | None = None
        self._results = StepResults(task.row, task.seed)
        self._held_out: tuple[int, float] | None = None
        """The last version that was evaluated, and its loss."""

    def _take_newest(self, first: int) -> None:
        """Begin from the newest checkpoint of the run, should all ranks that hold a later state be lost."""
        try:
            newest = open_state(self._options.storage, plan=self._task.plan)
        except UserError:
            return  # there is none, or another rank writes the next one
        # One that was written before its step was committed is the user's to ask for.
        is_next = first < newest.version <= self._log.last_version()
        older, self._saved = (self._saved, newest) if is_next else (newest, self._saved)
        if older is not None:
            older.close()

    async def run(self) -> ResultT | None:
        """Train to the end; return the result on the first rank, and None on others or if it was stopped.

        Raises `StepFailed` if the state is lost, and `TrainingDiverged`.
        """
        forget = report_losses(self._worker, lambda *death: self._deaths.append(Death(*death)))
        loop, signals = asyncio.get_running_loop(), signals_taken()
        for number in signals:
            loop.add_signal_handler(number, self.ask, SIGNALS[number])
        self._worker.keeps_lost_memory = False
        try:
            return await through_epochs(self._worker, self._epoch, self._task.fits)
        except (StepFailed, TrainingDiverged):  # all ranks end, and nobody will ask for it
            self._remove_state()
            raise
        finally:
            forget()
            for number in signals:
                loop.remove_signal_handler(number)
            await self._leave_groups()
            if self._actors is not None:
                await self._actors.stop()
            if self._keeper is not None:
                await asyncio.to_thread(self._keeper.close)
            self._checkpoints.close()
            for opened in (self._profiler, self._records, self._saved, self._log):
                if opened is not None:
                    opened.close()

    def ask(self, wish: Wish) -> None:
        """Ask all ranks to save the state, or to stop then, after the step that is under way."""
        with self._asking:
            self._wishes |= wish
        self._worker.system.loop.call_soon_threadsafe(self._asked.set)

    async def _epoch(self, view: View | None, following: Following | None) -> JobEnd[ResultT] | None:
        await self._leave_groups()
        if view is None:
            return None
        groups = self._groups = await self._groups_in(view)
        self._following = following
        active = self._task.active(view.ranks)
        if following is not None and self._worker.rank not in active:
            members = self._members
            if members is not None and self._task.resizes:
                await asyncio.to_thread(self._attend, members, active)
            asked, stops = self._asked, lambda: bool(self._wishes & Wish.STOP)
            is_over = await spare_until(self._worker, following, active, asked=asked, stops=stops)
            return JobEnd(None) if is_over else None
        return None if groups is None else await asyncio.to_thread(self._in_epoch, groups)

    async def _groups_in(self, view: View) -> MeshGroups | None:
        """This rank's groups; None if the view does not last so long."""
        return await unless_lost(self._worker, view, self._make_groups(view))

    async def _make_groups(self, view: View) -> MeshGroups | None:
        try:
            members = self._members = await group(self._worker, after=view.epoch - 1)
            active = self._task.active(members.members)
            if members.epoch != view.epoch or self._worker.rank not in active:
                return None
            if active == members.members:
                self._world, self._members = members, None
            else:
                self._world = await members.subgroup([members.members.index(rank) for rank in active])
            return await self._task.groups(self._world)
        except (PeerLost, OperationAborted):
            return None

    async def _leave_groups(self) -> None:
        opened = (self._groups, self._world, self._members)
        self._groups = self._world = self._members = None
        for one in opened:
            if one is not None:
                await one.close()

    # ---- on the thread that trains

    def _in_epoch(self, groups: MeshGroups) -> JobEnd[ResultT] | None:
        """Train in one epoch; the end, if that was the last one."""
        try:
            self._task.agree(self._meeting(groups.world))
            return self._train(groups, self._opened(groups))
        except (PeerLost, OperationAborted):
            self._cut_ns = now_ns()
            if self._trainer is not None:
                self._trainer.close(gave_up=True)
            return None
        finally:
            groups.give_up()
            if self._members is not None:
                _give_up(self._members)
            self._checkpoints.abandon()
            self._slow.leave()
            if self._trainer is not None:
                self._trainer.close()
            if self._keeper is not None:
                self._keeper.epoch_over()

    def _attend(self, members: Group, active: Sequence[int]) -> None:
        """Take part as the `active` members meet: this rank waits, and they may need what it has."""
        keeper = self._keeper
        try:
            self._task.agree(members)
            logged = self._share_records(members)
            known = max(logged, self._results.known)
            if keeper is None:
                attend_with_nothing(members, active, known, files=self._options.files)
                self._share(members, None)
            else:
                self._share(members, keeper.attend(members, active, known))
        except (PeerLost, OperationAborted):
            _give_up(members)
        finally:
            if keeper is not None:
                keeper.epoch_over()

    def _meeting(self, world: Group) -> Group:
        """Return the group of those who meet in a new epoch: of a state that is recut, all members."""
        return self._members if self._members is not None and self._task.resizes else world

    def _opened(self, groups: MeshGroups) -> Redundancy:
        if self._keeper is None:
            trainer = self._trainer = self._made(groups)
            for found in (trainer.file, trainer.kept):
                if found is not None:
                    self._take_notes(found)
            if self._options.checkpoints:
                self._checkpoints.state_in(None if self._task.resizes else trainer.kept, self._worker)
            self._keeper = self._keeper_of(trainer, groups.world)
            self._keeper.on_overwrite = self._checkpoints.staged
        return self._keeper

    def _made(self, groups: MeshGroups) -> Trainer:
        trainer = self._task.trainer(groups)
        if self._saved is not None:
            trainer.begin_from(self._saved)
        self._on_loop(self._start_actors(trainer))
        return trainer

    def _resized(self) -> tuple[ResizableState, Sequence[Array], KeptState | None]:
        """Return a new trainer's state for this view, room for copies, and the memory that outlives it."""
        made = self._remade()
        assert isinstance(made.shard, ResizableState), "a task that resizes has such a state"
        kept = None if made.kept is None else self._kept_state(made.kept)
        return made.shard, self._task.copies(made), kept

    def _refiled(self) -> tuple[ResizableState, StateFile]:
        """Return the state of a new trainer, and the file that it is in."""
        made = self._remade()
        assert isinstance(made.shard, ResizableState) and made.file is not None, "its state is in a file"
        return made.shard, made.file

    def _remade(self) -> Trainer:
        groups, trainer, actors = self._groups, self._trainer, self._actors
        assert groups is not None and trainer is not None, "a state is recut in an epoch"
        trainer.close()
        self._trainer = self._actors = trainer = None
        if actors is not None:
            self._on_loop(actors.stop())
            actors = None
        gc.collect()  # a trainer and its state refer to each other; their memory is needed now
        made = self._trainer = self._made(groups)
        return made

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._worker.system.loop).result()

    def _require_members(self) -> None:
        if self._groups is not None:
            self._groups.require_members()

    async def _start_actors(self, trainer: Trainer) -> None:
        actors = self._actors = self._task.actors(trainer)
        if actors is not None:
            trainer.supervised(actors)
            actors.while_waiting(self._require_members)
            await actors.start(self._worker.system)

    def _keeper_of(self, trainer: Trainer, world: Group) -> Redundancy:
        place, known = world.members.index(self._worker.rank), self._log.last_version()
        if trainer.file is not None:
            return FileRedundancy(
                self._worker,
                trainer.shard,
                trainer.file,
                place=place,
                ranks=world.size,
                known=known,
                on_update=self._results.keep,
                on_commit=self._committed,
                note=self._task.row.encoded,
                resize=self._refiled if self._task.resizes else None,
                on_found=self._take_notes,
            )
        alone, code = self._worker.world_size == 1, self._options.code
        replicas = self._options.replicas and not alone  # alone, it digests its state beside the next step
        return (BuddyReplica if code is None else partial(CodedReplica, code=code))(
            self._worker,
            trainer.shard,
            place=place,
            ranks=world.size,
            copies=[] if alone or replicas else self._task.copies(trainer),
            replicas=replicas,
            known=known,
            on_update=self._results.keep,
            on_commit=self._committed,
            kept=None if trainer.kept is None else self._kept_state(trainer.kept),
            resize=self._resized if self._task.resizes else None,
            on_found=self._take_notes,
        )

    def _kept_state(self, slots: StampedSlots) -> KeptState:
        return KeptState(
            slots=slots,
            ready=self._worker.segment.arena.ready,
            step=self._task.row.encoded,
            record=self._results.share,
        )

    def _remove_state(self) -> None:
        if self._trainer is not None and self._trainer.file is not None:
            self._trainer.file.remove_all()

    def _train(self, groups: MeshGroups, keeper: Redundancy) -> JobEnd[ResultT] | None:
        faults.hit(MEET_POINT)
        self._keys = self._task.state_keys(groups)
        everyone = self._meeting(groups.world)
        logged = self._share_records(everyone)
        known = max(logged, self._results.known)
        version = keeper.meet(groups.world, self._keys, known, everyone=everyone)
        self._agree_on_log(groups.world, version, logged)
        faults.hit(MET_POINT)
        trainer = self._trainer
        assert trainer is not None, "it was made before its state was agreed on"
        trainer.enter(groups, version)
        self._checkpoints.enter(groups.world, version)
        self._slow.enter(groups, trainer)
        if version > self._log.first:
            self._worker.report(adopted_report(version, groups.world.epoch))
            self._reached(groups.world, trainer, keeper)
        elif self._options.evaluate_every:
            self._evaluate(trainer)  # so that a run's first loss is beside its last
        profiler = self._profiled(groups)
        with profiler.recording():
            while trainer.step < self._task.steps:
                faults.hit(BEGIN_POINT)
                self._begin_step(profiler, trainer)
                self._ask(keeper, trainer.step + 1)
                with profiler.operations():
                    trainer.run_step(keeper)
                self._slow.stepped(groups, trainer, profiler)
                profiler.held(trainer.held_most)
                self._checkpoints.voted(agreed := keeper.agreed)
                if trainer.step - 1 == version > self._log.first:
                    keeper.settle()  # commits the first one after a recovery now, not in the step after
                self._reached(groups.world, trainer, keeper, agreed.wishes)
                with self._asking:
                    self._wishes &= ~agreed.wishes
                if agreed.wishes & Wish.STOP and trainer.step < self._task.steps:
                    return self._stopped(groups)
                if agreed.epoch > groups.world.epoch:
                    return None  # all members leave, to enter the view that follows
        self._tell(profiler, profiler.end_step())
        keeper.settle()
        held, done = 0.0 if self._held_out is None else self._held_out[1], self._result_of(trainer.step)
        result = self._task.finish(trainer, done, held, is_first=self._is_lowest())
        faults.hit(SAVED_POINT)
        groups.world.blocking.barrier()
        faults.hit(PARTED_POINT)
        self._remove_state()
        return JobEnd(result)

    def _begin_step(self, profiler: Profiler, trainer: Trainer) -> None:
        self._tell(profiler, line := profiler.begin_step(trainer.step + 1))
        self._slow.begin_step(trainer, line)

    def _ask(self, keeper: Redundancy, step: int) -> None:
        wishes = self._wishes | self._checkpoints.begin_step(step, decides=self._is_lowest())
        following = self._following
        is_there = following is not None and following.done() and not following.cancelled()
        epoch = following.result().view.epoch if following and is_there else 0
        keeper.asked = Agenda(epoch, wishes, (self._checkpoints.report,))

    def _stopped(self, groups: MeshGroups) -> JobEnd[ResultT]:
        """End the run before its last step, as was asked for; its state is saved, if it can be."""
        groups.world.blocking.barrier()
        self._remove_state()
        return JobEnd(None)

    def _profiled(self, groups: MeshGroups) -> Profiler:
        if self._profiler is None:
            self._profiler = self._task.profiler(self._options.out)
        if self._cut_ns:
            deaths = self._deaths[:]  # the loop may add one meanwhile
            del self._deaths[: len(deaths)]
            self._profiler.cut(self._cut_ns, deaths)
            self._cut_ns = 0
        self._profiler.follow(*groups.every)
        return self._profiler

    def _tell(self, profiler: Profiler, line: StepLine | None) -> None:
        if line is not None and self._is_lowest():
            self._opened_records().put_profile(line, mfu=profiler.mfu(line))

    # ---- between steps

    def _reached(
        self, world: Group, trainer: Trainer, keeper: Redundancy, asked: Wish = Wish.NOTHING
    ) -> None:
        """All have come to `trainer.step`, again after a loss: evaluate, and begin the checkpoint, if due."""
        version, options, every = trainer.step, self._options, self._options.evaluate_every
        save, is_last, is_saved = bool(asked & (Wish.SAVE | Wish.STOP)), version == self._task.steps, False
        if is_last or (every > 0 and version % every == 0):
            self._evaluate(trainer)
        self._task.reached(trainer, is_first=self._is_lowest())
        if options.checkpoints:
            waits = save or is_last
            with spans.CHECKPOINT:
                if waits:
                    keeper.settle()  # nobody goes back behind what the files hold
                made = Version(version, trainer.scale, trainer.pieces)
                is_saved = self._checkpoints.reached(world, made, asked=asked, waits=waits)
        if save and self._is_lowest():
            kept = f"saved: {last_in(options.storage)}" if is_saved else "not saved: see above"
            what = kept if options.checkpoints else "not saved: no checkpoints"
            print(f"step {version} {what}", file=sys.stderr, flush=True)

    def _evaluate(self, trainer: Trainer) -> None:
        """Evaluate the version in use; all ranks together."""
        version = trainer.step
        with spans.EVALUATE:
            loss = trainer.held_out_loss(windows_max=self._task.windows)
        self._held_out = version, loss
        if self._is_lowest() and self._opened_records().put(version, held_out_loss=loss):
            Records.tell(version, held_out_loss=loss)

    def _note_pace(self, step: int, values: Mapping[str, float], says: bool) -> None:
        if self._is_lowest() and self._opened_records().put(step, **values) and says:
            Records.tell(step, **values)

    # ---- results of steps

    def _result_of(self, version: int) -> StepResult | None:
        """Return what a step reported: from the log, if all ranks that did it were lost."""
        known = self._results.result(version)
        if known is not None or version <= self._log.first or self._log.last_version() < version:
            return known
        record = self._log.record(version)
        shards = sorted(record.losses)
        return StepResult(
            version=version,
            losses=tuple(record.losses[shard] for shard in shards),
            samples=tuple(tuple(record.shards[shard]) for shard in shards),
            grad_norm=math.nan,
        )

    def _take_notes(self, found: StampedSlots) -> None:
        """Know of a predecessor's state what its last steps reported: all ranks may be new at once."""
        for slot in range(SLOTS):
            done = self._task.row.decoded(found.noted(slot).tolist())
            if done is not None and done.version == found.version_in(slot):
                self._results.keep(done)
        self._results.learn_records(found.recorded(slot).tolist() for slot in range(SLOTS))

    def _share(self, group: Group, version: int | None) -> None:
        """Tell who has not done the last step what it reported: any member may log it.

        version: None for a rank that has not done any.
        """
        mine = self._task.row.encoded(None) if version is None else self._results.go_on_from(version)
        every = group.blocking.all_gather(mine).tolist()
        if version is not None:
            self._results.learn(version, every)

    def _share_records(self, world: Group) -> int:
        """Give all members the record of the last version that one of them saw committed.

        Before they learn from each other what is committed: who saw it, or logs it, may be lost then. Return
        the last version in the log, on the rank that writes it; 0 on others.
        """
        self._results.learn_records(world.blocking.all_gather(self._results.share()).tolist())
        return self._log.last_version() if self._is_lowest() else 0

    def _is_lowest(self) -> bool:
        return self._world is not None and self._world.members[0] == self._worker.rank

    def _opened_records(self) -> Records:
        if self._records is None:
            options = self._options
            again = self._again or self._worker.rank != 0  # another rank has begun them
            self._records = Records(
                options.out, tensorboard=options.tensorboard, first=self._log.first, again=again
            )
        return self._records

    def _committed(self, version: int, digests: Digests) -> None:
        """Every shard of `version` is safe: the lowest rank logs it, and all know what it is to log."""
        world, loss = self._world, self._held_out
        assert world is not None, "a version is committed in an epoch"
        found = self._results.committed(
            version,
            digests,
            epoch=world.epoch,
            members=world.members,
            keys=self._keys,
            at_ns=now_ns(),
            held_out_loss=loss[1] if loss is not None and loss[0] == version - 1 else None,
        )
        if found is not None and self._is_lowest():
            self._log.append(found.record)
            faults.hit(LOGGED_POINT)
            self._note(found.record, found.done)
        self._checkpoints.committed(version)

    def _note(self, record: CommitRecord, done: StepResult) -> None:
        """Report a step that is logged, and note what it took."""
        scales = {"loss_scale": done.loss_scale, "skipped": float(done.skipped)}
        scaled = scales if done.loss_scale != 1.0 else {}
        self._worker.report({**step_report(record, done.grad_norm), **scaled})
        values = {"loss": done.loss, "grad_norm": done.grad_norm, **self._task.metrics(done), **scaled}
        self._opened_records().put(record.version, **values)

    def _agree_on_log(self, world: Group, version: int, logged: int) -> None:
        """Log what is committed, if the last writer did not live to do it; tell newcomers what it reported.

        That may be the version before `version`; any member may have to log it. logged: the last that is.
        """
        self._share(self._meeting(world), version)
        if self._is_lowest():
            if self._records is not None:
                self._records.read_again()
            missing = self._results.missing(logged)
            if missing is not None:
                self._log.append(missing.record)
                self._note(missing.record, missing.done)
            elif logged > max(self._log.first, self._opened_records().last_step("loss")) and (
                done := self._result_of(logged)
            ):
                self._note(self._log.record(logged), done)
            self._results.in_log(logged if missing is None else missing.record.version)
        world.blocking.barrier()


def _give_up(group: Group) -> None:
    """Take part in nothing more, so that others wait for this rank no longer."""
    group.abort()
    group.give_up()
