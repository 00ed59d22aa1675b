"""A model of the user's own as a task: plain numpy along `dp`, without a tape.

Subclass `DataParallelTask`, and run it with `run_task`, alone or on every rank of a launcher. Ranks divide
the logical shards of a batch and add their gradients up along the shard tree, so the bits depend neither on
the number of ranks nor on which of them was killed.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from zbmd.actors.process.spare import rank_given
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.algorithms.shard_tree import Assignment, assign_shards
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import watched
from zbmd.training.autograd.parameter_layout import ParameterLayout, flat_slice
from zbmd.training.checkpoint.index import KEEP, Retention
from zbmd.training.checkpoint.pace import Every
from zbmd.training.checkpoint.plan import ExampleOrder, TaskPlan
from zbmd.training.checkpoint.sharded import Piece, SavedState, require_state, share_of
from zbmd.training.checkpoint.verified import newest_whole
from zbmd.training.job.explained import errors_explained
from zbmd.training.job.job import ARENA_SPARE_BYTES, Job
from zbmd.training.job.mesh import DATA_AXIS, Mesh, MeshGroups
from zbmd.training.job.options import RunOptions
from zbmd.training.job.paced import require_every
from zbmd.training.job.results import note_numbers
from zbmd.training.job.step_order import Computed, OrderedSteps
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.job.task import ResultRow, StepResult, Task, Trainer
from zbmd.training.model_actors.actors import HeldTensor
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.optim.clip import global_norm
from zbmd.training.profiler.profiler import Profiler, open_profiler
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.redundancy.stamped import StampedSlots, kept_slots
from zbmd.training.run.journal import report_result
from zbmd.training.run.ledger import begin_log
from zbmd.training.step.reduction import (
    AccumulationPlan,
    ShardReduction,
    assignment_of,
    buffers_most,
    buffers_of,
)
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically
from zbmd.transport.host.threads import computing_with
from zbmd.transport.native._native import now_ns

STATE_NAME = "state.safetensors"
State = Mapping[str, Array]
"""Named float32 arrays."""


class TaskResult(msgspec.Struct, kw_only=True):
    """The result of a finished run. state_sha256: of all arrays, in their order."""

    steps: int
    ranks: int
    loss_last: float
    held_out_loss: float
    state_sha256: str
    directory: str


class DataParallelTask(ABC):
    """A model with its data and optimizer, as functions of named float32 arrays. Subclass it.

    steps: to be done; examples: how many there are to train on; shards: logical shards of a batch, which
    ranks divide; samples: examples of a shard; seed: of their order. Each method must return the same bits on
    every rank. parameters: the names of the arrays that have a gradient, empty for all.
    """

    name: str = ""
    steps: int = 100
    examples: int = 0
    shards: int = 8
    samples: int = 16
    seed: int = 0
    parameters: tuple[str, ...] = ()

    @abstractmethod
    def initial(self) -> dict[str, Array]:
        """Return the state that the training begins with, moments of the optimizer included."""

    @abstractmethod
    def gradient(self, state: State, ids: npt.NDArray[np.int64]) -> tuple[float, Mapping[str, Array]]:
        """Return the mean loss of the examples `ids`, (samples,), and its gradient, by parameter."""

    @abstractmethod
    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        """Write every array of `new`: the state after `step` (from 0), with the batch's mean gradient."""

    def held_out_loss(self, state: State) -> float:
        """Return the loss on data that is not trained on; 0 if there is none."""
        return 0.0

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """Return the examples of a step, (shards, samples)."""
        return self.order.sample_ids(step)

    @property
    def order(self) -> ExampleOrder:
        """Return the order of examples."""
        return ExampleOrder(self.examples, self.shards, self.samples, self.seed)

    @property
    def plan(self) -> str:
        """Return what determines the bits, as JSON; `name` stands for the code."""
        plan = TaskPlan(self.name or type(self).__name__, self.order, self.steps)
        return msgspec.json.encode(plan).decode()


