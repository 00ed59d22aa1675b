"""Training on a mesh of `dp × tp` ranks: the driver of a step, for one thread that may wait.

Along `dp` ranks share out the logical shards of the recipe, and sum the gradients along their tree: bucket
after bucket, while the backward pass goes on. So the bits do not depend on the size of `dp`, nor on whether
the two overlap. Along `tp` each holds a part of the parameters; there the order of sums depends on the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.collectives.group import Group
from zbmd.training.accumulate import AccumulationPlan, Buckets
from zbmd.training.adamw import AdamWState
from zbmd.training.clip import TrainingDiverged, norm_from
from zbmd.training.config import GPTConfig
from zbmd.training.gpt import GPT
from zbmd.training.mesh import Mesh
from zbmd.training.recipe import Recipe
from zbmd.training.reduction import ShardReduction
from zbmd.training.tensor.model import ParallelGPT
from zbmd.training.tensor.shards import cut_of
from zbmd.training.xp import Array
from zbmd.transport import faults
from zbmd.transport._native import now_ns
from zbmd.transport.errors import UserError

DATA_AXIS, TENSOR_AXIS = "dp", "tp"
BACKWARD_POINT = faults.declare("mesh.backward", "in a backward pass on a mesh, before a bucket is sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshStep:
    """What a step reported, the same on all ranks but for times: loss (nats per token), norm unclipped.

    compute_ns: forwards and backwards, with the waits along `tp`; waited_ns: behind that, for reductions
    along `dp`.
    """

    step: int
    loss: float
    grad_norm: float
    compute_ns: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """This rank's groups along the axes of a mesh; None for an axis of one rank."""

    world: Group
    mesh: Mesh
    data: Group | None
    tensor: Group | None

    @classmethod
    async def of(cls, world: Group, mesh: Mesh) -> MeshGroups:
        """Make the groups; all members of `world` together.

        Raises `UserError` for a mesh of other axes than dp and tp, or one that does not fit the group, and as
        `Group.subgroup`.
        """
        strange = [axis for axis in mesh.axes if axis not in (DATA_AXIS, TENSOR_AXIS)]
        if strange:
            raise UserError(f"there is no training along {', '.join(strange)} on a mesh yet: use dp and tp.")
        if mesh.world_size != world.size:
            raise UserError(f"the mesh {mesh} has {mesh.world_size} ranks, and there are {world.size}.")
        place, made = world.members.index(world.rank), dict[str, Group]()
        for axis in (DATA_AXIS, TENSOR_AXIS):
            if mesh.size(axis) > 1:
                ranks = [world.members[index] for index in mesh.group_of(place, axis)]
                made[axis] = await world.subgroup(ranks)
        return cls(world, mesh, made.get(DATA_AXIS), made.get(TENSOR_AXIS))

    async def close(self) -> None:
        """Close them, not the world's."""
        for group in (self.data, self.tensor):
            if group is not None:
                await group.close()

    def model(self, config: GPTConfig, *, recompute: bool = False) -> GPT:
        """This rank's part of the model."""
        if self.tensor is None:
            return GPT(config, recompute=recompute)
        return ParallelGPT(config, self.tensor, recompute=recompute)


