"""The order of accesses of different threads: by barriers, warps, mbarriers and named barriers.

The clock is the number of instructions executed so far. A thread *knows* another one up to a step if all
that the other did until then happened before (L. Lamport, "Time, clocks, and the ordering of events", 1978).
Where threads meet only at barriers of whole blocks and warps, a number a block and a warp is enough. With
mbarriers and named barriers, every thread has a vector of steps: one for each thread of its block, and one
for each mbarrier, which stands for the copies that complete on it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.integer]
Flags: TypeAlias = npt.NDArray[np.bool_]
WARP: Final = 32
AGENTS_MAX: Final = 32
"""mbarriers of a block."""


class Clocks:
    """Of all threads of a grid. Threads are numbered through the grid, block by block."""

    def __init__(self, blocks: int, block: int, *, vectors: bool) -> None:
        """`vectors`: whether threads meet elsewhere than at barriers of whole blocks and warps."""
        self.block: Final = block
        self.warps: Final = block // WARP
        self._blocks = np.zeros(blocks, np.int32)
        self._warps = np.zeros(blocks * self.warps, np.int32)
        # Rows: threads; columns: threads of the same block, then its agents.
        shape = (blocks * block, block + AGENTS_MAX)
        self._known = np.zeros(shape, np.int32) if vectors else None

    def row(self, threads: Ints, now: int) -> Ints:
        """Return what `threads` release now: their vectors, joined, each with itself up to now."""
        if self._known is None:
            raise AssertionError("the kernel was started without vectors")
        joined: Ints = self._known[threads].max(axis=0)
        joined[threads % self.block] = now
        return joined

    def acquire(self, threads: Ints, row: Ints) -> None:
        """Let `threads` know all that `row` knows."""
        if self._known is None:
            raise AssertionError("the kernel was started without vectors")
        self._known[threads] = np.maximum(self._known[threads], row)

    def meet_block(self, blocks: Ints, now: int) -> None:
        """All threads of `blocks` meet at a barrier."""
        if self._known is None:
            self._blocks[blocks] = now
            return
        for number in blocks.tolist():
            span = slice(number * self.block, (number + 1) * self.block)
            self._known[span] = self.row(np.arange(span.start, span.stop), now)

    def meet_warps(self, threads: Ints, now: int) -> None:
        """The `threads` of each warp meet."""
        if self._known is None:
            full, counts = np.unique(threads // WARP, return_counts=True)
            self._warps[full[counts == WARP]] = now
            return
        for warp in np.unique(threads // WARP).tolist():
            members = threads[threads // WARP == warp]
            self._known[members] = self.row(members, now)

    def ordered(self, threads: Ints, others: Ints, steps: Ints) -> Flags:
        """Whether each of `threads` knows its one of `others`, of its block, up to the step.

        others: numbers in the block; those from its size on are agents. All have one shape.
        """
        found: Flags = threads % self.block == others
        if self._known is not None:
            found |= self._known[threads, others] >= steps
            return found
        found |= self._blocks[threads // self.block] >= steps
        same = (threads % self.block) // WARP == others // WARP
        found |= same & (self._warps[threads // WARP] >= steps)
        return found

    def all_known(self, threads: Ints) -> Ints:
        """Return the step up to which each of `threads` knows every lane of each warp: (threads, warps)."""
        if self._known is not None:
            rows = self._known[threads, : self.block]
            low: Ints = rows.reshape(len(threads), self.warps, WARP).min(axis=2)
            return low
        low = np.repeat(self._blocks[threads // self.block][:, None], self.warps, axis=1)
        at = np.arange(len(threads)), (threads % self.block) // WARP
        low[at] = np.maximum(low[at], self._warps[threads // WARP])
        return low
