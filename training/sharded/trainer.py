"""Train a GPT on a mesh of `dp × fsdp × pp × tp` ranks; blocking, for one thread.

This is the one trainer of the engine; how the ranks that divide the data hold the state is a policy that a
class derives it with: each the whole of it (`replicated`), or a shard (`zero_trainer`). Along `pp`, a rank
holds some of the layers, and shards pass through as micro-batches (`zbmd.training.pipeline`). The resulting
bits depend neither on the policy, nor on the sizes of `dp`, `fsdp` and `pp`, nor on schedule and overlap.
Along `tp`, a rank holds a slice of the parameters; there the order of summation depends on the size.

`ModelPart` is what a rank holds; the next step's batches are read and cut on a thread, while the step runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zbmd.collectives.algorithms.shard_tree import Assignment, assign_shards
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.autograd.rng import Noise
from zbmd.training.job.mesh import PIPELINE_AXIS, TENSOR_AXIS, Mesh, MeshGroups
from zbmd.training.job.step_order import Computed, OrderedSteps
from zbmd.training.job.task import ResultRow
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model.tensor_parallel import ParallelGPT, PartOfGPT, cut_of
from zbmd.training.model_actors.model_actors import ModelActors
from zbmd.training.optim import HeldMatrix, hidden_matrices
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.optim.mixed_precision import LossScale, attempted
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.profiler.lines import ActivationPeak
from zbmd.training.sharded.norm import relayed_loss
from zbmd.training.sharded.stage_of_view import StageOfView
from zbmd.training.sharded.stages import Stages
from zbmd.training.step.recipe import Recipe, mean_loss
from zbmd.training.step.reduction import assignment_of, gather_pieces, gather_rows
from zbmd.transport.native._native import now_ns

AHEAD_SHARE: Final = 0.01
"""Of a step: batches that are cut in less are cut when they are needed. A thread that cuts them holds the
interpreter meanwhile, which costs the step as much."""


class Loaded(NamedTuple):
    """The batches of some logical shards, in their order, and the ids of their samples."""

    samples: Mapping[int, npt.NDArray[np.int64]]
    batches: Sequence[Batch]


class BatchLoader:
    """Loads the batches of `recipe` for one rank. For one thread; close it after use."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, tuple[int, ...], Future[Loaded]] | None = None
        self._last: tuple[int, tuple[int, ...], Loaded] | None = None
        self._asked_ns = self._cut_ns = 0
        """When batches were asked for last, and how long it takes to cut those of a step."""

    def load(self, step: int, shards: Sequence[int]) -> Loaded:
        """Return the batches of these shards of `step`; a step that is repeated takes the same ones.

        Begins to load those of the next step, which are dropped if it has other shards.
        """
        asked = tuple(shards)
        with spans.DATA:
            if self._last is None or self._last[:2] != (step, asked):
                self._last = step, asked, self._found(step, asked)
                self._look_ahead(step + 1, asked)
        return self._last[2]

    def ahead(self, step: int, shards: Sequence[int]) -> Sequence[Batch]:
        """Return the batches of a step that comes later, and keep them for it; none after the last step."""
        if step >= self._recipe.config.steps:
            return ()
        asked, kept = tuple(shards), Future[Loaded]()
        kept.set_result(self._found(step, asked))
        self._ahead = step, asked, kept
        return kept.result().batches

    def _found(self, step: int, shards: tuple[int, ...]) -> Loaded:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (step, shards):
            return ahead[2].result()
        return self._cut(step, shards)

    def _look_ahead(self, step: int, shards: tuple[int, ...]) -> None:
        now = now_ns()
        took_ns, self._asked_ns = now - self._asked_ns, now
        if self._cut_ns < AHEAD_SHARE * took_ns or step >= self._recipe.config.steps:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-loader")
        self._ahead = step, shards, self._pool.submit(self._cut, step, shards)

    def _cut(self, step: int, shards: tuple[int, ...]) -> Loaded:
        recipe, config, began_ns = self._recipe, self._recipe.config, now_ns()
        ids = recipe.order_of(step)
        batches = [
            recipe.model.batch(
                recipe.corpus.windows(ids[shard]),
                global_batch=config.global_batch,
                noise=Noise(config.seed, step, ids[shard]),
            )
            for shard in shards
        ]
        self._cut_ns = now_ns() - began_ns
        return Loaded({shard: ids[shard] for shard in shards}, batches)

    def close(self) -> None:
        """End the thread. Idempotent."""
        pool, self._pool, self._ahead = self._pool, None, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


