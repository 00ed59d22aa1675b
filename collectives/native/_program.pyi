from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCKED: Final[int]
DONE: Final[int]
CACHED: Final[int]
"""Puts write through the cache."""
STREAMED: Final[int]
"""Puts write past the cache."""
READ: Final[int]
"""Peers read the arrays in place."""

class Stepper:
    """Walks one encoded program (`program.encode`). Raises ValueError on a malformed encoding."""

    pc: int
    def __init__(self, encoding: NDArray[np.int32]) -> None: ...
    def next(self, received: NDArray[np.uint64]) -> int:
        """The index of the instruction that may fire, or BLOCKED (at a wait), or DONE.

        `received`: by rank, its notifications since the program began; of all ranks that it names.
        """
    def advance(self) -> None:
        """The instruction has been performed."""

class NativeProgram:
    """One rank's program, every operand checked once. Raises ValueError on one that is out of bounds."""

    def __init__(
        self,
        encoding: NDArray[np.int32],
        *,
        n: int,
        rank: int,
        blocks: int,
        chunks: int,
        scratch_slots: int,
        inbox_slots: int,
        eager: bool,
        plan: int,
        other: NativeProgram | None = None,
    ) -> None:
        """other: what is run instead if `in` and `out` of all ranks lie in the arena, and rank 0, who times
        both, says so. It has the same buffers, and gives the same bits. `plan` tells the pair from others.
        """
    eager: bool
    """Whether inputs travel with the descriptors."""

    def __len__(self) -> int: ...
    @property
    def kill_points(self) -> int:
        """The points at which `NativeGroup.run` can be killed in an operation: 0..kill_points-1."""

class StoreChoice:
    """Rank 0's choice of how the bytes of runs of one size go (stores.h)."""

    def next(self, ways: int) -> int:
        """The way of the run that begins, one of the first so many: CACHED, STREAMED or READ."""
    def note(self, way: int, cost: float) -> None:
        """Note the time of the run that went so, in any unit that stays the same."""
