"""Policies on stragglers, and a division of logical shards over ranks of unequal speed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from zbmd.transport.errors import LocalProtocolError


class OnStraggler(Enum):
    """The choices of `--on-straggler`."""

    WARN = "warn"
    """Report it."""
    REBALANCE = "rebalance"
    """Move whole logical shards to other ranks, with the same bits, until it is as fast as before."""
    REPLACE = "replace"
    """Replace it, once, as if it had died."""


def shares_most(shards: int, ranks: int) -> tuple[int, ...]:
    """Return shares of `shards` in which the first rank has as many as `shares_for` gives any, at most."""
    return (max(1, shards - ranks + 1), *[1] * (ranks - 1))


def shares_for(shards: int, costs: Sequence[float]) -> tuple[int, ...]:
    """Return how many of `shards` each rank computes, so that the slowest one takes as little time as
    possible.

    costs: the time of a shard on each rank. Each rank has one shard at least, if there are so many; equal
    costs give shares that differ by one at most. Raises `LocalProtocolError` for a cost that is not positive.
    """
    if not costs or min(costs) <= 0:
        raise LocalProtocolError(f"expected the positive cost of a shard on each rank, got {costs}")
    shares = [int(place < shards) for place in range(len(costs))]
    for _ in range(shards - sum(shares)):
        place = min(range(len(costs)), key=lambda one: ((shares[one] + 1) * costs[one], one))
        shares[place] += 1
    return tuple(shares)
