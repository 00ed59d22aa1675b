"""Agree on the rank and the place in the model where the first non-finite value arose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.non_finite_probe import NonFiniteValues, ProbePoint, find_non_finite
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.clip import NonFinite

_NOTHING = -1
_NUMBERS = 6
RANKS_NAMED_MAX = 4


NOT_FOUND = "All gradients are finite on every rank, and their sum is not."


def describe_first_non_finite(
    group: Group, model: GPT, mine: NonFiniteValues | None, *, otherwise: str = NOT_FOUND
) -> str:
    """Return one sentence about the first non-finite value of all ranks; called by all members of `group`
    together.

    The first in the order of a step counts (weights, units forwards, units backwards, gradients) among values
    that were not received from another rank; among equals, that of the lowest rank. `model` is the whole
    model or any rank's part of it. `otherwise`: the result, equal on all ranks, if no rank found anything.
    Raises `PeerLost` and `OperationAborted` as the group does.
    """
    row = np.full(_NUMBERS, _NOTHING, np.int64) if mine is None else np.array(astuple(mine), np.int64)
    every = [_read(row.tolist()) for row in group.blocking.all_gather(row)]
    rank, first = earliest(list(zip(group.members, every, strict=True)))
    if first is None:
        return otherwise
    return f"It began on rank {rank}, in {_described(first, model)}."


def earliest(sightings: Sequence[tuple[int, NonFiniteValues | None]]) -> tuple[int, NonFiniteValues | None]:
    """Return the rank and the value that come first in the order of a step, given those of all ranks in rank
    order.
    """
    seen = [(rank, one) for rank, one in sightings if one is not None]
    made_there = [(rank, one) for rank, one in seen if not one.received]
    return min(made_there or seen, key=lambda pair: _order(pair[1]), default=(_NOTHING, None))


def _order(one: NonFiniteValues) -> tuple[int, int]:
    """Sort key. The backward pass goes from the last unit, and the last parameter, to the first."""
    return one.where, -one.place if one.where in (ProbePoint.BACKWARD, ProbePoint.GRADIENT) else one.place


def _read(numbers: list[int]) -> NonFiniteValues | None:
    where, place, is_nan, bad, size, received = numbers
    if where == _NOTHING:
        return None
    return NonFiniteValues(
        where=ProbePoint(where), place=place, is_nan=bool(is_nan), bad=bad, size=size, received=bool(received)
    )


def _described(one: NonFiniteValues, model: GPT) -> str:
    is_unit = one.where in (ProbePoint.FORWARD, ProbePoint.BACKWARD)
    name = model.unit_names[one.place] if is_unit else model.layout.slots[one.place].name
    what = {
        ProbePoint.WEIGHTS: "the weights of",
        ProbePoint.FORWARD: "the forward pass of",
        ProbePoint.BACKWARD: "the backward pass of",
        ProbePoint.GRADIENT: "the gradient of",
    }[one.where]
    came = ", as it came from other ranks" if one.received else ""
    kind = "NaN" if one.is_nan else "infinite"
    return f"{what} {name}{came}: {kind} ({one.bad:,} of {one.size:,} elements are not finite)"


def described_losses(losses: Sequence[float], reporters: Sequence[int]) -> str | None:
    """Return which ranks computed losses that are not finite; None: all are. reporters: of logical shards."""
    bad = [shard for shard, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad:
        return None
    ranks = sorted({reporters[shard] for shard in bad})
    more = len(ranks) - RANKS_NAMED_MAX
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:RANKS_NAMED_MAX]))}"
    named += f" and {more} more" if more > 0 else ""
    return f"the losses that {named} computed were not finite, of logical shard {bad[0]} first"


def bad_weights(layout: ParameterLayout, flat: Array, model: GPT) -> NonFiniteValues | None:
    """Return the first parameter in `flat`, of `layout`, that has a non-finite weight."""
    for slot, view in zip(layout.slots, layout.views(flat), strict=True):
        seen = find_non_finite(ProbePoint.WEIGHTS, _index(model, slot.name), view)
        if seen is not None:
            return seen
    return None


def bad_gradient(found: Iterable[NonFinite | None], model: GPT) -> NonFiniteValues | None:
    """Return the first of the values `found` in a rank's sums, in the order of the backward pass."""
    seen = [
        NonFiniteValues(
            where=ProbePoint.GRADIENT,
            place=_index(model, one.name),
            is_nan=one.is_nan,
            bad=one.bad,
            size=one.size,
        )
        for one in found
        if one is not None
    ]
    return min(seen, key=_order, default=None)


def _index(model: GPT, name: str) -> int:
    return next(index for index, slot in enumerate(model.layout.slots) if slot.name == name)
