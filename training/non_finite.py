"""Which gradient was the first that is not finite, and on which rank: said alike by all of them."""

from __future__ import annotations

import numpy as np

from zbmd.collectives.group import Group
from zbmd.training.clip import NonFinite, TrainingDiverged
from zbmd.training.layout import ParameterLayout

_NOTHING = -1


def diverged_at(
    error: TrainingDiverged, group: Group, found: NonFinite | None, layout: ParameterLayout, *, step: int
) -> TrainingDiverged:
    """What all members of `group` raise behind `error`, together, where each has `found` its own first one.

    That is the first as the backward pass goes, in what a member computed before sums over ranks; `layout` is
    the whole model's. A member whose inputs came from another is named too, if it has the lower rank.
    """
    mine = np.full(4, _NOTHING, np.int64)
    if found is not None:
        index = [slot.name for slot in layout.slots].index(found.name)
        mine[:] = index, found.is_nan, found.bad, found.size
    every = group.blocking.all_gather(mine)
    places = np.flatnonzero(every[:, 0] == every[:, 0].max())
    index, is_nan, bad, size = (int(number) for number in every[places[0]])
    if index == _NOTHING:
        said = "All gradients are finite on every rank, and their sum is not"
    else:
        first = NonFinite(layout.slots[index].name, bool(is_nan), bad, size)
        said = f"First of the gradients, on rank {group.members[int(places[0])]}, {first}"
    return TrainingDiverged(f"step {step}: {error} {said}.")
