"""The norm of a gradient that lies in parts on the ranks of a mesh, the same on all of them.

Without tensor parallelism it has the bits of `zbmd.training.optim.clip.global_norm` over the whole flat
array. With it, squares are summed parameter by parameter, block by block, in double precision, then over
the ranks that hold a part of it, in their order, and then in the order of the parameters: so the bits do not
depend on the number of stages.
"""

from __future__ import annotations

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.model.gpt import Batch
from zbmd.training.model.tensor_parallel import cut_of
from zbmd.training.optim.clip import (
    global_norm,
    norm_from,
    norm_of,
    pieces_length,
    pieces_of,
    square_like,
    squares_of,
)
from zbmd.training.optim.mixed_precision import computing_dtype
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.step.reduction import gather_rows
from zbmd.transport.errors import RemoteProtocolError

RELAY_TAG = 2


def relayed_loss(own: OwnParts, weights: Array, batch: Batch, pipeline: Group | None) -> float | None:
    """Run one pass through all parts, in their order; the last one's stage has the loss, the others None.

    weights: (own.layout.size,). Without a pipeline this rank has all parts.
    """
    came: Array | None = None
    for number, part in own.parts.items():
        if number and pipeline is not None:
            message = pipeline.blocking.recv((number - 1) % own.stages, tag=RELAY_TAG)
            came = part.model.xp.asarray(message.array)
        made = part.evaluate(weights[own.spans[number]], batch, came)
        if part.is_last:
            return float(made)
        if pipeline is None:
            came = made
            continue
        behind = (number + 1) % own.stages
        pipeline.blocking.send(np.ascontiguousarray(to_host(made)), behind, tag=RELAY_TAG)
    return None


def mesh_norm(total: Array, own: OwnParts, *, pipeline: Group | None, tensor: Group | None) -> float:
    """The norm, from this rank's `total`, (own.layout.size,); all ranks of both groups together.

    Raises `TrainingDiverged` if it is not finite.
    """
    if tensor is not None:
        return _by_parameters(total, own, pipeline, tensor)
    if pipeline is None:
        return global_norm(total, xp=np)
    pieces = [pieces_of(total[own.spans[number]], part.span) for number, part in own.parts.items()]
    lengths = {number: pieces_length(own.every[number].span) for number in own.order}
    found, dtype = (
        _by_part(gather_rows(pipeline, np.concatenate(pieces)), lengths),
        computing_dtype(total.dtype),
    )
    told = [(part.span, found[number]) for number, part in enumerate(own.every)]
    return norm_of(told, dtype, square=square_like(total))


def _by_parameters(total: Array, own: OwnParts, pipeline: Group | None, tensor: Group) -> float:
    is_first = tensor.rank == 0
    squares = np.zeros(len(own.layout.slots))
    for index, (slot, view) in enumerate(zip(own.layout.slots, own.layout.views(total), strict=True)):
        if is_first or cut_of(slot.name)[1]:  # what is whole on all ranks counts once
            squares[index] = squares_of(view.reshape(-1), xp=np)
    with spans.COMM:
        every = tensor.blocking.all_gather(squares)
    squares = np.zeros(len(squares))
    for row in every:
        squares += row
    if pipeline is not None:
        lengths = {number: len(own.every[number].layout.slots) for number in own.order}
        found = _by_part(gather_rows(pipeline, squares), lengths)
        squares = np.concatenate([found[number] for number in range(len(own.every))])
    found_in_all = 0.0
    for value in squares.tolist():
        found_in_all += value
    return norm_from(found_in_all)


def _by_part(every: Array, lengths: dict[int, int]) -> dict[int, Array]:
    """The values of all stages, part by part; `lengths` in the order in which they hold them."""
    if sum(lengths.values()) != len(every):
        raise RemoteProtocolError(
            f"the stages say {len(every)} numbers of their gradients, not {sum(lengths.values())}"
        )
    ends = np.cumsum(list(lengths.values()))
    return {
        number: every[end - size : end] for (number, size), end in zip(lengths.items(), ends, strict=True)
    }
