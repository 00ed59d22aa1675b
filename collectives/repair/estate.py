"""What the dead have left of an operation that survivors make again, and how it comes into the result.

Methods that take a communicator run on the data-plane thread of all who make it, and raise as its own do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbmd.collectives.commit.events import MemberId
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.device.arrays_in import Array

_COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Bequest:
    """What the dead `member` had published. `carrier` brings it in; only there is `memory` given."""

    member: MemberId
    carrier: int
    memory: memoryview | None

    def like(self, given: Array) -> Array | None:
        """The memory as an array like this rank's own, read only; None where it is not given."""
        if self.memory is None:
            return None
        return np.frombuffer(self.memory, given.dtype).reshape(given.shape)


@dataclass(frozen=True, slots=True)
class Estate:
    """The bequests of an operation, the same on all but for the memory; `contributors`: with the living."""

    bequests: tuple[Bequest, ...]
    contributors: tuple[MemberId, ...]

    def added_to(self, given: Array, op: str) -> Array:
        """`given` reduced with what this rank brings in. 16-bit floats become float32, to be rounded once."""
        dtype = given.dtype
        wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
        total = given.astype(wide)
        for each in self.bequests:
            theirs = each.like(given)
            if theirs is not None:
                _COMBINE[op](total, theirs, out=total)
        return total

    def finished(self, total: Array, op: str, dtype: np.dtype[Any]) -> Array:
        """A reduction that is whole, as the caller's dtype: an average, which was summed, is divided."""
        if op == "avg":
            total /= len(self.contributors)
        return total.astype(dtype)

    def rows_with(self, living: Array) -> Array:
        """A new array with a row for each contributor: those of the living are filled in, in rank order."""
        value = np.empty((len(self.contributors), *living.shape[1:]), living.dtype)
        dead = {each.member for each in self.bequests}
        value[[i for i, member in enumerate(self.contributors) if member not in dead]] = living
        return value

    def row_of(self, bequest: Bequest, value: Array) -> Array:
        """The row of `value` that is for what this member has left."""
        row: Array = value[self.contributors.index(bequest.member), ...]
        return row

    def in_order(self, came: Array, ranks: tuple[int, ...], rows: Mapping[MemberId, int]) -> Array:
        """The contributors' rows in their order, out of `came`: what each of `ranks` has sent, one after the
        other, its own rows and then those of the dead that it brings in, as many of each as `rows` says.
        """
        dead = {each.member for each in self.bequests}
        living = {member.rank: member for member in self.contributors if member not in dead}
        blocks: dict[MemberId, Array] = {}
        begin = 0
        for rank in ranks:
            for member in (living[rank], *(each.member for each in self.bequests if each.carrier == rank)):
                end = begin + rows[member]
                blocks[member], begin = came[begin:end], end
        return np.concatenate([blocks[member] for member in self.contributors])

    def bring(self, c: Communicator, given: Array, value: Array | None, deadline_ns: int) -> None:
        """Fill in the rows of the dead in `value`, where it is; all of `c`. given: this rank's own row."""
        for each in self.bequests:
            row = np.empty_like(given) if value is None else self.row_of(each, value)
            theirs = each.like(given)
            if theirs is not None:
                row[...] = theirs
            c.broadcast(row, each.carrier, deadline_ns=deadline_ns)


def summed(op: str) -> str:
    """How contributions are reduced of which an average is to be made."""
    return "sum" if op == "avg" else op
