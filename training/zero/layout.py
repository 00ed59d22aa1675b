"""How ZeRO cuts a flat array: into units, which are gathered whole, and each unit into one part a rank.

Units are runs of whole parameters in the order of the forward pass (embedding, each block, head). A unit of
`u` elements is cut into `ranks` equal parts of `part` elements, the least multiple of `ALIGNMENT` with
`ranks * part >= u`; rank r has elements [r * part, (r + 1) * part) of it, and what lies behind the unit's
end is zero. A rank's *shard* is its parts of all units, one behind the other:

    flat     | unit 0                | unit 1          | ...
    parts    | r0    | r1    | r2 ..0| r0 | r1 | r2    | ...
    shard r1          | r1 of 0 | r1 of 1 | ...

Weights, gradients, masters and moments all have this layout, so reduce-scatter of a unit's gradient, the
update, and all-gather of a unit's weights touch one contiguous range a rank. S. Rajbhandari and others,
"ZeRO", 2020, arXiv:1910.02054; the flat parameters of units as in Y. Zhao and others, "PyTorch FSDP", 2023,
arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import (
    ALIGNMENT,
    ParameterLayout,
    ParameterSlice,
    ParameterSlot,
    flat_slice,
)
from zbmd.training.pipeline.part import OwnParts
from zbmd.training.redundancy.cut_events import Span
from zbmd.transport.errors import UserError


class MemoryKind(Enum):
    """What memory is for. Model state is all but `WORKING`, given back within a step, `MIRROR`, and
    `OFFLOADED`."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    WORKING = "working"
    MIRROR = "mirror"
    """Copies of another rank's state."""
    OFFLOADED = "offloaded"
    """In a file; what of it is in memory, the kernel decides."""


_ELSEWHERE = (MemoryKind.WORKING, MemoryKind.MIRROR, MemoryKind.OFFLOADED)


Make = Callable[[int, npt.DTypeLike], Array]
"""Make a 1-D array of so many elements."""


