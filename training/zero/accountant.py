"""Memory that is counted: how many bytes of which kind are held, and were at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from zbmd.training.xp import Array


class Kind(Enum):
    """What memory is for. All but `WORKING` is model state; that is given back within a step."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    WORKING = "working"


@dataclass(slots=True)
class Accountant:
    """Hands out zeroed arrays and counts them."""

    held: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    most: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    state_bytes_most: int = 0

    def allocate(self, kind: Kind, size: int, dtype: npt.DTypeLike) -> Array:
        """Return (size,) zeros of `dtype`."""
        array: Array = np.zeros(size, dtype=dtype)
        self.held[kind] += array.nbytes
        self.most[kind] = max(self.most[kind], self.held[kind])
        self.state_bytes_most = max(self.state_bytes_most, self.state_bytes)
        return array

    def free(self, kind: Kind, array: Array) -> None:
        """Count `array` as given back; its owner drops it."""
        self.held[kind] -= array.nbytes
        assert self.held[kind] >= 0, f"more {kind.value} memory was given back than taken"

    @property
    def state_bytes(self) -> int:
        """Bytes of model state held now."""
        return sum(nbytes for kind, nbytes in self.held.items() if kind is not Kind.WORKING)