async def run_task(
    task: DataParallelTask,
    *,
    out: Path,
    resume: Path | None = None,
    checkpoint_every: Every = 0,
    checkpoint_to: str = "",
    retention: Retention = KEEP,
    evaluate_every: int = 0,
    tensorboard: bool = False,
    actors: bool = False,
    threads: int = 1,
    on_straggler: OnStraggler = OnStraggler.WARN,
) -> TaskResult | None:
    """Train `task` on this rank, in the directory `out`; the first rank returns the result, the others None.

    A killed rank is replaced, or the others go on without it, as the launcher has it. `resume`: a checkpoint
    to go on from. `*_every`: in steps, 0: only at the end; "auto": checkpoints at the pace that the run
    measures. `checkpoint_to`: a directory or URL for checkpoints, in the place of `out`; `retention`: which
    are kept. `actors`: supervised actors compute the gradient and the update, and compute again what fails.
    `threads`: of BLAS in each rank, on which the bits depend. `on_straggler`: what is done about a slow rank.
    SIGTERM writes a checkpoint and ends the run: the result is None then.

    Raises `UserError` for what only a person can mend.
    """
    if task.examples < 1 or min(task.steps, task.shards, task.samples) < 1:
        raise UserError(f"{type(task).__name__}: examples, steps, shards and samples must be at least 1.")
    require_every(checkpoint_every, "run_task(checkpoint_every=…)")
    initial = task.initial()
    wrong = [name for name, array in initial.items() if array.dtype != np.float32]
    if wrong or not initial:
        raise UserError(f"{type(task).__name__}.initial: expected float32 arrays, got {wrong or 'none'}.")
    layout = ParameterLayout.of({name: array.shape for name, array in initial.items()})
    await rank_given()  # a spare has all but the state by now
    launched = RankEnvironment.read(os.environ)
    again = launched is not None and launched.is_again
    if not again and (launched is None or launched.rank == 0):
        _take_directory(out, resume)
    if resume is not None:
        resume = newest_whole(resume)
    if not again and resume is not None:
        require_state(resume, plan=task.plan, steps=task.steps)
    ranks = 1 if launched is None else launched.world_size
    grads = ParameterLayout.of({name: initial[name].shape for name in task.parameters or initial})
    buffers = buffers_most(task.shards, range(1, ranks + 1)) + 1  # and room for the sum
    buffers += on_straggler is OnStraggler.REBALANCE  # for shares that are less even
    arena = 4 * (SLOTS * layout.size + buffers * grads.size) + ARENA_SPARE_BYTES
    options = RunOptions(
        out=out,
        resume=resume,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        hosts=1 if launched is None else launched.hosts,
        checkpoint_to=checkpoint_to,
        retention=retention,
        tensorboard=tensorboard,
        replicas=True,
        on_straggler=on_straggler,
    )
    memory = f"the state of {type(task).__name__} needs {arena} bytes"
    with computing_with(threads), errors_explained(out, checkpoint_to, launched, memory=memory):
        async with join(arena=arena, enter=False, outlives=True) as worker:
            own = _Own(
                worker, task, initial, layout, grads, out=out, ranks=ranks, buffers=buffers, actors=actors
            )
            return await Job(worker, own, options, again=again).run()


def _take_directory(out: Path, resume: Path | None) -> None:
    begin_log(out, resume)
    out.mkdir(parents=True, exist_ok=True)