class MeshTrainer:
    """Trains `recipe`, whose model is of `groups.model`, in arrays of `dtype` that `empty(size)` makes.

    `empty` may give memory that peers can read (`node.segment.arena`), which saves copies. Without `overlap`
    the reductions begin when the backward pass has ended.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: MeshGroups,
        *,
        dtype: npt.DTypeLike = np.float32,
        empty: Callable[[int, npt.DTypeLike], Array] = np.empty,
        overlap: bool = True,
    ) -> None:
        self.recipe = recipe
        self.groups = groups
        self.overlap = overlap
        self.step = 0
        layout, shards = recipe.model.layout, recipe.config.shards
        data, place = groups.data, 0
        if data is not None:
            place = data.members.index(data.rank)
        self._assignment = assign_shards(shards, groups.mesh.size(DATA_AXIS))
        self._plan = AccumulationPlan.of(shards, *self._assignment[place])
        self._buckets = Buckets(layout)

        def zeros() -> Array:
            made = empty(layout.size, dtype)
            made[...] = 0.0
            return made

        self._buffers = [zeros() for _ in range(self._plan.buffers)]
        self._total = zeros() if data is not None else self._buffers[next(iter(self._plan.partials.values()))]
        weights = recipe.model.init(recipe.config.seed).astype(dtype)
        self.state = AdamWState(weights, np.zeros_like(weights), np.zeros_like(weights))
        self._spare = AdamWState(*(np.zeros_like(weights) for _ in range(3)))

    def run_step(self) -> MeshStep:
        """Do one step; all ranks together.

        Raises `PeerLost` or `OperationAborted` when a rank is lost, and `TrainingDiverged` on all alike; the
        state is then that before the step.
        """
        started_ns, ids = now_ns(), self.recipe.sample_ids(self.step)
        reduction = None
        if self.groups.data is not None:
            reduction = ShardReduction(
                self.groups.data, self._plan, self._assignment, self._buffers, self._total
            )
        try:
            losses = [self._run_leaf(index, ids, reduction) for index in range(len(self._plan.leaves))]
            computed_ns = now_ns()
            if reduction is not None:
                if not self.overlap or not self._plan.leaves:
                    for span in self._buckets.spans:
                        reduction.submit(span)
                reduction.finish()
        finally:
            if reduction is not None:
                reduction.drain()
        reduced_ns = now_ns()
        loss = self._loss(losses)
        norm = self._norm()
        self.recipe.apply(self.state, self._spare, self._total, step=self.step, norm=norm)
        self.state, self._spare = self._spare, self.state
        self.step += 1
        return MeshStep(
            step=self.step - 1,
            loss=loss,
            grad_norm=norm,
            compute_ns=computed_ns - started_ns,
            waited_ns=reduced_ns - computed_ns,
        )

    def weights(self) -> Array:
        """The weights of the whole model, on all ranks; all together."""
        return self.whole(self.state.weights)

    def whole(self, flat: Array) -> Array:
        """The whole flat array of which each rank holds the part `flat`; all ranks together."""
        model, tensor = self.recipe.model, self.groups.tensor
        if tensor is None or not isinstance(model, ParallelGPT):
            return flat.copy()
        end_ns = tensor.deadline_ns()
        every = tensor.submit(lambda c: c.all_gather_v(flat, deadline_ns=end_ns)).result()
        sizes = [model.shards.layout(part).size for part in range(tensor.size)]
        return model.shards.joined(np.split(every, np.cumsum(sizes)[:-1]))

    def _run_leaf(self, index: int, ids: npt.NDArray[np.int64], reduction: ShardReduction | None) -> float:
        """Compute one shard; behind the last one, send each bucket on its way as it becomes final."""
        leaf, last = self._plan.leaves[index], index == len(self._plan.leaves) - 1
        overlapped = reduction if last and self.overlap else None
        self._buckets.begin()

        def send(parameter: int) -> None:
            span = self._buckets.ready(parameter)
            if span is not None and overlapped is not None:
                faults.hit(BACKWARD_POINT)
                self._plan.perform(leaf.additions, self._buffers, span)
                overlapped.submit(span)

        loss = self.recipe.shard_gradient(
            self.state.weights,
            self._buffers[leaf.buffer],
            ids[leaf.shard],
            step=self.step,
            on_grad_ready=send,
        )
        if overlapped is None:
            everything = slice(0, self.recipe.model.layout.size)
            self._plan.perform(leaf.additions, self._buffers, everything)
        return loss

    def _loss(self, losses: list[float]) -> float:
        """The sum of all shards' losses, in their order, whoever has computed them."""
        every = np.zeros(self.recipe.config.shards)
        for leaf, loss in zip(self._plan.leaves, losses, strict=True):
            every[leaf.shard] = loss
        if self.groups.data is not None:
            self.groups.data.blocking.all_reduce(every)
        return sum(every.tolist())

    def _norm(self) -> float:
        """The norm of the whole gradient; raises `TrainingDiverged`, on all ranks if on one."""
        tensor, total, step = self.groups.tensor, self._total, self.step
        if tensor is None:
            return self.recipe.norm(total, step=step)
        layout = self.recipe.model.layout
        squares = np.zeros(2)
        for slot, view in zip(layout.slots, layout.views(total), strict=True):
            flat = view.reshape(-1)
            squares[1 if cut_of(slot.name)[1] else 0] += float(np.dot(flat, flat))
        cut = squares[1:].copy()
        tensor.blocking.all_reduce(cut)
        try:
            return norm_from(float(squares[0] + cut[0]))
        except TrainingDiverged as error:
            raise self.recipe.diverged(error, total, step=step) from None


def arena_bytes_needed(size: int, shards: int, data_ranks: int, itemsize: int = 4) -> int:
    """Bytes of arena for the gradients of a rank that holds flat arrays of `size` elements."""
    most = max(AccumulationPlan.of(shards, *share).buffers for share in assign_shards(shards, data_ranks))
    return math.ceil((most + 1) * size * itemsize)
