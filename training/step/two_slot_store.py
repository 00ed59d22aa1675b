"""The transactional store of a training job: two slots of weights and optimizer state.

A step reads the committed slot and writes the other one. A commit only swaps their roles, so an abandoned
step leaves nothing to undo. Both slots lie in memory that peers can read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from zbmd.training.autograd.array_module import Array, to_host
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.optim.elementwise import ARRAYS, AdamWState

SLOTS = 2

Allocate = Callable[[int], Array]
"""Return zeros, 1-D float32, of the given number of elements."""


def own_memory(elements: int) -> Array:
    """Return zeros in this process's own memory, which no peer can read: an `Allocate`."""
    return np.zeros(elements, np.float32)


@dataclass(frozen=True, slots=True)
class Slot:
    """One version of the state: `flat`, (arrays * layout.size,) float32, and views of its arrays."""

    flat: Array
    state: AdamWState


class Store:
    """Two slots of one layout. `committed` is the index of the slot with the last committed version.

    `arrays`: how many of `ARRAYS` a slot has, one after the other; see `zbmd.training.optim.arrays_of`.
    """

    def __init__(self, layout: ParameterLayout, allocate: Allocate, *, arrays: int = len(ARRAYS)) -> None:
        self.layout = layout
        self._arrays = arrays
        self.committed = 0
        self.version = 0
        """The version in the committed slot."""
        self.slots = tuple(self._slot(allocate) for _ in range(SLOTS))

    def _slot(self, allocate: Allocate) -> Slot:
        size = self.layout.size
        flat = allocate(self._arrays * size)
        return Slot(flat, AdamWState.of(flat, size, self._arrays))

    @classmethod
    def nbytes(cls, layout: ParameterLayout, *, arrays: int = len(ARRAYS)) -> int:
        """Return the size of both slots in bytes."""
        return SLOTS * arrays * layout.size * np.dtype(np.float32).itemsize

    @property
    def current(self) -> Slot:
        """Return the committed slot."""
        return self.slots[self.committed]

    def commit(self, slot: int, *, version: int) -> None:
        """Make `slot`, which holds `version`, the committed one."""
        self.committed, self.version = slot, version

    def digest(self, slot: int) -> bytes:
        """Return the xxh3-128 of a slot's bits. It is equal on all ranks unless one of them has computed
        wrongly.
        """
        return xxhash.xxh3_128_digest(to_host(self.slots[slot].flat).data)