class ModelPart:
    """The layers and slices of `model` that a rank holds at its place in the mesh of `groups`.

    `model` is the rank's part along `tp`. `own` has the layout of the flat arrays. `cuts`: of each parameter
    there, its slot in the whole model, and the slice of it that this rank holds.
    """

    def __init__(self, model: GPT, groups: MeshGroups, stages: Stages) -> None:
        count = groups.size(PIPELINE_AXIS)
        self.model = model
        self.own = OwnParts(
            model, stages.cuts_of(model.config, count), stages=count, stage=groups.place(PIPELINE_AXIS)
        )
        self.cuts = _cuts_of(model, self.own.layout)
        self.writes = [
            groups.place(TENSOR_AXIS) == 0 or bool(cut_of(slot.name)[1]) for slot in self.own.layout.slots
        ]
        """Of each parameter, whether this rank's slice is in a checkpoint: the first of equal ones is."""
        self.matrices = _held_matrices(model, self.own.layout, self.cuts)
        """This rank's slices of hidden matrices that are divided along `tp`, by name."""

    def of(self, flat: Array) -> Array:
        """Return this rank's part of the whole model's flat array: a copy."""
        model = self.model
        return self.own.cut(model.shards.cut(flat, model.part) if isinstance(model, PartOfGPT) else flat)

    def initial(self, seed: int) -> Array:
        """Return this rank's part of the weights of `seed`."""
        return self.own.cut(self.model.init(seed))

    def whole(self, flat: Array, groups: MeshGroups) -> Array:
        """Return the whole flat array of which each rank holds the part `flat`; all ranks together."""
        model, pipeline, tensor = self.model, groups.pipeline, groups.tensor
        if pipeline is not None:
            flat = self.own.joined(gather_rows(pipeline, np.ascontiguousarray(flat)))
        if tensor is None or not isinstance(model, PartOfGPT):
            return flat.copy()
        every = gather_rows(tensor, np.ascontiguousarray(flat))
        sizes = [model.shards.layout(part).size for part in range(tensor.size)]
        return model.shards.joined(np.split(every, np.cumsum(sizes)[:-1]))

    def held_out_loss(self, recipe: Recipe, weights: Array, groups: MeshGroups, *, windows_max: int) -> float:
        """Return the loss with `weights`, this rank's part; see `Trainer`.

        Ranks that divide the data share windows.
        """
        chunks = recipe.evaluation_chunks(windows_max)
        totals, place, ranks = np.zeros(len(chunks)), groups.data_place, groups.mesh.data_ranks
        for number in range(place, len(chunks), ranks):
            tokens = recipe.corpus.windows(chunks[number])
            batch = recipe.model.batch(tokens, global_batch=len(tokens))
            loss = relayed_loss(self.own, weights, batch, groups.pipeline)
            totals[number] = 0.0 if loss is None else loss * len(tokens)
        if groups.pipeline is not None:
            totals = groups.pipeline.blocking.broadcast(totals, (len(self.own.every) - 1) % self.own.stages)
        every = [totals] if groups.data is None else groups.data.blocking.all_gather(totals)
        return mean_loss(every, chunks)


def _cuts_of(model: GPT, own: ParameterLayout) -> list[tuple[ParameterSlot, ParameterSlice]]:
    if isinstance(model, PartOfGPT):
        whole, shards, part = model.shards.whole, model.shards, model.part
        cuts = {slot.name: (slot, shards.piece(slot, part)) for slot in whole.slots}
    else:
        cuts = {slot.name: (slot, flat_slice(slot.size, 0, slot.size)) for slot in model.layout.slots}
    return [cuts[slot.name] for slot in own.slots]


def _held_matrices(
    model: GPT, own: ParameterLayout, cuts: Sequence[tuple[ParameterSlot, ParameterSlice]]
) -> dict[str, HeldMatrix]:
    if not isinstance(model, PartOfGPT):
        return {}
    shards, hidden, found = model.shards, hidden_matrices(own), dict[str, HeldMatrix]()
    for (slot, cut), here in zip(cuts, own.slots, strict=True):
        if here in hidden:
            is_cut = bool(cut_of(slot.name)[1])
            every = tuple(shards.piece(slot, part) for part in range(shards.parts)) if is_cut else (cut,)
            place = model.part if is_cut else 0
            found[slot.name] = HeldMatrix(shape=slot.shape, span=here.span, cuts=every, place=place)
    return found


def reporters(own: OwnParts, mesh: Mesh, assignment: Sequence[tuple[int, int]]) -> list[int]:
    """Return the place in the world of the rank that reports the loss of each logical shard.

    assignment: the shards of each place among those that divide the data.
    """
    last, who = (len(own.every) - 1) % own.stages, dict[int, int]()
    for rank in range(mesh.world_size):
        here = mesh.coordinates(rank)
        if (here.get(PIPELINE_AXIS, 0), here.get(TENSOR_AXIS, 0)) == (last, 0):
            who[mesh.data_place(rank)] = rank
    return [who[place] for place, (start, stop) in enumerate(assignment) for _ in range(start, stop)]


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

    def _divide(self, assignment: Assignment = ()) -> None:
        """Divide the logical shards over the ranks of this view; evenly, unless `assignment` says how."""
        mesh = self.groups.mesh
        self._assignment = assignment or assign_shards(self.row.shards, mesh.data_ranks)
        self._reporters = reporters(self.part.own, mesh, self._assignment)

    @property
    def shares(self) -> tuple[int, ...]:
        """See `Trainer`."""
        mesh, assignment = self.groups.mesh, self._assignment
        of_rank = (assignment[mesh.data_place(rank)] for rank in range(mesh.world_size))
        return tuple(stop - start for start, stop in of_rank)

    def rebalance(self, shares: Sequence[int]) -> bool:
        """See `Trainer`. Along `pp`, whole pipelines take other shares: stages turn to other programs."""
        mesh = self.groups.mesh
        of_places = {mesh.data_place(rank): share for rank, share in enumerate(shares)}
        assignment = assignment_of([of_places[place] for place in range(mesh.data_ranks)])
        is_whole = sum(of_places.values()) == self.row.shards
        if not is_whole or not self._has_room(assignment):
            return False
        self._divide(assignment)
        return True

    def _has_room(self, assignment: Assignment) -> bool:
        """Return whether all ranks have memory for these shares: a policy that may have it overrides this."""
        return False

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
