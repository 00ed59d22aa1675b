"""Many arrays reduced by one operation of an elastic group; see `zbmd.collectives.communicator.coalescing`.

Methods run on the data-plane thread, and raise as the communicator's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from zbmd.collectives.communicator.coalescing import ARRAYS_MAX
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.device.arrays_in import Array, as_array, as_bytes, packed
from zbmd.collectives.programs.reductions import dtype_code, reduction_code
from zbmd.collectives.repair.estate import Estate, summed
from zbmd.collectives.repair.events import Call, Inputs, OnLoss
from zbmd.collectives.repair.operations_shared import Job
from zbmd.transport.errors import UserError
from zbmd.transport.memory.arena import Arena


class AllReduceMany(Job):
    """`Communicator.all_reduce_many`: in place (`recompute`), or into new arrays."""

    def __init__(
        self,
        arena: Arena,
        arrays: Sequence[Any],
        op: str,
        on_loss: OnLoss,
        inputs: Inputs,
        algorithm: str,
    ) -> None:
        if len(arrays) > ARRAYS_MAX:
            raise UserError(f"{len(arrays)} arrays at once; {ARRAYS_MAX} at most")
        self._given = [as_array(x, f"array {k}") for k, x in enumerate(arrays)]
        for given in self._given:
            dtype_code(given.dtype)
            reduction_code(op, given.dtype)
        self._op, self._algorithm = op, algorithm
        self._in_place = inputs is Inputs.RECOMPUTE
        self._results = self._given if self._in_place else [np.empty(x.shape, x.dtype) for x in self._given]
        self.value = arrays if self._in_place else self._results
        if inputs is Inputs.ADOPT:
            self.published = arena.empty(sum(x.nbytes for x in self._given), np.uint8)
            _pack(self.published, self._given)
        told = xxhash.xxh3_64_hexdigest(" ".join(f"{x.dtype}[{x.size}]" for x in self._given).encode())
        text = f"all_reduce_many({len(arrays)} arrays #{told}, {op}, {on_loss.value}, {inputs.value})"
        self.call = Call(text=text, on_loss=on_loss, inputs=inputs)

    def run(self, c: Communicator, deadline_ns: int) -> None:
        """See `Job`."""
        if not self._in_place:
            for result, given in zip(self._results, self._given, strict=True):
                result[...] = given
        c.all_reduce_many(self._results, op=self._op, algorithm=self._algorithm, deadline_ns=deadline_ns)

    def copy(self, c: Communicator, source: int, contributors: int, deadline_ns: int) -> None:
        """See `Job`. All travel together."""
        together = np.empty(sum(result.nbytes for result in self._results), np.uint8)
        if c.rank == source:
            _pack(together, self._results)
        c.broadcast(together, source, deadline_ns=deadline_ns)
        if c.rank != source:
            for result, (begin, end) in zip(self._results, _places(self._results), strict=True):
                result[...] = together[begin:end].view(result.dtype).reshape(result.shape)

    def adopt(self, c: Communicator, estate: Estate, deadline_ns: int) -> None:
        """See `Job`. 16-bit floats are added up in float32 and rounded once."""
        estates = [self._part(estate, begin, end) for begin, end in _places(self._given)]
        totals = [each.added_to(given, self._op) for each, given in zip(estates, self._given, strict=True)]
        c.all_reduce_many(totals, op=summed(self._op), deadline_ns=deadline_ns)
        for result, total in zip(self._results, totals, strict=True):
            result[...] = estate.finished(total, self._op, result.dtype)

    def _part(self, estate: Estate, begin: int, end: int) -> Estate:
        """What the dead have left of one array."""
        parts = (
            replace(each, memory=None if each.memory is None else each.memory[begin:end])
            for each in estate.bequests
        )
        return Estate(tuple(parts), estate.contributors)


def _places(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    """Where the bytes of each begin and end, one after the other."""
    ends = np.cumsum([x.nbytes for x in arrays], dtype=np.int64)
    return [(int(end) - x.nbytes, int(end)) for x, end in zip(arrays, ends, strict=True)]


def _pack(together: Array, arrays: Sequence[Array]) -> None:
    for x, (begin, end) in zip(arrays, _places(arrays), strict=True):
        together[begin:end] = as_bytes(packed(x), "x")
