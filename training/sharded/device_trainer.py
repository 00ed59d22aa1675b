"""Train on a GPU: each rank holds its state, whole or sharded, on its device, and a copy in host memory.

The device computes passes, sums of shards, norm, update, and the digest of its state. A new version is copied
to its slot in host memory beside the step that follows, where redundancy and checkpoints read it as they do
any rank's, and where it outlives the process. It is voted for, and so committed, during that step. A view
begins with a copy back from the slot in use, whoever filled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import numpy as np

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.op_watch import watched
from zbmd.training.job.mesh import DATA_AXIS, TENSOR_AXIS, MeshGroups
from zbmd.training.job.step_order import AllBegun, Computed, LateBegun, OrderedSteps
from zbmd.training.model.gpt import Batch
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.transfers import StateCopy
from zbmd.training.optim.clip import TrainingDiverged, clip_scale, non_finite
from zbmd.training.optim.elementwise import update_blocks
from zbmd.training.optim.on_device import DeviceOptimizer
from zbmd.training.sharded.replicated import ReplicatedTrainer
from zbmd.training.sharded.zero_trainer import ZeroTrainer
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.step_hook import NO_HOOK, StepHook
from zbmd.training.zero.layout import Accountant
from zbmd.training.zero.on_device import DeviceZeroRank, StateOnDevice
from zbmd.training.zero.options import WEIGHTS_STAGE
from zbmd.training.zero.rank import ZeroRank
from zbmd.transport.memory.arena import Arena


async def connect_devices(groups: MeshGroups, executor: Executor) -> str:
    """Have GPUs of one host read each other's memory, in the groups that exchange gradients and weights.

    Where they cannot, arrays pass through page-locked memory of the host. Returns which, and why. All ranks
    together.
    """
    axes = (TENSOR_AXIS, groups.mesh.sharded_axis, DATA_AXIS, DATA_AXIS)
    found = zip(axes, (groups.tensor, groups.sharding, groups.replicas, groups.data), strict=True)
    every = {id(group): (axis, group) for axis, group in found if group is not None and group.size > 1}
    told: list[str] = []
    for axis, group in every.values():
        paths = await group.connect_devices(cast(Any, executor.empty(1, np.float32)))
        told.append(f"{axis}: {'direct' if paths.direct else 'through the host'}, {paths.reason}")
    return "; ".join(told)


def begins_on_device(trainer: OrderedSteps, watch: StepHook, settle: Callable[[], object]) -> AllBegun:
    """Return what tells the hook that all ranks hold the version before this step, in host memory.

    Where peers copy it, they meet for that later in the step; elsewhere each rank's own copy matters alone,
    which its vote waits for.
    """
    world = trainer.groups.world

    def meets() -> Future[None]:
        settle()
        end_ns = world.deadline_ns()
        return world.submit(lambda c: c.barrier(deadline_ns=end_ns))

    if watch is not NO_HOOK and watch.is_copied:
        return LateBegun(watch, trainer.step, meets)
    begun = AllBegun(watch, trainer.step, None)
    begun.tell()
    return begun


class DeviceTrainer(StateOnDevice, ReplicatedTrainer):
    """A `ReplicatedTrainer` whose model is one of `executor`'s array module; weights are bf16 there."""

    def __init__(self, recipe: Recipe, groups: MeshGroups, executor: Executor, **settings: Any) -> None:
        self.executor = executor
        self._held: list[DeviceArray] = []
        """Weights and moments, float32, of the version in use."""
        self._device_optimizer: DeviceOptimizer | None = None
        self._copy = StateCopy(executor)
        super().__init__(recipe, groups, **settings)

    def _begins(self) -> AllBegun:
        self.executor.begin_step()
        return begins_on_device(self, self._watch, self._copy.settle)

    def _between(self) -> None:
        if isinstance(self._begun, LateBegun):
            self._begun.meet()
        super()._between()

    def _gradient(self) -> Array:
        made = self.executor.empty(self.own.layout.size, self.dtype)
        self.own.layout.clear_padding(cast(Array, made))
        return cast(Array, made)

    def _prepare_weights(self) -> None:
        """Copy the slot in use to the device."""
        run, config = self.executor, self.recipe.config
        if not self._held:
            self._held = [run.empty(self.own.layout.size, np.float32) for _ in self._arrays]
            self._device_optimizer = DeviceOptimizer(config.optimizer, update_blocks(self.own.layout), run)
        for name, array in zip(self._arrays, self._held, strict=True):
            run.upload(getattr(self.state, name), array)
        run.copy(self._device(self.params), self._held[0])
        self._copy.note(self._held)

    def _batches(self, shards: Sequence[int]) -> Sequence[Batch]:
        """Return the batches of these logical shards; those of the next step are uploaded beside this one."""
        batches, whole = super()._batches(shards), self.recipe.model.whole_step
        if isinstance(whole, FusedSteps):
            whole.follow(batches, partial(self._loader.ahead, self.step + 1, shards))
        return batches

    def _device(self, array: Array) -> DeviceArray:
        return cast(DeviceArray, array)

    def held_out_loss(self, *, windows_max: int) -> float:
        """See `Trainer`: with the weights as the device has them, rounded."""
        return self.part.held_out_loss(self.recipe, self.params, self.groups, windows_max=windows_max)

    def _named(self, error: TrainingDiverged) -> TrainingDiverged:
        partials = [to_host(self._buffers[place]) for place in self._plan.partials.values()]
        found = [non_finite(self.own.layout, grads, xp=np) for grads in partials]
        first = next((one for one in found if one is not None), None) or "those of other ranks' shards"
        return TrainingDiverged(f"step {self.step}: {error} First of the gradients, {first}.")

    def _update(self, made: Computed) -> None:
        config, target = self.recipe.config, 1 - self.slot
        self._copy.settle()  # the vote did, unless there is none
        self._ready(self.slots[target])
        assert self._device_optimizer is not None, "a view has begun"
        with spans.OPTIMIZER:
            with watched("update", *cast(list[Array], self._held), self.params, self._total):
                self._device_optimizer.update(
                    self._held,
                    self._device(self.params),
                    self._device(self._total),
                    step=self.step,
                    learning_rate=self.recipe.learning_rate(self.step),
                    grad_scale=clip_scale(made.norm, limit=config.clip_norm),
                )
            into = self._state_in(target)
            self._copy.begin(
                [(array, getattr(into, name)) for name, array in zip(self._arrays, self._held, strict=True)]
            )
        self.slot = target

    def _end_step(self) -> None:
        """The update has rounded the weights."""
        self.executor.end_step(self.step)


