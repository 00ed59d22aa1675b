"""The layout of all parameters of a model in one flat array.

Parameters, gradients and optimizer moments are flat arrays of one layout, so that a collective, an optimizer
and a store each see a single buffer. Parameters lie in the order in which the forward pass uses them; each
begins at a multiple of `ALIGNMENT` elements, and the padding between them is always zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from zbmd.training.autograd.array_module import Array


class ParameterSlice(msgspec.Struct, frozen=True, array_like=True):
    """A slice of a parameter: [:, start:stop, :] of it in the shape (outer, each, inner)."""

    outer: int
    each: int
    inner: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the slice."""
        return self.outer, self.stop - self.start, self.inner

    def of(self, whole: Array) -> Array:
        """Return the slice of a whole parameter, of any shape: a view in the shape of the slice."""
        return whole.reshape(self.outer, self.each, self.inner)[:, self.start : self.stop]

    def check(self, size: int) -> None:
        """Raise `ValueError` unless this is a slice of a parameter of `size` elements."""
        if min(self.outer, self.each, self.inner) < 1 or self.outer * self.each * self.inner != size:
            raise ValueError(f"{self} is no part of {size} elements")
        if not 0 <= self.start < self.stop <= self.each:
            raise ValueError(f"{self} is empty, or more than there is")


def flat_slice(size: int, start: int, stop: int) -> ParameterSlice:
    """Return the slice of the elements [start, stop), in memory order, of a parameter of `size` elements."""
    return ParameterSlice(1, size, 1, start, stop)


ALIGNMENT = 16  # elements: 64 bytes of float32, one cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """One parameter: its name, shape, first element in the flat array, and whether weight decay applies."""

    name: str
    shape: tuple[int, ...]
    offset: int
    decayed: bool
    size: int = field(init=False, compare=False)
    """Elements, without padding."""
    span: slice = field(init=False, compare=False)
    """The elements of the flat array that are this parameter."""

    def __post_init__(self) -> None:
        # Once, not for each view: two times fifty of them are made for every shard.
        size = math.prod(self.shape)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "span", slice(self.offset, self.offset + size))


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """All parameters of a model, in order of offset; a parameter's index is its position in `slots`."""

    slots: tuple[ParameterSlot, ...]

    @classmethod
    def of(cls, shapes: dict[str, tuple[int, ...]]) -> ParameterLayout:
        """Lay out the parameters of `shapes` in its order. Weight decay applies to those with two axes."""
        slots: list[ParameterSlot] = []
        offset = 0
        for name, shape in shapes.items():
            slots.append(ParameterSlot(name=name, shape=shape, offset=offset, decayed=len(shape) == 2))
            offset += padded(slots[-1].size)
        return cls(tuple(slots))

    @property
    def size(self) -> int:
        """Return the elements of a flat array, padding included."""
        return self.slots[-1].offset + padded(self.slots[-1].size)

    @property
    def parameter_count(self) -> int:
        """Return the elements that are parameters, without padding."""
        return sum(slot.size for slot in self.slots)

    def clear_padding(self, flat: Array) -> None:
        """Set the elements between parameters, of (size,), to 0."""
        ends = [0, *(slot.offset + slot.size for slot in self.slots)]
        for end, start in zip(ends, [*(slot.offset for slot in self.slots), self.size], strict=True):
            flat[end:start] = 0

    def views(self, flat: Array) -> list[Array]:
        """Return each parameter's view of `flat` (1-D, `size` elements, contiguous), by index."""
        self.check(flat)
        return [flat[slot.span].reshape(slot.shape) for slot in self.slots]

    def check(self, flat: Array) -> None:
        """Raise `ValueError` unless `flat` is a contiguous 1-D array of `size` elements."""
        if flat.shape != (self.size,) or not flat.flags.c_contiguous:
            raise ValueError(
                f"a flat array of this layout is 1-D, contiguous and has {self.size} elements; "
                f"this one has shape {flat.shape} and strides {flat.strides}"
            )


def padded(size: int) -> int:
    """Return `size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
