"""Counter-based randomness: a number depends on its key alone, never on who computes it or what came before.

The generator is Philox (J. K. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
keyed by a seed and a purpose; permutations are Feistel networks over it that need no table.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, Philox  # numpy loads it on first use: not in a rank that is waited for

FEISTEL_ROUNDS = 6
# Each walk leaves the domain with probability at most 3/4: 512 steps fail once in 10**64.
CYCLE_WALK_STEPS_MAX = 512

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a stream of numbers is for: streams of different purposes are independent."""

    INIT = 1
    SHUFFLE = 2
    GENERATE = 3


def stream(seed: int, purpose: Purpose, index: int = 0) -> Generator:
    """Return the generator of `(seed, purpose, index)`; `seed` and `index` are in [0, 2**64)."""
    key = np.array([seed, (int(purpose) << 56) ^ index], dtype=np.uint64)
    return Generator(Philox(key=key))


class Permutation:
    """A pseudo-random bijection of [0, size), evaluated anywhere in O(1) with no table.

    A balanced Feistel network permutes the smallest power of four that is at least `size`; a value outside
    the domain is sent through again until it falls inside ("cycle walking": J. Black, P. Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002), which keeps it a bijection.
    """

    def __init__(self, size: int, *, seed: int, index: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        self.size = size
        self._half_bits = max(1, -(-(size - 1).bit_length() // 2))
        words = stream(seed, Purpose.SHUFFLE, index).integers(0, 2**64, FEISTEL_ROUNDS, dtype=np.uint64)
        self._round_keys = [np.uint64(word) for word in words]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Map `positions`, each in [0, size), to as many distinct values in [0, size)."""
        if len(positions) and not (int(positions.min()) >= 0 and int(positions.max()) < self.size):
            raise ValueError(f"positions lie outside [0, {self.size})")
        values = self._rounds(positions.astype(np.uint64))
        for _ in range(CYCLE_WALK_STEPS_MAX):
            outside = values >= np.uint64(self.size)
            if not outside.any():
                return values.astype(np.int64)
            values[outside] = self._rounds(values[outside])
        raise AssertionError("a cycle walk did not end: the round function is not random")

    def _rounds(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        low_mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & low_mask
        for key in self._round_keys:
            mixed = (right ^ key) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(31))) * _MIX_2
            left, right = right, left ^ ((mixed >> np.uint64(32)) & low_mask)
        return (left << bits) | right
