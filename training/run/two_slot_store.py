"""The transactional store of a training job: two slots of weights and optimizer state.

A step reads the committed slot and writes the other; the commit only changes which is which, so a step that
is given up leaves nothing to undo. Both slots lie in memory that peers can read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.optim.adamw import ARRAYS, AdamWState

SLOTS = 2

Allocate = Callable[[int], Array]
"""Return a 1-D float32 array of so many elements."""


def own_memory(elements: int) -> Array:
    """An `Allocate`: zeros in this process's own memory, where no peer reads."""
    return np.zeros(elements, np.float32)


@dataclass(frozen=True, slots=True)
class Slot:
    """One version of the state: `flat` (arrays * layout.size,) float32, and its parts as views."""

    flat: Array
    state: AdamWState


class Store:
    """Two slots of one layout. `committed` names the one that holds the last committed version.

    arrays: how many of `ARRAYS` a slot has, one behind the other; see `zbmd.training.optim.arrays_of`.
    """

    def __init__(self, layout: ParameterLayout, allocate: Allocate, *, arrays: int = len(ARRAYS)) -> None:
        self.layout = layout
        self._arrays = arrays
        self.committed = 0
        self.version = 0
        """Of the committed slot."""
        self.slots = tuple(self._slot(allocate) for _ in range(SLOTS))

    def _slot(self, allocate: Allocate) -> Slot:
        size = self.layout.size
        flat = allocate(self._arrays * size)
        flat[:] = 0.0
        return Slot(flat, AdamWState.of(flat, size, self._arrays))

    @classmethod
    def nbytes(cls, layout: ParameterLayout, *, arrays: int = len(ARRAYS)) -> int:
        """Bytes of both slots."""
        return SLOTS * arrays * layout.size * np.dtype(np.float32).itemsize

    @property
    def current(self) -> Slot:
        """The committed slot."""
        return self.slots[self.committed]

    def commit(self, slot: int, *, version: int) -> None:
        """`slot` holds `version`, which is the committed one from now on."""
        self.committed, self.version = slot, version

    def digest(self, slot: int) -> bytes:
        """xxh3-128 of a slot's bits: equal on all ranks, or one of them has erred."""
        return xxhash.xxh3_128_digest(to_host(self.slots[slot].flat).data)
