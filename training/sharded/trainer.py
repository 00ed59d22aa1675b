"""Train a GPT on a mesh of `dp × fsdp × pp × tp` ranks; blocking, for one thread.

This is the one trainer of the engine; how the ranks that divide the data hold the state is a policy that a
class derives it with: each the whole of it (`replicated`), or a shard (`zero_trainer`). Along `pp`, a rank
holds some of the layers, and shards pass through as micro-batches (`zbmd.training.pipeline`). The resulting
bits depend neither on the policy, nor on the sizes of `dp`, `fsdp` and `pp`, nor on schedule and overlap.
Along `tp`, a rank holds a slice of the parameters; there the order of summation depends on the size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from zbmd.collectives.algorithms.shard_tree import Assignment, assign_shards
from zbmd.training.autograd.array_module import Array
from zbmd.training.job.mesh import MeshGroups
from zbmd.training.job.step_order import Computed, OrderedSteps
from zbmd.training.job.task import ResultRow
from zbmd.training.model.gpt import Batch
from zbmd.training.model.tensor_parallel import ParallelGPT
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import LossScale, attempted
from zbmd.training.profiler.lines import ActivationPeak
from zbmd.training.sharded.model_part import ModelPart, reporters
from zbmd.training.sharded.stage_of_view import StageOfView
from zbmd.training.sharded.stages import Stages
from zbmd.training.step.loader import BatchLoader
from zbmd.training.step.recipe import Recipe
from zbmd.training.step.reduction import gather_pieces


class MeshTrainer(OrderedSteps):
    """Trains `recipe`, whose model is of `groups.model`; all ranks make it and call its methods together.

    stages: how the model is divided along `pp`.
    """

    def __init__(self, recipe: Recipe, groups: MeshGroups, stages: Stages) -> None:
        super().__init__()
        config = recipe.config
        self.recipe, self.groups, self.step = recipe, groups, 0
        self.row = ResultRow(config.shards, config.sequences_per_shard)
        self.part = ModelPart(recipe.model, groups, stages)
        self._stage: StageOfView | None = None
        """The passes of a stage; None: the policy computes units in turn."""
        self._assignment: Assignment = ()
        """The logical shards of each place among those that divide the data."""
        self._actors: ModelActors | None = None
        self._loader = BatchLoader(recipe)
        self._compute_ns = self._waited_ns = 0

    def _divide(self) -> None:
        """Divide the logical shards over the ranks of this view."""
        mesh = self.groups.mesh
        self._assignment = assign_shards(self.row.shards, mesh.data_ranks)
        self._reporters = reporters(self.part.own, mesh, self._assignment)

    def _gathered_along_tp(self, piece: Array) -> Sequence[Array]:
        model = self.recipe.model
        return gather_pieces(model.group, piece) if isinstance(model, ParallelGPT) else [piece]

    def supervised(self, actors: ModelActors) -> None:
        """See `Trainer`."""
        self._actors, own = actors, self.part.own
        if self._stage is not None:
            own.parts = {number: actors.part(part) for number, part in own.parts.items()}

    # ---- epochs

    def enter(self, groups: MeshGroups, version: int) -> None:
        """See `Trainer`."""
        self._loader.close()
        self.step = version
        if groups is not self.groups:  # the first ones were divided over as the trainer was made
            self.groups = groups
            self._divide()
        model, tensor, actors = self.recipe.model, groups.tensor, self._actors
        if isinstance(model, ParallelGPT) and tensor is not None:
            model.group = tensor if actors is None else actors.group(tensor)
        self._prepare_weights()

    def close(self, *, gave_up: bool = False) -> None:
        """Leave the neighbours' memory; with `gave_up` who waits for us there waits no longer. Idempotent.

        Ours is there for them until this process ends.
        """
        self._loader.close()
        if self._stage is not None:
            self._stage.close(gave_up=gave_up)

    @property
    def held_most(self) -> ActivationPeak | None:
        """See `Trainer`: activations of units that are computed in turn are not counted."""
        return None if self._stage is None else self._stage.held_most

    def bubble_of_times(self) -> float:
        """See `StageOfView`."""
        return 0.0 if self._stage is None else self._stage.bubble_of_times()

    # ---- steps

    def _batches(self, shards: Sequence[int]) -> Sequence[Batch]:
        """Return the batches of these logical shards in the step under way."""
        loaded = self._loader.load(self.step, shards)
        self._consumed = loaded.samples
        return loaded.batches

    def _differentiate(self) -> Computed:
        self._compute_ns = self._waited_ns = 0
        try:
            norm, scale = attempted(self.loss_scale, self._attempt)
        except TrainingDiverged as error:
            raise self._named(error) from None
        return Computed(norm, scale.scale, scale.skipped, self._compute_ns, self._waited_ns)

    # ---- the policy

    @property
    @abstractmethod
    def loss_scale(self) -> LossScale:
        """That of the next step, the same on all ranks. Raises `UserError` for a state that is damaged."""

    @property
    def scale(self) -> tuple[float, ...]:
        """See `Trainer`."""
        return self.loss_scale.values

    @abstractmethod
    def begin_with(self, weights: Array) -> None:
        """Begin with the whole model's weights, not with the seed's."""

    @abstractmethod
    def weights(self) -> Array:
        """Return the weights of the whole model, on all ranks; all together."""

    @abstractmethod
    def _prepare_weights(self) -> None:
        """Make the weights of the passes of the state, as behind every change of it."""

    @abstractmethod
    def _attempt(self, scale: LossScale) -> float:
        """Compute the gradient, times `scale`, and its norm, on all ranks the same.

        Raises `TrainingDiverged` for a norm that is not finite.
        """

    @abstractmethod
    def _named(self, error: TrainingDiverged) -> TrainingDiverged:
        """Return `error` with where it began, on all ranks alike: all is computed once more."""
