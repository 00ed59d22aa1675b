"""A part of a parameter, as one of several ranks holds it."""

from __future__ import annotations

import msgspec

from zbmd.training.autograd.array_module import Array


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """A part of a parameter: [:, start:stop, :] of it in the shape (outer, each, inner)."""

    outer: int
    each: int
    inner: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the part."""
        return self.outer, self.stop - self.start, self.inner

    def of(self, whole: Array) -> Array:
        """The part of a whole parameter, of any shape: a view in the shape of the part."""
        return whole.reshape(self.outer, self.each, self.inner)[:, self.start : self.stop]

    def check(self, size: int) -> None:
        """Raise `ValueError` unless it is a part of a parameter of `size` elements."""
        if min(self.outer, self.each, self.inner) < 1 or self.outer * self.each * self.inner != size:
            raise ValueError(f"{self} is no part of {size} elements")
        if not 0 <= self.start < self.stop <= self.each:
            raise ValueError(f"{self} is empty, or more than there is")


def run_of(size: int, start: int, stop: int) -> Cut:
    """Elements [start, stop) of a parameter of `size`, as they lie one behind the other."""
    return Cut(1, size, 1, start, stop)
