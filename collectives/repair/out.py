"""Where the caller of an elastic operation wants its result.

An `out` is written when the operation is over, and not while it runs: it may run several times, over fewer
members each time, and may fail on all in the end. So an `x` may lie in it, too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zbmd.collectives.device.arrays_in import Array, as_array, require_writeable
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from zbmd.collectives.repair.operations_shared import Job

COPIED_ON_LOOP_BYTES_MAX: Final = 64 << 10
"""A longer result is copied to its `out` by another thread than the loop's."""


class Awaiting:
    """Whether a caller still awaits its operation: what is its own again is not written behind its back."""

    def __init__(self) -> None:
        self._cancelled = False
        self._writing = False

    def cancel(self) -> bool:
        """The await is cancelled. False if what was given is being written: that ends by itself, soon."""
        self._cancelled = True
        return not self._writing

    def write(self) -> bool:
        """Whether what was given may be written, from now on until the operation has ended."""
        self._writing = not self._cancelled
        return self._writing


class Out:
    """An array that takes a result of `shape` and `dtype`, or, of rows by rank, one that has fewer rows.

    Raises `UserError`, which says how it must be, unless `given` is such an array, and can be written.
    """

    __slots__ = ("_array", "_given", "_of_rows")

    def __init__(self, given: Any, shape: tuple[int, ...], dtype: np.dtype[Any], rows: str = "") -> None:
        """`rows`: what the first axis counts, if a result may have fewer of them; empty if not."""
        array = as_array(given, "out")
        if array.shape != shape or array.dtype != dtype:
            why = rows and f": {rows}, whoever is there, of which the first take the result"
            raise UserError(
                f"out has shape {array.shape} and dtype {array.dtype}; pass one of shape {shape} and dtype "
                f"{dtype}{why}"
            )
        require_writeable(array, "out")
        self._given, self._array, self._of_rows = given, array, bool(rows)

    def take(self, value: Array) -> Any:
        """Write the result. What the caller gets back: the array itself, or its rows that were written."""
        if not self._of_rows:
            self._array[...] = value
            return self._given
        written = self._array[: len(value)]
        written[...] = value
        return written


def out_of_ranks(out: Any, ranks: int, given: Array) -> Out | None:
    """The `out` of an operation that brings an array like `given` from each contributor, of which
    there may be `ranks`.
    """
    rows = "a row for each rank of the job, or of the sub-group"
    return None if out is None else Out(out, (ranks, *given.shape), given.dtype, rows)


async def hand_over(job: Job, awaiting: Awaiting) -> None:
    """Put the result of an operation, which is over, to where its caller wants it, if it still does."""
    out, value = job.out, job.value
    if out is None or value is None or not awaiting.write():
        return
    if value.nbytes <= COPIED_ON_LOOP_BYTES_MAX:
        job.value = out.take(value)
    else:
        job.value = await asyncio.to_thread(out.take, value)
