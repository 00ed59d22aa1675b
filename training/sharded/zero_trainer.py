"""ZeRO on a mesh: the driver of `ZeroStep`. It performs what the machine says, and decides nothing.

The state of each part of the model is sharded along `dp`, or along `fsdp`: ranks along `dp` then hold the
same shards, and stand for each other. Operations of the group that shares a state run on its data-plane
thread, in the machine's order, while this thread computes: weights are gathered ahead, and gradients reduced
behind, the passes. What the machine hears of an operation it hears between two computations, or when there is
nothing to compute. Along `pp`, a stage is one unit, whose backward pass is all passes of the step.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, assert_never

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Assignment, assign_shards
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import NonFiniteProbe, active_probe
from zbmd.training.autograd.op_watch import watched
from zbmd.training.autograd.tape import Tensor
from zbmd.training.checkpoint.sharded import Piece, SavedState, share_of, shared_out
from zbmd.training.job.mesh import DATA_AXIS, MeshGroups
from zbmd.training.job.step_order import Computed
from zbmd.training.model.gpt import Batch
from zbmd.training.model.tensor_parallel import TensorGroup
from zbmd.training.model_actors.actors import HeldTensor
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.optim import saved_arrays
from zbmd.training.optim.clip import Pieces, TrainingDiverged, clip_scale, square_like
from zbmd.training.optim.mixed_precision import LossScale, storage_dtype
from zbmd.training.redundancy.stamped import StampedSlots
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.run.journal import captured_machine
from zbmd.training.sharded.stage_of_view import RingRoom, StageOfView, activations_dtype
from zbmd.training.sharded.stages import FLOAT32, ONE_EACH, Stages
from zbmd.training.sharded.trainer import MeshTrainer
from zbmd.training.step.non_finite import NOT_FOUND, describe_first_non_finite, described_losses
from zbmd.training.step.recipe import Recipe, mean_loss
from zbmd.training.step.reduction import gather_pieces, partials_of, state_sums
from zbmd.training.zero import machine as zm
from zbmd.training.zero.layout import Accountant, MemoryKind, is_by_layers, shards_of
from zbmd.training.zero.machine import ZERO_STEP
from zbmd.training.zero.options import ZeroOptions
from zbmd.training.zero.rank import PartOfModel, ZeroRank, slot_elements
from zbmd.training.zero.reduction import ShardedNorm, ShardedReduction
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost
from zbmd.transport.memory.arena import Arena
from zbmd.transport.native._native import now_ns

STEP_LOST: Final = (PeerLost, OperationAborted, DeadlineExceeded)
"""A step that ends by one of these is run again, and needs the memory that it had."""

FORWARD_POINT = faults.declare("zero.forward", "before a unit is computed forwards")
BACKWARD_POINT = faults.declare("zero.backward", "before a unit is computed backwards")
NORM_POINT = faults.declare("zero.norm", "when all gradients are reduced, before the norm is shared")
UPDATE_POINT = faults.declare("zero.update", "before the shard is updated in place")
UPDATED_POINT = faults.declare("zero.updated", "when the shard is updated")


class ZeroTrainer(MeshTrainer):
    """Trains with the state of each part of the model sharded along `dp` or `fsdp`; see `MeshTrainer`.

    The worker was joined with an arena of at least `arena_bytes_needed`. keep_previous: see `ZeroRank`;
    offload: makes the file of so many float32 numbers. spare: partial sums beyond those of even shares, for
    which that arena has room. shrinks: whether views may have fewer ranks along
    `dp`, for this trainer or one that follows it; rings: memory that they share.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: MeshGroups,
        options: ZeroOptions,
        *,
        stages: Stages = ONE_EACH,
        keep_previous: bool = False,
        offload: Callable[[int], StateFile] | None = None,
        keep: Callable[[int], StampedSlots | None] = lambda _: None,
        shrinks: bool = False,
        rings: RingRoom | None = None,
        spare: int = 0,
    ) -> None:
        super().__init__(recipe, groups, stages)
        self.options, self._spare = options, spare
        config, worker, mesh = recipe.config, groups.worker, groups.mesh
        arena = worker.segment.arena
        self.memory = self._accountant(arena)
        self._reduction = ShardedReduction(groups, config.shards)
        shards = shards_of(self.part.own, mesh.size(mesh.sharded_axis))
        elements = slot_elements(shards, config.optimizer, storage_dtype(options.storage))
        self.file = None if offload is None else offload(elements)
        self.kept = None if self.file else keep(elements)
        self._buffers: list[Array] = []
        """Gradients of the passes that are under way."""
        self._stage = self._stage_of_view(stages, rings, shrinks=shrinks)
        self.own = self._rank_of(
            recipe.model,
            shards,
            self._reduction.sums,
            rank=groups.place(mesh.sharded_axis),
            stage=options.stage,
            storage=options.storage,
            optimizer=config.optimizer,
            seed=config.seed,
            memory=self.memory,
            keep_previous=keep_previous,
            loss_scale=options.loss_scale,
            offload=self.file,
            kept=self.kept,
            gather=lambda piece: gather_pieces(self._update_group, piece),
            part=self._sharded_part(),
        )
        self._update_group: TensorGroup = self._group
        """The group in which an optimizer gathers whole matrices."""
        units = len(shards.units)
        machine = {"stage": options.stage, "units": units, "prefetch": options.prefetch}
        self._machine = captured_machine(worker, ZERO_STEP, "zero", zm.ZeroStep(**machine), machine)
        self._pending: deque[tuple[Future[Any], Callable[[Any], zm.Event]]] = deque()
        self._actions = deque[zm.Action]()
        """Of the step under way, to be performed."""
        self._scale = self.own.initial_scale
        """Loss scale of the attempt under way, with the skips before it."""
        self._norm, self._began_ns = 0.0, 0
        self._pieces: list[Pieces] = []
        """Of all ranks' gradients, of the last attempt."""
        self._divide()

    def _accountant(self, arena: Arena) -> Accountant:
        return Accountant(arena.empty, arena.zeros, arena.lazy_zeros, arena.lazy_empty, ready=arena.ready)

    def _rank_of(self, *arguments: Any, **given: Any) -> ZeroRank:
        return ZeroRank(*arguments, **given)

    def _divide(self, assignment: Assignment = ()) -> None:
        super()._divide(assignment)
        groups, parts = self.groups, self.part.own
        self._reduction = ShardedReduction(groups, self.row.shards, assignment)
        self.own.divide(self._reduction.sums)
        layers = [part.layers for part in parts.every]
        square = square_like(self.own.gradients[0])
        self._norms = ShardedNorm(groups.mesh, self.recipe.model, layers, square=square)
        if self._stage is not None:
            self._stage.enter(groups, self._reduction.sums.plan(self.own.rank), self._assignment)

    def _has_room(self, assignment: Assignment) -> bool:
        shards, mesh = self.row.shards, self.groups.mesh
        states = mesh.size(DATA_AXIS) if mesh.has_shards_alike else 1
        even = partials_of(state_sums(shards, assign_shards(shards, mesh.data_ranks), states))
        wanted = partials_of(state_sums(shards, assignment, states))
        return all(a <= b + self._spare for a, b in zip(wanted, even, strict=True))

    def _stage_of_view(self, stages: Stages, rings: RingRoom | None, *, shrinks: bool) -> StageOfView | None:
        own, buffers = self.part.own, self._buffers
        if is_by_layers(own):
            return None
        dtype = activations_dtype(self.recipe.model, FLOAT32)
        return StageOfView(
            self.recipe,
            own,
            stages,
            buffers,
            dtype=dtype,
            shrinks=shrinks,
            moves=self._spare > 0,
            rings=rings,
        )

    def _sharded_part(self) -> PartOfModel:
        part, seed = self.part, self.recipe.config.seed

        def alike(ranks: int) -> Sequence[int]:
            return self.groups.mesh.alike(self.groups.world.rank, ranks)

        def replica(ranks: int) -> int:
            return self.groups.mesh.replica(self.groups.world.rank, ranks)

        return PartOfModel(
            initial=lambda: part.initial(seed),
            cuts=part.cuts,
            matrices=part.matrices,
            gather=self._gathered_along_tp,
            walk=None if self._stage is None else self._walk,
            places=alike,
            replica=replica if self.groups.mesh.has_shards_alike else None,
        )

    @property
    def _group(self) -> Group:
        """The ranks that share the state of this part of the model."""
        found = self.groups.sharding
        assert found is not None, "the reduction refuses a mesh without it"
        return found

    # ---- steps

    @property
    def _notices_begin(self) -> bool:
        """Whether all ranks share one state: a gathered unit shows it, or weights that all have updated."""
        return self._group is self.groups.world

    @property
    def _losses(self) -> Mapping[int, float]:
        return self.own.losses

    def _differentiate(self) -> Computed:
        self._began_ns = now_ns()
        if self._notices_begin and self.options.stage < 3:
            self._begun.tell()
        return super()._differentiate()

    def _abandon(self, error: BaseException) -> None:
        self._give_up(f"{type(error).__name__}: {error}")
        if isinstance(error, STEP_LOST):
            _forget_frames(error)

    def _named(self, error: TrainingDiverged) -> TrainingDiverged:
        """`error` with where it began, on all ranks alike: all is computed once more, and looked at."""
        watching, step, known = NonFiniteProbe(), self.step, self._known_of_attempt()
        self.own.look_at_weights(watching)
        otherwise = NOT_FOUND
        with watching.on(), contextlib.suppress(TrainingDiverged):
            self._attempt(self._scale)
            otherwise = (
                f"It did not come again when the step was computed once more. The first time {known}. "
                "The same numbers give the same bits, so look for a processor or memory that errs there."
            )
        began = describe_first_non_finite(
            self.groups.world, self.recipe.model, watching.first, otherwise=otherwise
        )
        return TrainingDiverged(f"step {step}: {error} {began}")

    def _known_of_attempt(self) -> str:
        """Describe an attempt whose norm was not finite, the same on all ranks."""
        members, losses = self.groups.world.members, () if self._told is None else self._told.losses
        told = described_losses(losses, [members[place] for place in self._reporters])
        if told is not None:
            return told
        first = self._norms.not_finite(self._pieces)
        if first is None:
            return "all losses and all parts of the gradient were finite, and its norm was not"
        stage, unit, place = first
        name = self.recipe.model.unit_names[unit] if self._stage is None else f"stage {stage}"
        return (
            "the losses of all ranks were finite, and the summed gradient was not: of "
            f"{name} first, in the part of rank {members[place]}"
        )

    def _attempt(self, scale: LossScale) -> float:
        self._scale = scale
        self.own.begin(self._batches(self.own.leaves), loss_scale=scale.scale)
        self._actions.clear()
        self._actions += self._handle(zm.Begin())
        if isinstance(self._drive(), zm.Finished):
            raise TrainingDiverged(
                "the gradient's norm is not finite: the training diverged. Lower the learning rate, or clip "
                "harder."
            )
        if self._stage is None:
            self._compute_ns = now_ns() - self._began_ns
        else:
            self._waited_ns = now_ns() - self._began_ns - self._compute_ns
        return self._norm

    def _drive(self) -> zm.Update | zm.Finished:
        """Perform actions, and what follows, up to the update, or to the end of the attempt."""
        actions = self._actions
        while True:
            self._begun.look()
            if actions and isinstance(actions[0], zm.Update | zm.Finished):
                found = actions.popleft()
                assert isinstance(found, zm.Update | zm.Finished)
                return found
            event = self._perform(actions.popleft()) if actions else self._heard(wait_for_it=True)
            while event is not None:
                actions += self._handle(event)
                event = self._heard(wait_for_it=False)

    def _handle(self, event: zm.Event) -> list[zm.Action]:
        actions = self._machine.handle(event, now_ns=now_ns())
        self._machine.check_invariants()
        return actions

    def _perform(self, action: zm.Action) -> zm.Event | None:
        """Do it; the event it ends in if it is done, else None."""
        match action:
            case zm.Gather(unit=unit):
                self._gather(unit)
            case zm.Reduce(unit=unit):
                self._reduce(unit)
            case zm.ShareNorm():
                return self._share_norm()
            case zm.Release(unit=unit):
                self.own.release(unit)
            case zm.Forward(unit=unit):
                faults.hit(FORWARD_POINT)
                self.own.forward(unit)
                return zm.Computed(unit=unit)
            case zm.Backward(unit=unit):
                faults.hit(BACKWARD_POINT)
                self.own.backward(unit)
                return zm.Computed(unit=unit)
            case zm.Abandon(units=units):
                self.own.abandon(units)
            case zm.Update() | zm.Finished():
                raise LocalProtocolError(f"{action} is not performed in between")
            case _:
                assert_never(action)
        return None

    def _heard(self, *, wait_for_it: bool) -> zm.Event | None:
        """The end of the oldest operation under way; None if it has not ended, unless `wait_for_it`."""
        if not self._pending or not (wait_for_it or self._pending[0][0].done()):
            assert not wait_for_it, "nothing is under way, and the step is not done"
            return None
        future, take = self._pending[0]
        with spans.COMM:
            result = future.result()
        self._pending.popleft()
        return take(result)

    def _submit(self, operation: Callable[[Communicator], Any], take: Callable[[Any], zm.Event]) -> None:
        self._pending.append((self._group.submit(operation), take))

    def _give_up(self, reason: str) -> None:
        """Drain what is under way, and drop the step: others wait for us no longer."""
        self.groups.give_up()
        ended = wait([future for future, _ in self._pending]).done
        self._pending.clear()
        for future in ended:
            if not future.cancelled():
                _forget_frames(future.exception())
        if self._stage is not None:
            self._stage.close(gave_up=True)
        self._actions.clear()
        for action in self._handle(zm.Lost(reason=reason)):
            self._perform(action)

    def _walk(
        self, weights: Array, buffers: list[Array], batches: Sequence[Batch], loss_scale: float
    ) -> Mapping[int, float]:
        """Pass all micro-batches through this rank's stage; see `Walk`."""
        assert self._stage is not None, "units are computed in turn"
        if not batches:
            return {}
        self._buffers[:], began_ns = buffers, now_ns()
        try:
            passes = self._stage.passes
            passes.run(
                weights,
                batches,
                deadline_ns=self.groups.world.deadline_ns(),
                final=None,
                between=self._begun.look,
                loss_scale=loss_scale,
            )
        finally:
            self._buffers.clear()
        self._compute_ns += now_ns() - began_ns
        return {self.own.leaves[at]: loss for at, loss in passes.losses.items()}

    # ---- operations of the group

    def _gather(self, unit: int) -> None:
        part, end_ns = self.own.part(unit), self._group.deadline_ns()
        out = self.own.room(unit).reshape(self._group.size, len(part))

        def gathered(_: Any) -> zm.Event:
            if self._notices_begin:
                self._begun.tell()
            watching = active_probe()
            if watching is not None:
                self.own.look_at_gathered(watching, unit)
            return zm.Gathered(unit=unit)

        self._submit(lambda c: c.all_gather(part, out, deadline_ns=end_ns), gathered)

    def _reduce(self, unit: int) -> None:
        ranks, part, take = self._group.size, len(self.own.part(unit)), self.memory.take
        sent = [array.reshape(ranks, -1) for array in self.own.outgoing(unit)]
        room = [take(MemoryKind.WORKING, array.size, array.dtype) for array in sent]
        received = [array.reshape(ranks, -1) for array in room]
        out = take(MemoryKind.WORKING, part, self.own.dtype) if self._reduction.has_replicas else None

        def reduced(total: Array) -> zm.Event:
            self.own.take_reduced(unit, total)
            for array in room if out is None else [*room, out]:
                self.memory.free(MemoryKind.WORKING, array)
            return zm.Reduced(unit=unit)

        self._pending.append((self._reduction.submit(sent, received, out), reduced))

    def _share_norm(self) -> zm.Event:
        """Share the vote, the losses and samples of shards and the pieces of the norm, in one operation."""
        faults.hit(NORM_POINT)
        self._begun.wait()
        lengths = self._norms.lengths
        mine = np.zeros(max(lengths))
        with spans.GRAD_CLIP, watched("global_norm", *self.own.gradients):
            pieces = self._norms.pieces(self.groups.world.rank, self.own.gradients)
        mine[: len(pieces)] = pieces
        self._busy_ns = 0 if self._stage is None else self._stage.passes.busy_ns
        told = self._share(mine, votes=not self._watch.applies_first)
        self._pieces = [row[:length] for row, length in zip(told.beside, lengths, strict=True)]
        try:
            with spans.GRAD_CLIP:
                self._norm = self._norms.norm(self._pieces)
        except TrainingDiverged:
            return zm.NormShared(usable=False)
        return zm.NormShared(usable=True)

    def _update(self, made: Computed) -> None:
        faults.hit(UPDATE_POINT)
        config, step, scale = self.recipe.config, self.step, made.loss_scale
        with spans.OPTIMIZER:
            self.own.update(
                step=step,
                learning_rate=self.recipe.learning_rate(step),
                grad_scale=clip_scale(made.norm, limit=config.clip_norm) / scale,
                loss_scale=self._scale.after(finite=True),
            )

    def _end_step(self) -> None:
        """Gather the weights, where a rank has all of them."""
        faults.hit(UPDATED_POINT)
        self._actions += self._handle(zm.Updated())
        self._drive()

    # ---- between steps

    @property
    def shard(self) -> ZeroRank:
        """See `Trainer`."""
        return self.own

    @property
    def loss_scale(self) -> LossScale:
        """See `MeshTrainer`."""
        return self.own.loss_scale

    def begin_with(self, weights: Array) -> None:
        """Begin with the whole model's weights, not with the seed's."""
        self.own.begin_with(self.part.of(weights))

    def begin_from(self, saved: SavedState) -> None:
        """Begin with the state in a checkpoint, of any mesh; go on with `enter`."""
        self.own.begin_from(saved)
        self.step = saved.version

    def enter(self, groups: MeshGroups, version: int) -> None:
        """See `Trainer`. The state is shared by as many; under stages 1 and 2 weights are gathered."""
        super().enter(groups, version)
        actors = self._actors
        self._update_group = self._group if actors is None else actors.group(self._group)

    def _prepare_weights(self) -> None:
        self.own.round_weights()
        for unit in range(len(self.own.shards.units) if self.options.stage < 3 else 0):
            self._gather_all(self.own.part(unit), self.own.room(unit))

    def _gather_all(self, part: Array, room: Array) -> None:
        with spans.COMM:
            self._group.blocking.all_gather(part, out=room.reshape(self._group.size, len(part)))

    def _wholes(self, flat: Array) -> Iterator[tuple[int, Array]]:
        """Yield each unit with all elements of it, and then zeros, from the shards `flat` of all ranks."""
        for number, unit in enumerate(self.own.shards.units):
            whole = np.empty(self._group.size * unit.part, np.float32)
            self._gather_all(np.ascontiguousarray(flat[unit.in_shard]), whole)
            yield number, whole

    def _evaluated(self) -> Iterator[tuple[int, Array]]:
        """Yield each unit with the weights that are evaluated."""
        return self._wholes(self.own.state.weights)

    def held_out_loss(self, *, windows_max: int) -> float:
        """See `Trainer`. Ranks share the windows, and gather the masters of a unit at a time."""
        recipe, own, data = self.recipe, self.own, self.groups.data
        ranks, place = self.groups.mesh.data_ranks, self.groups.data_place
        if self._stage is not None:
            ((_, whole),) = self._evaluated()
            weights = whole[: own.shards.layout.size]
            return self.part.held_out_loss(recipe, weights, self.groups, windows_max=windows_max)
        chunks = recipe.evaluation_chunks(windows_max)
        totals = np.zeros(len(chunks))
        for start in range(0, len(chunks), ranks):
            mine, x = range(start + place, len(chunks))[:1], Tensor(np.zeros(0))
            batches = [
                recipe.model.batch(recipe.corpus.windows(chunks[at]), global_batch=len(chunks[at]))
                for at in mine
            ]
            for number, whole in self._evaluated():
                for batch in batches:
                    x = own.passes.evaluate(number, whole, x, batch)
            for at in mine:
                totals[at] = float(x.data) * len(chunks[at])
        return mean_loss([totals] if data is None else data.blocking.all_gather(totals), chunks)

    def tensors(self, version: int) -> Iterator[HeldTensor]:
        """See `Trainer`."""
        yield from self.own.tensors(version)

    def supervised(self, actors: ModelActors) -> None:
        """See `Trainer`."""
        super().supervised(actors)
        self.own.passes.actors = actors

    def pieces(self) -> list[Piece]:
        """See `Trainer`. A shard of a slice along `tp` is no slice: ranks share out whole ones."""
        if self.groups.tensor is None:
            return self._own_pieces()
        own, slots, place = self.own, self.own.shards.layout.slots, self.groups.data_place
        optimizer = self.recipe.config.optimizer
        written = [index for index, writes in enumerate(self.part.writes) if writes]
        shares = shared_out([slots[index].size for index in written], self.groups.mesh.data_ranks)
        held: dict[int, list[Array]] = {written[at]: [] for at in shares[place]}
        for name in own.arrays:
            for number, whole in self._wholes(getattr(own.state, name)):
                unit = own.shards.units[number]
                for index in range(unit.parameters.start, unit.parameters.stop):
                    slot = slots[index]
                    if index in held and name in saved_arrays(optimizer, slot.name, slot.shape):
                        start = slot.offset - unit.span.start
                        held[index].append(whole[start : start + slot.size].copy())
        return [Piece(slots[index].name, self.part.cuts[index][1], tuple(held[index])) for index in held]

    def _own_pieces(self) -> list[Piece]:
        """Return the parts of this rank's shard that it writes, and not one that holds the same."""
        pieces, groups = self.own.pieces(), self.groups
        if not groups.mesh.has_shards_alike:
            return pieces
        return share_of(pieces, ranks=groups.size(DATA_AXIS), place=groups.place(DATA_AXIS))

    def weights(self) -> Array:
        """Return the masters of the whole model, float32; all ranks together."""
        every = self._group.blocking.all_gather(np.ascontiguousarray(self.own.state.weights))
        return self.part.whole(self.own.shards.whole(list(every)), self.groups)


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames that an error has passed: they hold arrays, and futures, which hold the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
