"""The passes of this rank's stage in one view of a mesh, for any trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zbmd.collectives.algorithms.shard_tree import Assignment
from zbmd.training.autograd.array_module import Array
from zbmd.training.job.mesh import TENSOR_AXIS, MeshGroups
from zbmd.training.model.gpt import GPT
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.pipeline.passes import StagePasses
from zbmd.training.pipeline.program import Op, StageProgram
from zbmd.training.pipeline.rings import RingMemory, StageRings, traffic_of
from zbmd.training.pipeline.simulate import Costs, simulate
from zbmd.training.profiler.lines import ActivationPeak
from zbmd.training.sharded.stages import Stages
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import AccumulationPlan

COSTS = {Op.FORWARD: 0, Op.BACKWARD: 1, Op.INPUT_GRADIENT: 2, Op.WEIGHT_GRADIENT: 3}
"""The rows in which ranks tell what these take."""


def activations_dtype(model: GPT, dtype: np.dtype[np.floating]) -> np.dtype[np.floating]:
    """Return the dtype of what passes between units: that of a device's ops, otherwise `dtype`."""
    of_device = vars(model.xp).get("operators_of_device")
    found: np.dtype[np.floating] = dtype if of_device is None else of_device.dtype
    return found


@dataclass(slots=True)
class RingRoom:
    """The memory of a stage's rings, once it is made: neighbours may write there until they end."""

    made: RingMemory | None = None


class StageOfView:
    """Makes the passes of a stage, once in each view, and keeps the memory of its rings over views.

    `own`: the layers of this rank; `buffers`: the gradients, flat arrays of `own.layout`, in which a step may
    replace arrays; dtype: of activations; shrinks: whether views may have fewer ranks along `dp`, so that
    more micro-batches pass a stage; moves: whether shards may move between pipelines. rings: memory that
    outlives this object.
    """

    def __init__(
        self,
        recipe: Recipe,
        own: OwnParts,
        stages: Stages,
        buffers: list[Array],
        *,
        dtype: np.dtype[np.floating],
        shrinks: bool = False,
        moves: bool = False,
        rings: RingRoom | None = None,
    ) -> None:
        self._recipe, self._own, self._stages, self._dtype = recipe, own, stages, dtype
        self._shrinks, self._moves = shrinks, moves
        self._buffers = buffers
        self._groups: MeshGroups | None = None
        self._programs: Sequence[StageProgram] = ()
        self._plan: AccumulationPlan | None = None
        self._rings = RingRoom() if rings is None else rings
        self._made: StagePasses | None = None

    def enter(self, groups: MeshGroups, plan: AccumulationPlan, assignment: Assignment = ()) -> None:
        """Compute the shards of `plan` from the next step on, in the groups of a new view or of this one.

        assignment: the shards of each place among those that divide the data, unless they are even.
        """
        every = self._stages.programs(self._recipe.config, groups.mesh, assignment)
        programs, made = every[groups.data_place], self._made
        if made is not None and groups is self._groups:
            made.turn_to(programs, plan)
        else:
            self.close()
        self._groups, self._plan, self._programs = groups, plan, programs

    def close(self, *, gave_up: bool = False) -> None:
        """Leave the neighbours' memory; with `gave_up` their waits for this rank end. Idempotent.

        This rank's own memory is there for them until the process ends.
        """
        if self._made is not None:
            self._made.close(gave_up=gave_up)
            self._made = None

    @property
    def held_most(self) -> ActivationPeak | None:
        """The peak of this rank's activations in the last step; None if it computed none in this view."""
        return None if self._made is None else self._made.held_most

    @property
    def passes(self) -> StagePasses:
        """The passes, made by all stages together in the first step of a view."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> StagePasses:
        groups, rings, recipe = self._groups, None, self._recipe
        assert groups is not None and self._plan is not None, "a step is in a view"
        if groups.pipeline is not None:
            if self._rings.made is None:
                traffic = traffic_of(
                    recipe.model.config,
                    recipe.config,
                    tensor_ranks=groups.size(TENSOR_AXIS),
                    dtype=self._dtype,
                )
                every = [self._programs]
                least = groups.mesh.along_data(1) if self._shrinks else groups.mesh
                if self._shrinks or self._moves:
                    every += self._stages.programs_most(recipe.config, least, moves=self._moves)
                programs = [one[self._own.stage] for one in every]
                self._rings.made = RingMemory(groups.worker.segment, programs, traffic)
            rings = StageRings(
                groups.worker, groups.pipeline, self._programs, self._rings.made, world=groups.world.members
            )
        return StagePasses(
            self._own,
            self._programs,
            self._plan,
            self._buffers,
            groups.pipeline,
            rings,
            groups.worker,
            groups.world.epoch,
        )

    def bubble_of_times(self) -> float:
        """Return the bubble of the schedule if each computation takes the median of what it took here.

        Transfers and wake-ups take no time: what a step waits for beyond that is not the schedule's. 0 for a
        single stage. All ranks together.
        """
        if self._groups is None or self._groups.pipeline is None:
            return 0.0
        mine = np.zeros((len(COSTS), len(self._own.every)))
        for (operation, part), times in self.passes.took_ns.items():
            mine[COSTS[operation], part] = np.median(times)
        forward, whole, half, weight = self._groups.pipeline.blocking.all_gather(mine).sum(axis=0)
        costs = Costs(
            forward=tuple(forward), input_gradient=tuple(whole + half), weight_gradient=tuple(weight)
        )
        return float(simulate(self._programs, costs).bubble)