class DeviceZeroTrainer(ZeroTrainer):
    """A `ZeroTrainer` whose model is one of `executor`'s array module; weights are bf16 there.

    Gradients are scattered and weights gathered between devices where the group's are connected, and through
    page-locked memory of the host otherwise.
    """

    def __init__(
        self, recipe: Recipe, groups: MeshGroups, *given: Any, executor: Executor, **more: Any
    ) -> None:
        self.executor = executor
        super().__init__(recipe, groups, *given, **more)

    def _accountant(self, arena: Arena) -> Accountant:
        run = self.executor
        return Accountant(
            lambda size, dtype: cast(Array, run.empty(size, dtype)),
            lambda size, dtype: cast(Array, run.zeros(size, dtype)),
            arena.lazy_zeros,
            arena.lazy_empty,
            ready=arena.ready,
        )

    def _rank_of(self, *arguments: Any, **given: Any) -> ZeroRank:
        return DeviceZeroRank(*arguments, executor=self.executor, **given)

    @property
    def _notices_begin(self) -> bool:
        """Operations on devices do not show that a state is in host memory."""
        return False

    def _begins(self) -> AllBegun:
        assert isinstance(self.own, DeviceZeroRank), "it was made here"
        self.executor.begin_step()
        return begins_on_device(self, self._watch, self.own.settle)

    def _reduce(self, unit: int) -> None:
        if isinstance(self._begun, LateBegun):
            self._begun.meet()
        super()._reduce(unit)

    def _end_step(self) -> None:
        super()._end_step()
        self.executor.end_step(self.step)

    def _evaluated(self) -> Iterator[tuple[int, Array]]:
        own, is_sharded = self.own, self.options.stage == WEIGHTS_STAGE
        for number in range(len(own.shards.units)):
            whole = own.room(number)
            if is_sharded:
                self._gather_all(own.part(number), whole)
            yield number, whole
            if is_sharded:
                own.release(number)

    def _named(self, error: TrainingDiverged) -> TrainingDiverged:
        return TrainingDiverged(f"step {self.step}: {error} Found: {self._known_of_attempt()}.")