class _Own(Task[TaskResult]):
    """A `DataParallelTask` as the job sees it."""

    resizes = False

    def __init__(
        self,
        worker: Worker,
        task: DataParallelTask,
        initial: State,
        layout: ParameterLayout,
        grads: ParameterLayout,
        *,
        out: Path,
        ranks: int,
        buffers: int,
        actors: bool,
    ) -> None:
        self._by_actors = actors
        self.plan, self.seed, self.steps, self.windows = task.plan, task.seed, task.steps, 0
        self._ranks, self._buffers = ranks, buffers
        self.row = ResultRow(task.shards, task.samples)
        self._worker, self._task, self._initial, self._out = worker, task, initial, out
        self._layout, self._grads = layout, grads

    def state_keys(self, groups: MeshGroups) -> Sequence[int]:
        return groups.mesh.state_keys()

    def fits(self, ranks: Sequence[int]) -> bool:
        return 1 <= len(ranks) <= self._ranks

    async def groups(self, world: Group) -> MeshGroups:
        return await MeshGroups.of(world, Mesh.of(world.size, {DATA_AXIS: world.size}))

    def agree(self, world: Group) -> None:
        """Nothing: all ranks have the task."""

    def trainer(self, groups: MeshGroups) -> _OwnTrainer:
        arena = self._worker.segment.arena
        kept = kept_slots(self._worker, self._layout.size, note=note_numbers(self.row))
        if kept is None:
            slots = [arena.zeros(self._layout.size, np.float32) for _ in range(SLOTS)]
        else:
            slots = kept.slots
            for slot in slots:
                arena.ready(slot)
        return _OwnTrainer(
            self._task,
            self._initial,
            groups,
            self._layout,
            self._grads,
            slots=slots,
            kept=kept,
            buffers=[arena.zeros(self._grads.size, np.float32) for _ in range(self._buffers)],
        )

    def actors(self, trainer: Trainer) -> ModelActors | None:
        return ModelActors(trainer, seed=self.seed) if self._by_actors else None

    def copies(self, trainer: Trainer) -> list[Array]:
        return []

    def metrics(self, done: StepResult) -> Mapping[str, float]:
        took_s = max(1e-9, (done.compute_ns + done.waited_ns) / 1e9)
        return {"samples_per_s": self._task.shards * self._task.samples / took_s}

    def profiler(self, out: Path) -> Profiler:
        return open_profiler(out, None, sequences=self._task.samples)

    def finish(
        self, trainer: Trainer, last: StepResult | None, held_out_loss: float, *, is_first: bool
    ) -> TaskResult | None:
        assert isinstance(trainer, _OwnTrainer), "another task's trainer"
        if not is_first:
            return None
        state = {name: np.ascontiguousarray(array) for name, array in trainer.state.items()}
        digest = hashlib.sha256(b"".join(array.tobytes() for array in state.values())).hexdigest()
        data = save(state)
        write_atomically(self._out / STATE_NAME, lambda file: file.write(data))
        result = TaskResult(
            steps=trainer.step,
            ranks=trainer.groups.world.size,
            loss_last=0.0 if last is None else last.loss,
            held_out_loss=held_out_loss,
            state_sha256=digest,
            directory=str(self._out),
        )
        report_result(self._worker, result)
        return result


