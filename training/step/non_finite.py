"""On which rank, and where in the model, the first value that is not finite arose: all ranks say the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.first_non_finite import Sighting, Where, sighting
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.clip import NonFinite

_NOTHING = -1
_NUMBERS = 6


NOT_FOUND = "All gradients are finite on every rank, and their sum is not."


def where_it_began(group: Group, model: GPT, mine: Sighting | None, *, otherwise: str = NOT_FOUND) -> str:
    """One sentence of the first of all sightings; all members of `group` together, each with its own.

    That is the first in the order of a step (weights, units forwards, units backwards, gradients), of those
    that did not come from another rank; of several alike, that of the lowest rank. `model` is the whole one,
    or any rank's part of it. otherwise: what is said, on all alike, if nobody has seen anything. Raises
    `PeerLost` and `OperationAborted` as the group does.
    """
    row = np.full(_NUMBERS, _NOTHING, np.int64) if mine is None else np.array(astuple(mine), np.int64)
    every = [_read(row.tolist()) for row in group.blocking.all_gather(row)]
    rank, first = first_of(list(zip(group.members, every, strict=True)))
    if first is None:
        return otherwise
    return f"It began on rank {rank}, in {_described(first, model)}."


def first_of(sightings: Sequence[tuple[int, Sighting | None]]) -> tuple[int, Sighting | None]:
    """The rank and its sighting that are the first, of those of all ranks in their order."""
    seen = [(rank, one) for rank, one in sightings if one is not None]
    made_there = [(rank, one) for rank, one in seen if not one.came]
    return min(made_there or seen, key=lambda pair: _order(pair[1]), default=(_NOTHING, None))


def _order(one: Sighting) -> tuple[int, int]:
    """The way back goes from the last unit, and the last parameter, to the first."""
    return one.where, -one.place if one.where in (Where.BACKWARD, Where.GRADIENT) else one.place


def _read(numbers: list[int]) -> Sighting | None:
    where, place, is_nan, bad, size, came = numbers
    if where == _NOTHING:
        return None
    return Sighting(where=Where(where), place=place, is_nan=bool(is_nan), bad=bad, size=size, came=bool(came))


def _described(one: Sighting, model: GPT) -> str:
    is_unit = one.where in (Where.FORWARD, Where.BACKWARD)
    name = model.unit_names[one.place] if is_unit else model.layout.slots[one.place].name
    what = {
        Where.WEIGHTS: "the weights of",
        Where.FORWARD: "the forward pass of",
        Where.BACKWARD: "the backward pass of",
        Where.GRADIENT: "the gradient of",
    }[one.where]
    came = ", as it came from other ranks" if one.came else ""
    kind = "NaN" if one.is_nan else "infinite"
    return f"{what} {name}{came}: {kind} ({one.bad:,} of {one.size:,} elements are not finite)"


def bad_weights(layout: ParameterLayout, flat: Array, model: GPT) -> Sighting | None:
    """The first parameter in `flat`, of `layout`, with a weight that is not finite."""
    for slot, view in zip(layout.slots, layout.views(flat), strict=True):
        seen = sighting(Where.WEIGHTS, _index(model, slot.name), view)
        if seen is not None:
            return seen
    return None


def bad_gradient(found: Iterable[NonFinite | None], model: GPT) -> Sighting | None:
    """The first one, as the backward pass goes, of what was `found` in a rank's sums."""
    seen = [
        Sighting(
            where=Where.GRADIENT, place=_index(model, one.name), is_nan=one.is_nan, bad=one.bad, size=one.size
        )
        for one in found
        if one is not None
    ]
    return min(seen, key=_order, default=None)


def _index(model: GPT, name: str) -> int:
    return next(index for index, slot in enumerate(model.layout.slots) if slot.name == name)
