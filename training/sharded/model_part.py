"""This rank's part of a model on a mesh: some of the layers along `pp`, a slice of each along `tp`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlice, ParameterSlot, flat_slice
from zbmd.training.job.mesh import PIPELINE_AXIS, TENSOR_AXIS, Mesh, MeshGroups
from zbmd.training.model.gpt import GPT
from zbmd.training.model.tensor_parallel import PartOfGPT
from zbmd.training.model.tensor_shards import cut_of
from zbmd.training.optim import HeldMatrix, hidden_matrices
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.sharded.norm import relayed_loss
from zbmd.training.sharded.stages import Stages
from zbmd.training.step.recipe import Recipe, mean_loss
from zbmd.training.step.reduction import gather_rows


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
