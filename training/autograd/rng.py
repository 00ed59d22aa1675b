"""Counter-based randomness: a number depends on its key alone, never on who computes it or what came before.

The generator is Philox (J. K. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
keyed by a seed and a purpose; permutations are Feistel networks over it that need no table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from types import ModuleType

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, Philox  # numpy loads it on first use: not in a rank that is waited for

from zbmd.training.autograd.array_module import Array
from zbmd.training.native import _kernels

PHILOX_ROUNDS = 10
BLOCK_WORDS = 4
"""Words that one counter yields."""
FEISTEL_ROUNDS = 6
# Each walk leaves the domain with probability at most 3/4: 512 steps fail once in 10**64.
CYCLE_WALK_STEPS_MAX = 512

_WORD = 0xFFFFFFFF
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """The purpose of a stream of numbers. Streams of different purposes are independent."""

    INIT = 1
    SHUFFLE = 2
    GENERATE = 3
    DROPOUT = 4


def stream(seed: int, purpose: Purpose, index: int = 0) -> Generator:
    """Return the generator of `(seed, purpose, index)`; `seed` and `index` are in [0, 2**64)."""
    key = np.array([seed, (int(purpose) << 56) ^ index], dtype=np.uint64)
    return Generator(Philox(key=key))


@dataclass(frozen=True, slots=True)
class Noise:
    """The inputs of a step's random numbers: the seed, the step, and each sample, (samples,) integers.

    They depend on nothing else: any rank that computes a sample, for the first time or again, draws the same
    numbers for it.
    """

    seed: int
    step: int
    samples: npt.NDArray[np.int64]


def random_words(noise: Noise, site: int, count: int, *, start: int = 0, xp: ModuleType = np) -> Array:
    """Return random words of each sample of `noise` at `site`, from `start` on: (samples, count) of uint32.

    Philox4x32-10 with the seed as its key. Word i of a sample is word i % 4 of the block with the counter (i
    // 4, purpose and site, step, sample), each modulo 2**32. `site`, below 2**24, distinguishes the places of
    a model that draw numbers.
    """
    counters = [
        ((int(Purpose.DROPOUT) << 24) | site, noise.step & _WORD, sample & _WORD)
        for sample in noise.samples.tolist()
    ]
    block, skipped = divmod(start, BLOCK_WORDS)
    if xp is not np:
        return _philox(noise.seed, counters, block, skipped + count, xp=xp)[:, skipped:]
    words = np.empty((len(counters), skipped + count), dtype=np.uint32)
    for row, counter in zip(words, counters, strict=True):
        _kernels.random_words(row, noise.seed, block, *counter)
    return words[:, skipped:]


def random_run(noise: Noise, site: int, each: int, start: int, stop: int, *, xp: ModuleType = np) -> Array:
    """Return words `start` to `stop` of all samples' first `each` words at `site`, concatenated: 1-D."""
    if (start, stop) == (0, each * len(noise.samples)):
        return random_words(noise, site, each, xp=xp).reshape(-1)
    parts: list[Array] = []
    for index in range(start // each, -(-stop // each)):
        first, last = max(start - index * each, 0), min(stop - index * each, each)
        sample = replace(noise, samples=noise.samples[index : index + 1])
        parts.append(random_words(sample, site, last - first, start=first, xp=xp)[0])
    run: Array = xp.concatenate(parts)
    return run


def _philox(
    seed: int, counters: list[tuple[int, int, int]], first: int, count: int, *, xp: ModuleType
) -> Array:
    """Compute the same in whole-array operations of 64-bit integers, for a device without a kernel."""
    blocks = -(-count // BLOCK_WORDS)
    c = [xp.zeros((len(counters), blocks), dtype=np.uint64) for _ in range(4)]
    c[0] += xp.arange(first, first + blocks, dtype=np.uint64)
    for place in range(3):
        c[place + 1] += xp.asarray([counter[place] for counter in counters], dtype=np.uint64)[:, None]
    low, high = seed & _WORD, seed >> 32
    for _ in range(PHILOX_ROUNDS):
        left, right = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (right >> np.uint64(32)) ^ c[1] ^ np.uint64(low),
            right & np.uint64(_WORD),
            (left >> np.uint64(32)) ^ c[3] ^ np.uint64(high),
            left & np.uint64(_WORD),
        ]
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    words = xp.empty((len(counters), blocks, BLOCK_WORDS), dtype=np.uint32)
    for place in range(BLOCK_WORDS):
        words[:, :, place] = c[place]
    flat: Array = words.reshape(len(counters), BLOCK_WORDS * blocks)[:, :count]
    return flat


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