class _OwnTrainer(OrderedSteps):
    """Trains a `DataParallelTask`: whole on every rank, its gradient summed along the shard tree."""

    file = None

    def __init__(
        self,
        task: DataParallelTask,
        initial: State,
        groups: MeshGroups,
        layout: ParameterLayout,
        grads: ParameterLayout,
        *,
        slots: list[Array],
        kept: StampedSlots | None,
        buffers: list[Array],
    ) -> None:
        super().__init__()
        self.kept, self.row = kept, ResultRow(task.shards, task.samples)
        self._found: Mapping[int, float] = {}
        """The losses of this rank's shards in the step under way."""
        self._total: Array = np.zeros(0, np.float32)
        """Its summed gradient."""
        self.groups, self.slots, self.slot, self.step, self.first = groups, slots, 0, 0, 0
        self._task, self._initial, self._layout, self._grads = task, initial, layout, grads
        self._room, self._buffers = buffers[-1], buffers
        self._saved: SavedState | None = None
        self._actors: ModelActors | None = None
        self._divide(assign_shards(task.shards, groups.size(DATA_AXIS)))

    @property
    def shard(self) -> _OwnTrainer:
        return self

    @property
    def held_most(self) -> None:
        """Activations are the task's own."""

    @property
    def scale(self) -> tuple[float, ...]:
        return ()

    @property
    def state(self) -> dict[str, Array]:
        """The arrays of the version in use, by name."""
        return self._state_in(self.slot)

    def _state_in(self, slot: int) -> dict[str, Array]:
        return _named(self._layout, self.slots[slot])

    def parts_in(self, slot: int) -> Iterator[Sequence[Array]]:
        yield [self.slots[slot]]

    def tensors(self, version: int) -> Iterator[HeldTensor]:
        for name, view in self._state_in(version % SLOTS).items():
            yield HeldTensor(name, flat_slice(view.size, 0, view.size), view)

    def supervised(self, actors: ModelActors) -> None:
        self._actors = actors

    def begin_from(self, saved: SavedState) -> None:
        self._saved, self.step, self.first = saved, saved.version, saved.version
        self.slot = saved.version % SLOTS

    def begin_anew(self) -> None:
        self.slot = self.first % SLOTS
        self.slots[self.slot][:] = 0
        for slot, view in zip(self._layout.slots, self._layout.views(self.slots[self.slot]), strict=True):
            saved = self._saved
            found = self._initial[slot.name] if saved is None else saved.parameter("weights", slot)
            view[...] = found.reshape(slot.shape)

    def _divide(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._plan = AccumulationPlan.of(self._task.shards, *assignment[self.groups.place(DATA_AXIS)])
        self._reporters = [
            rank for rank, (start, stop) in enumerate(self._assignment) for _ in range(start, stop)
        ]

    def enter(self, groups: MeshGroups, version: int) -> None:
        self.groups, self.step = groups, version
        self._divide(assign_shards(self._task.shards, groups.size(DATA_AXIS)))

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self._assignment)

    def rebalance(self, shares: Sequence[int]) -> bool:
        assignment = assignment_of(shares)
        if buffers_of(assignment) > len(self._buffers):
            return False
        self._divide(assignment)
        return True

    @property
    def _losses(self) -> Mapping[int, float]:
        return self._found

    def _differentiate(self) -> Computed:
        began_ns, task = now_ns(), self._task
        reduction = ShardReduction(self.groups.data, self._plan, self._assignment, self._buffers, self._room)
        ids = task.sample_ids(self.step)
        self._found = self._gradient(ids)
        self._consumed = {shard: ids[shard] for shard in self._found}
        computed_ns = now_ns()
        reduction.submit(slice(0, self._grads.size))
        try:
            reduction.finish()
        finally:
            reduction.drain()
        waited_ns, total = now_ns() - computed_ns, reduction.total
        total *= np.float32(1 / task.shards)
        self._total = total
        return Computed(
            norm=global_norm(total, xp=np), compute_ns=computed_ns - began_ns, waited_ns=waited_ns
        )

    def _update(self, made: Computed) -> None:
        new = self._state_in(1 - self.slot)
        gradient = _named(self._grads, self._total)
        update = partial(self._task.update, self.state, new, gradient, self.step)
        with spans.OPTIMIZER, watched("update", self._total):
            update() if self._actors is None else self._actors.update(update)
        self.slot = 1 - self.slot

    def _abandon(self, error: BaseException) -> None:
        self.groups.give_up()

    def _gradient(self, ids: npt.NDArray[np.int64]) -> dict[int, float]:
        """Compute this rank's shards; return their parts of the loss."""
        losses, state, everything = dict[int, float](), self.state, slice(0, self._grads.size)
        for leaf in self._plan.leaves:
            gradient = partial(self._task.gradient, state, ids[leaf.shard])
            with spans.BACKWARD:  # forward and backward are one call
                loss, found = gradient() if self._actors is None else self._actors.gradient(gradient)
            losses[leaf.shard] = float(loss) / self._task.shards
            into = self._buffers[leaf.buffer]
            for slot, view in zip(self._grads.slots, self._grads.views(into), strict=True):
                view[...] = found[slot.name]
            self._plan.perform(leaf.additions, self._buffers, everything)
        return losses

    def held_out_loss(self, *, windows_max: int) -> float:
        world = self.groups.world
        found = self._task.held_out_loss(self.state) if world.rank == 0 else 0.0
        return float(world.blocking.broadcast(np.array([found]), 0)[0])

    def pieces(self) -> list[Piece]:
        views = zip(self._layout.slots, self._layout.views(self.slots[self.slot]), strict=True)
        pieces = [
            Piece(slot.name, flat_slice(slot.size, 0, slot.size), (view.reshape(-1),)) for slot, view in views
        ]
        return share_of(pieces, ranks=self.groups.size(DATA_AXIS), place=self.groups.place(DATA_AXIS))

    def close(self, *, gave_up: bool = False) -> None:
        """Nothing is held of others."""


def _named(layout: ParameterLayout, flat: Array) -> dict[str, Array]:
    return {slot.name: view for slot, view in zip(layout.slots, layout.views(flat), strict=True)}
