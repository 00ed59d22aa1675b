"""Memory that is counted: how many bytes of which kind are held, and were at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.array_module import Array


class Kind(Enum):
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


_ELSEWHERE = (Kind.WORKING, Kind.MIRROR, Kind.OFFLOADED)


Make = Callable[[int, npt.DTypeLike], Array]
"""Makes a 1-D array of so many elements; what is in it does not matter."""


def own_memory(size: int, dtype: npt.DTypeLike) -> Array:
    """A `Make`: of this process's own memory, where no peer reads."""
    return np.empty(size, dtype=dtype)


@dataclass(slots=True)
class Accountant:
    """Hands out zeroed arrays, made by `make`, and counts them."""

    make: Make = own_memory
    held: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    most: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    state_bytes_most: int = 0

    def allocate(self, kind: Kind, size: int, dtype: npt.DTypeLike) -> Array:
        """Return (size,) zeros of `dtype`."""
        array = self.make(size, dtype)
        array[:] = 0
        self.count(kind, array)
        return array

    def count(self, kind: Kind, array: Array) -> None:
        """Count an array that was made elsewhere."""
        self.held[kind] += array.nbytes
        self.most[kind] = max(self.most[kind], self.held[kind])
        self.state_bytes_most = max(self.state_bytes_most, self.state_bytes)

    def free(self, kind: Kind, array: Array) -> None:
        """Count `array` as given back; its owner drops it."""
        self.held[kind] -= array.nbytes
        assert self.held[kind] >= 0, f"more {kind.value} memory was given back than taken"

    @property
    def state_bytes(self) -> int:
        """Bytes of model state held now."""
        return sum(nbytes for kind, nbytes in self.held.items() if kind not in _ELSEWHERE)
