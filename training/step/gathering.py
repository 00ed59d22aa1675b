"""What each rank of a group holds, on all of them: for a thread that may wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zbmd.collectives.group.group import Group
from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.transport import kill_points as faults

GATHER_POINT: Final = faults.declare(
    "optimizer.gather", "in an update: this rank has its piece of a matrix, and not the others' yet"
)


def gather_pieces(group: Group, piece: Array) -> Sequence[Array]:
    """The `piece`, of one length on all, of each member, in their order; all members together.

    It is for an optimizer that needs whole matrices (`zbmd.training.optim.muon`).
    """
    faults.hit(GATHER_POINT)
    end_ns = group.deadline_ns()
    with spans.COMM:
        every: Array = group.submit(lambda c: c.all_gather(piece, deadline_ns=end_ns)).result()
        return list(every)


def gather_rows(group: Group, rows: Array) -> Array:
    """The `rows` of all members, each with a number of its own, one behind the other, in their order."""
    end_ns = group.deadline_ns()
    with spans.COMM:
        every: Array = group.submit(lambda c: c.all_gather_v(rows, deadline_ns=end_ns)).result()
        return every
