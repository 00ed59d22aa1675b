"""Many small arrays reduced by few operations: they are packed one after the other, and unpacked.

Which arrays go together is a function of their dtypes and sizes, in the order in which they are given, so
all ranks come to the same; a digest of it enters the fingerprint of each operation. An array's bits are those
that the all-reduce of its pack has at its place: by "eager" and "direct", whose order is the same everywhere,
those of an all-reduce of the array alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.communicator.pieces import Job, Side, shape_of
from zbmd.collectives.communicator.uneven import UnevenOperations
from zbmd.collectives.device.arrays_in import Array, Placed, Target, as_placed
from zbmd.collectives.programs.program import IN, OUT, PUB, hash_text
from zbmd.collectives.programs.reductions import dtype_code, itemsize, reduction_code
from zbmd.transport.errors import UserError

PACK_BYTES_MAX: Final = 1 << 20
"""Arrays are packed up to so many bytes together; a longer one goes alone, in place."""
ARRAYS_MAX: Final = 1 << 16
"""Arrays of one call."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Arrays of one dtype that go together: their numbers, in order, and how many elements each has."""

    dtype: int
    arrays: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements in all."""
        return sum(self.sizes)

    @property
    def digest(self) -> int:
        """64 bits that ranks compare."""
        return hash_text(f"pack of {self.arrays} with {self.sizes}")


def packs_of(dtypes: Sequence[int], sizes: Sequence[int], bytes_max: int = PACK_BYTES_MAX) -> list[Pack]:
    """What goes together, by dtype codes and sizes: each pack is filled in order up to `bytes_max`.

    A pack stands where its first array does, and an array goes into the last pack of its dtype if that has
    room.
    """
    found: list[tuple[int, list[int]]] = []
    last: dict[int, tuple[list[int], int]] = {}
    for number, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        nbytes = size * itemsize(dtype)
        pack, used = last.get(dtype, ([], bytes_max))
        if used + nbytes > bytes_max or not pack:
            pack, used = [], 0
            found.append((dtype, pack))
        pack.append(number)
        last[dtype] = pack, used + nbytes
    return [Pack(dtype, tuple(pack), tuple(sizes[k] for k in pack)) for dtype, pack in found]


class CoalescedOperations(UnevenOperations):
    """See `Communicator`."""

    def all_reduce_many(
        self, arrays: Sequence[Any], *, op: str = "sum", algorithm: str = "auto", deadline_ns: int = 0
    ) -> Sequence[Any]:
        """`all_reduce` of every array, in place, small ones together; see
        `zbmd.collectives.communicator.coalescing`.

        All ranks give arrays of the same dtypes and sizes in the same order, or all raise `Desynchronised`.
        The arrays share no memory with each other. After an error each holds its input, its result, or, if
        it is longer than `PACK_BYTES_MAX`, neither. Returns `arrays`.
        """
        if len(arrays) > ARRAYS_MAX:
            raise UserError(f"{len(arrays)} arrays at once; {ARRAYS_MAX} at most")
        given = [as_placed(x, f"array {k}") for k, x in enumerate(arrays)]
        dtypes = [dtype_code(x.dtype) for x in given]
        codes = {code: reduction_code(op, x.dtype) for code, x in zip(dtypes, given, strict=True)}
        targets = [Target(x, f"array {k}", load=True) for k, x in enumerate(given)]
        for pack in packs_of(dtypes, [x.size for x in given]):
            flats = [targets[k].flat for k in pack.arrays]
            self._reduce_pack(pack, flats, codes[pack.dtype], algorithm, deadline_ns)
            for k in pack.arrays:
                targets[k].bring_home()
        return arrays

    def _reduce_pack(
        self, pack: Pack, flats: list[Placed], reduction: int, algorithm: str, deadline_ns: int
    ) -> None:
        together = self._segment.arena.empty(pack.size, flats[0].dtype) if len(flats) > 1 else None
        packed = flats[0]
        if together is not None:
            packed = together
            self._pack(together, flats, inwards=True)
        shape = shape_of(self._ask(Operation.ALL_REDUCE, algorithm, pack.size, pack.dtype))
        sides = [Side((IN, OUT), packed, 1, packed, packed)]
        if shape.plan.eager:
            sides = [Side((PUB,), packed, 1, packed), Side((OUT,), packed, store=packed)]
        job = Job(
            shape=shape,
            sides=sides,
            count=pack.size,
            dtype=pack.dtype,
            reduction=reduction,
            digest=pack.digest,
        )
        self._perform(job, deadline_ns)
        if together is not None:
            self._pack(together, flats, inwards=False)

    def _pack(self, together: Array, flats: list[Placed], *, inwards: bool) -> None:
        """Copy arrays one behind the other, or back."""
        devices, at = self._runner.devices, 0
        try:
            devices.begin(*flats)
            for flat in flats:
                part = together[at : at + flat.size]
                devices.copy(*(part, flat) if inwards else (flat, part))
                at += flat.size
        finally:
            devices.end()
