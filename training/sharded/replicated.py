"""The policy by which each rank holds the whole state of its part of the model.

Ranks divide the logical shards of the recipe along `dp` and sum the gradients along the shard tree, bucket by
bucket, while the last backward pass still runs. Ranks that differ only along `dp` stand for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Assignment, assign_shards
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import NonFiniteProbe
from zbmd.training.autograd.op_watch import watched
from zbmd.training.checkpoint.sharded import Piece, SavedState, share_of
from zbmd.training.job.mesh import DATA_AXIS, Mesh, MeshGroups
from zbmd.training.job.step_order import Computed
from zbmd.training.model_actors.actors import HeldTensor
from zbmd.training.optim import HeldMatrices, arrays_of, saved_arrays
from zbmd.training.optim.clip import TrainingDiverged, clip_scale, non_finite
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.optim.mixed_precision import SCALE_FIRST, LossScale, computing_dtype
from zbmd.training.redundancy.cut_events import Resharding, Span
from zbmd.training.redundancy.stamped import StampedSlots
from zbmd.training.redundancy.state_file import PagedUpdate, StateFile
from zbmd.training.sharded.norm import mesh_norm
from zbmd.training.sharded.stage_of_view import RingRoom, StageOfView, activations_dtype
from zbmd.training.sharded.stages import FLOAT32, ONE_EACH, SLOTS, Stages, state_elements
from zbmd.training.sharded.trainer import MeshTrainer
from zbmd.training.step.non_finite import bad_gradient, bad_weights, describe_first_non_finite
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import (
    AccumulationPlan,
    ShardReduction,
    buffers_most,
    buffers_of,
    is_alone,
)
from zbmd.transport.memory.arena import Arena
from zbmd.transport.native._native import now_ns


class ReplicatedTrainer(MeshTrainer):
    """Trains with weights and gradients of `dtype`; see `MeshTrainer`.

    Of 16 bits, masters and moments are kept, and all is computed, in float32; `loss_scale` is what float16
    begins with. Arrays lie in `arena`, whose memory peers can read: that saves copies, and is needed where
    other ranks read the state; without one, in memory of this process alone. `keep` makes slots of so many
    float32 numbers that outlive the process, if it can. Without `overlap` the reductions
    begin when the backward pass has ended. `offload` makes a file for slots of so many float32 numbers: they
    lie there. With `largest`, views have meshes of any size along `dp` up to that one's. With a
    file, or `begins_later`, the slots hold the initial state only after `begin_anew`: a predecessor or a
    replica may have a later one. rings: memory of stages' rings that outlives this object. spare: more
    gradients than even shares of a batch need.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: MeshGroups,
        *,
        stages: Stages = ONE_EACH,
        dtype: np.dtype[np.floating] = FLOAT32,
        arena: Arena | None = None,
        keep: Callable[[int], StampedSlots | None] = lambda _: None,
        overlap: bool = True,
        loss_scale: float = SCALE_FIRST,
        offload: Callable[[int], StateFile] | None = None,
        begins_later: bool = False,
        largest: Mesh | None = None,
        rings: RingRoom | None = None,
        spare: int = 0,
    ) -> None:
        super().__init__(recipe, groups, stages)
        self._arena = arena
        self.overlap = overlap
        self.first = 0
        self.dtype, self.state_dtype = dtype, computing_dtype(dtype)
        self._initial_scale = LossScale.of(dtype, first=loss_scale)
        config = recipe.config
        self._arrays = arrays_of(config.optimizer)
        self.own, self._cuts = self.part.own, self.part.cuts
        size = self.own.layout.size
        sizes = range(1, largest.size(DATA_AXIS) + 1) if largest else [groups.size(DATA_AXIS)]
        buffers = buffers_most(config.shards, sizes) + spare
        self._buffers = [self._gradient() for _ in range(buffers)]
        is_apart = not is_alone(assign_shards(config.shards, (largest or groups.mesh).size(DATA_AXIS)))
        self._room = self._gradient() if is_apart else None
        self._view = self._stage = StageOfView(
            recipe,
            self.own,
            stages,
            self._buffers,
            dtype=activations_dtype(recipe.model, self.state_dtype),
            shrinks=largest is not None,
            moves=spare > 0,
            rings=rings,
        )
        self._divide()
        elements = state_elements(size, dtype, config.optimizer)
        self.file = None if offload is None else offload(elements)
        self.kept = keep(elements * self.state_dtype.itemsize // FLOAT32.itemsize) if not self.file else None
        stamped = self.file or self.kept
        if stamped is None:
            zeros = np.zeros if arena is None else arena.lazy_zeros
            self.slots = [zeros(elements, self.state_dtype) for _ in range(SLOTS)]
        else:
            self.slots = [slot.view(self.state_dtype) for slot in stamped.slots]
        """Versions of what this rank holds: weights and moments, one behind the other, and the loss scale, if
        it changes."""
        self._apart = self._gradient() if dtype != self.state_dtype or self.file is not None else None
        """The weights of the passes, where they are not the state's own."""
        self.slot = 0
        """The one in use."""
        self._initial: Array | None = None
        self._saved: SavedState | None = None
        self._begins_later = begins_later or self.file is not None
        self._optimizer = PagedUpdate(config.optimizer, self.own.layout, self.file, self._held_matrices())
        self._begin()
        self._scale = self._initial_scale
        """Of the last attempt."""

    def _divide(self, assignment: Assignment = ()) -> None:
        super()._divide(assignment)
        self._plan = AccumulationPlan.of(self.row.shards, *self._assignment[self.groups.data_place])
        self._view.enter(self.groups, self._plan, self._assignment)
        self._total = self._reduction().total
        """The gradient, of this rank's part, once an attempt has computed it."""

    def _has_room(self, assignment: Assignment) -> bool:
        return buffers_of(assignment) <= len(self._buffers)

    def _held_matrices(self) -> HeldMatrices | None:
        """Return the parts of this stage's hidden matrices along tp; None: they are whole."""
        found = self.part.matrices
        return HeldMatrices(matrices=tuple(found.values()), gather=self._gathered_along_tp) if found else None

    # ---- the state

    @property
    def state(self) -> AdamWState:
        """Weights and moments of this rank's part, in the slot in use."""
        return self._state_in(self.slot)

    def _state_in(self, slot: int) -> AdamWState:
        return AdamWState.of(self.slots[slot], self.own.layout.size, len(self._arrays))

    @property
    def loss_scale(self) -> LossScale:
        """That of the next step, the same on all ranks. Raises `UserError` for a state that is damaged."""
        return self._initial_scale.read(self._scale_room(self.slot))

    def _scale_room(self, slot: int) -> Array:
        return self.slots[slot][len(self._arrays) * self.own.layout.size :]

    @property
    def params(self) -> Array:
        """The weights of the passes; of 16 bits, as they were rounded last."""
        return self.state.weights if self._apart is None else self._apart

    def _prepare_weights(self) -> None:
        if self._apart is not None:
            self._apart[:] = self.state.weights

    @property
    def shard(self) -> ReplicatedTrainer:
        """See `Trainer`."""
        return self

    def begin_with(self, weights: Array) -> None:
        """Begin with the whole model's weights, not with the seed's."""
        self._initial = self.part.of(weights)
        self._begin()

    def begin_from(self, saved: SavedState) -> None:
        """Begin with the state in a checkpoint, of any mesh. Raises `UserError` for one that is damaged."""
        self._saved, self.step, self.first = saved, saved.version, saved.version
        self.slot = saved.version % SLOTS
        self._begin()

    def pieces(self) -> list[Piece]:
        """Return this rank's share of a checkpoint: its part of the state that its replicas along `dp` hold.

        Parameters that are whole along `tp` are written by the first rank there.
        """
        state, layout, optimizer = self.state, self.own.layout, self.recipe.config.optimizer
        views = (layout.views(getattr(state, name)) for name in self._arrays)
        pieces = [
            Piece(slot.name, cut, tuple(held[: len(saved_arrays(optimizer, slot.name, slot.shape))]))
            for (slot, cut), writes, *held in zip(self._cuts, self.part.writes, *views, strict=True)
            if writes
        ]
        return share_of(pieces, ranks=self.groups.size(DATA_AXIS), place=self.groups.place(DATA_AXIS))

    def tensors(self, version: int) -> Iterator[HeldTensor]:
        """See `StateSource`."""
        views = self.own.layout.views(self._state_in(version % SLOTS).weights)
        for (slot, cut), view in zip(self._cuts, views, strict=True):
            yield HeldTensor(slot.name, cut, view)

    def _begin(self) -> None:
        if not self._begins_later:
            self.begin_anew()

    def parts_in(self, slot: int) -> Iterator[Sequence[Array]]:
        """Views that together are all of a slot, run by run, the loss scale last."""
        yield from self._optimizer.parts_of(self._state_in(slot))
        yield [self._scale_room(slot)]

    def reshard(self, parts: int) -> Resharding:
        """See `ResizableState`: all ranks along `dp` hold the same."""
        elements, groups = self.slots[0].size, self.groups
        return Resharding(elements, [Span(groups.mesh.replica(groups.world.rank, parts), 0, elements, 0)])

    def _gradient(self) -> Array:
        """Return an array like the gradient, whose parameters are written before they are read."""
        layout, arena = self.own.layout, self._arena
        made = np.zeros(layout.size, self.dtype) if arena is None else arena.empty(layout.size, self.dtype)
        layout.clear_padding(made)
        return made

    def _ready(self, slot: Array) -> None:
        if self._arena is not None:
            self._arena.ready(slot)

    def begin_anew(self) -> None:
        """Take the state that the training begins with, in the slot of `first`."""
        recipe, saved, self.slot = self.recipe, self._saved, self.first % SLOTS
        self._ready(self.slots[self.slot])
        self.slots[self.slot][:] = 0
        scale = self._initial_scale
        if saved is not None:
            scale = scale.read(np.array(saved.loss_scale))
            for (slot, cut), own in zip(self._cuts, self.own.layout.slots, strict=True):
                for name in saved_arrays(recipe.config.optimizer, slot.name, slot.shape):
                    flat = getattr(self.state, name)
                    flat[own.span] = cut.of(saved.parameter(name, slot)).reshape(-1)
        elif self._initial is not None:
            self.state.weights[:] = self._initial
        else:
            self.state.weights[:] = self.part.initial(recipe.config.seed)
        scale.write(self._scale_room(self.slot))
        self._prepare_weights()

    def weights(self) -> Array:
        """The weights of the whole model, on all ranks; all together."""
        return self.part.whole(self.state.weights, self.groups)

    def held_out_loss(self, *, windows_max: int) -> float:
        """See `Trainer`. Ranks along `dp` share the windows."""
        return self.part.held_out_loss(self.recipe, self.state.weights, self.groups, windows_max=windows_max)

    # ---- steps

    def _reduction(self) -> ShardReduction:
        return ShardReduction(self.groups.data, self._plan, self._assignment, self._buffers, self._room)

    @property
    def _losses(self) -> Mapping[int, float]:
        shards, losses = (
            {leaf.shard: at for at, leaf in enumerate(self._plan.leaves)},
            self._view.passes.losses,
        )
        return {shard: losses[at] for shard, at in shards.items() if at in losses}

    def _attempt(self, scale: LossScale) -> float:
        self._scale, reduction = scale, self._reduction()
        try:
            return self._differentiated(scale, reduction)
        finally:
            reduction.drain()

    def _differentiated(self, scale: LossScale, reduction: ShardReduction) -> float:
        started_ns = now_ns()
        if self._plan.leaves:
            self._view.passes.run(
                self.params,
                self._batches([leaf.shard for leaf in self._plan.leaves]),
                deadline_ns=self.groups.world.deadline_ns(),
                final=reduction.submit if self.overlap else None,
                between=self._between,
                loss_scale=scale.scale,
            )
        computed_ns = now_ns()
        if not self.overlap or not self._plan.leaves:
            for span in self._view.passes.spans:
                reduction.submit(span)
        reduction.finish()
        self._compute_ns += computed_ns - started_ns
        self._waited_ns += now_ns() - computed_ns
        self._busy_ns = self._view.passes.busy_ns
        return self._norm()

    def _between(self) -> None:
        """Do what is due between two computations."""
        self._begun.look()

    def _norm(self) -> float:
        """The norm of the whole gradient; raises `TrainingDiverged`, on all ranks if on one."""
        groups = self.groups
        with spans.GRAD_CLIP, watched("global_norm", self._total):
            return mesh_norm(self._total, self.own, pipeline=groups.pipeline, tensor=groups.tensor)

    def _named(self, error: TrainingDiverged) -> TrainingDiverged:
        model, layout, watching = self.recipe.model, self.own.layout, NonFiniteProbe()
        partials = [self._buffers[place] for place in self._plan.partials.values()]
        gradient = bad_gradient([non_finite(layout, grads, xp=np) for grads in partials], model)
        watching.first = bad_weights(layout, self.params, model)
        with watching.on(), contextlib.suppress(TrainingDiverged):
            self._attempt(self._scale)
        began = describe_first_non_finite(self.groups.world, model, watching.first or gradient)
        return TrainingDiverged(f"step {self.step}: {error} {began}")

    def _abandon(self, error: BaseException) -> None:
        self.groups.give_up()
        self.close(gave_up=True)

    def _update(self, made: Computed) -> None:
        config, target = self.recipe.config, 1 - self.slot
        self._ready(self.slots[target])
        old, new = self.state, self._state_in(target)
        update = partial(
            self._optimizer.update,
            old,
            new,
            self._total,
            step=self.step,
            learning_rate=self.recipe.learning_rate(self.step),
            grad_scale=clip_scale(made.norm, limit=config.clip_norm) / made.loss_scale,
        )
        with spans.OPTIMIZER, watched("update", *old.arrays, *new.arrays, self._total):
            update() if self._actors is None else self._actors.update(update)
        self._scale.after(finite=True).write(self._scale_room(target))
        self._optimizer.paging.wrote(self._scale_room(target))
        self.slot = target

    def _end_step(self) -> None:
        self._prepare_weights()