@dataclass(slots=True)
class Accountant:
    """Hands out arrays and counts them.

    They are made by `make`, by `make_zeros`, by `make_lazy`: zeros that are used after a call of `ready`,
    or by `make_room`, as lazy, but not zeros.
    """

    make: Make = np.empty
    make_zeros: Make = np.zeros
    make_lazy: Make = np.zeros
    make_room: Make = np.empty
    ready: Callable[[Array], None] = lambda _: None
    held: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MemoryKind, 0))
    most: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MemoryKind, 0))
    state_bytes_most: int = 0

    def allocate(self, kind: MemoryKind, size: int, dtype: npt.DTypeLike) -> Array:
        """Return (size,) zeros of `dtype`."""
        array = self.make_zeros(size, dtype)
        self.count(kind, array)
        return array

    def reserve(self, kind: MemoryKind, size: int, dtype: npt.DTypeLike) -> Array:
        """Return (size,) zeros of `dtype`. Call `ready` with it, or a part of it, before it is used."""
        array = self.make_lazy(size, dtype)
        self.count(kind, array)
        return array

    def room(self, kind: MemoryKind, size: int, dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array, (size,) of `dtype`. Call `ready` with it before it is used."""
        array = self.make_room(size, dtype)
        self.count(kind, array)
        return array

    def take(self, kind: MemoryKind, size: int, dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array, (size,) of `dtype`."""
        array = self.make(size, dtype)
        self.count(kind, array)
        return array

    def count(self, kind: MemoryKind, array: Array) -> None:
        """Count an array that was made elsewhere."""
        self.held[kind] += array.nbytes
        self.most[kind] = max(self.most[kind], self.held[kind])
        self.state_bytes_most = max(self.state_bytes_most, self.state_bytes)

    def free(self, kind: MemoryKind, array: Array) -> None:
        """Count `array` as given back; its owner drops it."""
        self.held[kind] -= array.nbytes
        assert self.held[kind] >= 0, f"more {kind.value} memory was given back than taken"

    @property
    def state_bytes(self) -> int:
        """Bytes of model state held now."""
        return sum(nbytes for kind, nbytes in self.held.items() if kind not in _ELSEWHERE)


RANKS_MAX = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit: its parameters (by index), its elements of the flat array, a part's length and place."""

    parameters: slice
    span: slice
    part: int
    shard_start: int

    @property
    def size(self) -> int:
        """Elements of the flat array."""
        size: int = self.span.stop - self.span.start
        return size

    @property
    def in_shard(self) -> slice:
        """The span of a rank's part in its shard."""
        return slice(self.shard_start, self.shard_start + self.part)

    def cut_of(self, slot: ParameterSlot, rank: int) -> ParameterSlice | None:
        """Return the slice of this parameter that is in the part of `rank`; None: nothing."""
        own = self.of_rank(rank)
        start, stop = max(own.start, slot.span.start), min(own.stop, slot.span.stop)
        return flat_slice(slot.size, start - slot.offset, stop - slot.offset) if start < stop else None

    def of_rank(self, rank: int) -> slice:
        """Return the span of the flat array in the part of `rank`: shorter than `part` at the end."""
        start = min(self.span.start + rank * self.part, self.span.stop)
        return slice(start, min(start + self.part, self.span.stop))


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The units of one model over `ranks` ranks."""

    layout: ParameterLayout
    ranks: int
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, layout: ParameterLayout, groups: tuple[slice, ...], *, ranks: int) -> ShardLayout:
        """Cut `layout` into units of the parameters `groups`, which follow each other and are all of them.

        Raises `UserError` for a number of ranks out of range, and `ValueError` for groups that leave a gap.
        """
        if not 1 <= ranks <= RANKS_MAX:
            raise UserError(f"{ranks} ranks cannot share a model: it takes 1 to {RANKS_MAX:,}.")
        units: list[Unit] = []
        place = expected = 0
        for group in groups:
            if group.start != expected or group.stop <= group.start:
                raise ValueError(f"the units' parameters {groups} do not follow each other")
            expected = group.stop
            start = layout.slots[group.start].offset
            stop = layout.slots[group.stop].offset if group.stop < len(layout.slots) else layout.size
            part = -(-(stop - start) // (ranks * ALIGNMENT)) * ALIGNMENT
            units.append(Unit(parameters=group, span=slice(start, stop), part=part, shard_start=place))
            place += part
        if expected != len(layout.slots):
            raise ValueError(f"the units hold {expected} of {len(layout.slots)} parameters")
        return cls(layout, ranks, tuple(units))

    def recut(self, ranks: int) -> ShardLayout:
        """Return how another number of ranks shares the same units."""
        groups = tuple(unit.parameters for unit in self.units)
        return ShardLayout.of(self.layout, groups, ranks=ranks)

    def spans_from(self, old: ShardLayout, rank: int) -> Iterator[Span]:
        """Yield where the shard of `rank` lies in shards of another number of ranks."""
        for new, before in zip(self.units, old.units, strict=True):
            own = new.of_rank(rank)
            for part in range(old.ranks):
                there = before.of_rank(part)
                start, stop = max(own.start, there.start), min(own.stop, there.stop)
                if start < stop:
                    at, into = before.shard_start + start - there.start, new.shard_start + start - own.start
                    yield Span(part, at, stop - start, into)

    @property
    def shard_size(self) -> int:
        """Elements of a rank's shard."""
        last = self.units[-1]
        return last.shard_start + last.part

    def shard_of(self, flat: Array, rank: int) -> Array:
        """A copy of the shard of `rank` of `flat`, (layout.size,)."""
        self.layout.check(flat)
        shard: Array = np.zeros(self.shard_size, dtype=flat.dtype)
        for unit in self.units:
            own = flat[unit.of_rank(rank)]
            shard[unit.shard_start : unit.shard_start + len(own)] = own
        return shard

    def whole(self, shards: list[Array]) -> Array:
        """The flat array of which `shards`, one a rank in their order, are the shards."""
        flat: Array = np.zeros(self.layout.size, dtype=shards[0].dtype)
        for rank, shard in enumerate(shards):
            for unit in self.units:
                span = unit.of_rank(rank)
                flat[span] = shard[unit.shard_start : unit.shard_start + span.stop - span.start]
        return flat


def shards_of(own: OwnParts, ranks: int) -> ShardLayout:
    """Return how the parameters of a stage are divided over `ranks` ranks.

    A model in one part has a unit for each of its layers. Micro-batches of a pipeline pass all layers of a
    stage in turn, and a tied head uses the first unit's table: there, all is one unit.
    """
    model = own.every[0].model
    units = model.units if is_by_layers(own) else (slice(0, len(own.layout.slots)),)
    return ShardLayout.of(own.layout, units, ranks=ranks)


def is_by_layers(own: OwnParts) -> bool:
    """Return whether a step walks from unit to unit, with all micro-batches at a time."""
    return len(own.every) == 1 and not own.every[0].model.is_tied
