"""The transactional store of a training job: two slots of weights and optimizer state.

A step reads the committed slot and writes the other; the commit only changes which is which, so a step that
is given up leaves nothing to undo. Both slots lie in memory that peers can read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from zbmd.training.adamw import AdamWState
from zbmd.training.layout import ParameterLayout
from zbmd.training.xp import Array, to_host

SLOTS = 2
PARTS = 3
"""A slot holds weights, mean and square, one behind the other."""

Allocate = Callable[[int], Array]
"""Return a 1-D float32 array of so many elements."""


def own_memory(elements: int) -> Array:
    """An `Allocate`: zeros in this process's own memory, where no peer reads."""
    return np.zeros(elements, np.float32)


@dataclass(frozen=True, slots=True)
class Slot:
    """One version of the state: `flat` (3 * layout.size,) float32, and its three parts as views."""

    flat: Array
    state: AdamWState


class Store:
    """Two slots of one layout. `committed` names the one that holds the last committed version."""

    def __init__(self, layout: ParameterLayout, allocate: Allocate) -> None:
        self.layout = layout
        self.committed = 0
        self.version = 0
        """Of the committed slot."""
        self.slots = tuple(self._slot(allocate) for _ in range(SLOTS))

    def _slot(self, allocate: Allocate) -> Slot:
        size = self.layout.size
        flat = allocate(PARTS * size)
        flat[:] = 0.0
        weights, mean, square = (flat[part * size : (part + 1) * size] for part in range(PARTS))
        return Slot(flat, AdamWState(weights, mean, square))

    @classmethod
    def nbytes(cls, layout: ParameterLayout) -> int:
        """Bytes of both slots."""
        return SLOTS * PARTS * layout.size * np.dtype(np.float32).itemsize

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
