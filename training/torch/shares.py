"""The logical shares of a batch, of which each rank computes some, in passes over the body of a step.

A batch has as many shares as the loop began with ranks, or as `exact` says. So the global batch, its samples
and the scale of the gradients stay the same with any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.transport.errors import UserError


class Shares(ABC):
    """The shares of one rank. Until `assign`, each rank has one, and gradients are reduced as ever.

    why: what asks for shares.
    """

    are_alone = True
    """Whether all passes but the last are made without the other ranks."""

    def __init__(self, shares: int, why: str) -> None:
        self.shares, self.why = shares, why
        self.ranks = shares
        """Among which they are divided."""
        self.at = 0
        """The number of the pass under way."""
        self.is_on = False
        self._own: tuple[int, ...] = ()
        self._passes: tuple[int, ...] = ()
        self._idle = 0
        """Passes of this rank that count nothing: others have a share more, and need this rank's part."""

    @abstractmethod
    def check(self) -> None:
        """Raise `UserError` for models whose gradients cannot be added up by shares."""

    def assign(self, rank: int, ranks: int) -> None:
        """Have `rank` of `ranks` compute its part of the shares. Raises `UserError` for too many ranks."""
        if ranks > self.shares:
            raise UserError(f"{ranks} ranks for {self.shares} shares of a batch: each needs one")
        ranges = assign_shards(self.shares, ranks)
        self._own, self.ranks, self.at = tuple(range(*ranges[rank])), ranks, 0
        counts = tuple(stop - start for start, stop in ranges)
        longest = max(counts)
        self._idle = 0 if self.are_alone else longest - len(self._own)
        self._passes = counts if self.are_alone else (longest,) * ranks
        self.is_on = True

    def own(self, rank: int) -> tuple[int, ...]:
        """Return the shares that `rank`, which is this one, computes, in their order."""
        return self._own if self.is_on else (rank,)

    def passes(self, ranks: int) -> tuple[int, ...]:
        """Return how many passes each of `ranks`, which are those of the loop, makes in a step."""
        return self._passes if self.is_on else (1,) * ranks

    @property
    def number(self) -> int:
        """The number, among this rank's own shares, of the one that the pass under way computes."""
        return max(0, self.at - self._idle)

    @property
    def is_idle(self) -> bool:
        """Whether the pass under way counts nothing."""
        return self.at < self._idle

    @property
    def is_last(self) -> bool:
        """Whether the pass under way is the last one of its step."""
        return not self.is_on or self.at == self._idle + len(self._own) - 1

    @abstractmethod
    def begin(self) -> None:
        """A pass begins; the first one of a step adds to nothing."""
