"""The ring over all ranks, a vector of ranks at a time.

At 10,000 ranks the flat ring's programs have 10^9 instructions. All ranks walk the same ones, and no two
share a port of the network, so each instruction is done for all ranks at once: the same additions as the
timeline's, to the same results, deaths included (`tests/collectives/scale/test_scale.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.algorithms.ring import WINDOW_SLOTS
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.scale.placement import Placement

Times = NDArray[np.float64]
RANKS_MIN = WINDOW_SLOTS + 1
"""In a smaller ring nobody says that a slot is free."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often chunks go round, to be reduced and to be kept. own: the own block is copied first."""

    reducing: int
    keeping: int
    own: bool


ROUNDS: Final[Mapping[Operation, Rounds]] = MappingProxyType(
    {
        Operation.ALL_REDUCE: Rounds(1, 1, own=False),
        Operation.REDUCE_SCATTER: Rounds(1, 0, own=False),
        Operation.ALL_GATHER: Rounds(0, 1, own=True),
    }
)
"""The operations that a ring does."""


def ring_instructions(operation: Operation, n: int, turns_a_hop: int) -> int:
    """Of all ranks together."""
    rounds = ROUNDS[operation]
    turns = (rounds.reducing + rounds.keeping) * (n - 1) * turns_a_hop
    return n * (3 * turns + 2 * (turns - WINDOW_SLOTS) + (turns_a_hop if rounds.own else 0))


def ring_ends(
    operation: Operation,
    placement: Placement,
    *,
    chunk_bytes: float,
    turns_a_hop: int,
    begin: Times,
    dies: Times | None = None,
) -> Times:
    """When each rank has ended its part, ns (nan: never). Blocks are of `turns_a_hop` chunks.

    begin, dies: float64 (n,), when each sets out, and when it does nothing more (none dies). Raises
    `ProgramError` for fewer than `RANKS_MIN` ranks.
    """
    n, fabric, rounds = placement.n, placement.fabric, ROUNDS[operation]
    if n < RANKS_MIN:
        raise ProgramError(f"a ring of {n} ranks needs no window: it is walked one rank at a time")
    hosts = placement.host_array
    far = hosts != np.roll(hosts, -1)  # from a rank to the one that follows
    latency = np.where(far, fabric.far_ns, fabric.near_ns)
    leaves = chunk_bytes / np.where(far, fabric.far_bytes_per_ns, fabric.near_bytes_per_ns)
    crosses = np.where(far, leaves, 0.0)  # a port takes a chunk in for as long as one goes out
    own = chunk_bytes / fabric.own_bytes_per_ns
    reducing = rounds.reducing * (n - 1) * turns_a_hop
    turns = reducing + rounds.keeping * (n - 1) * turns_a_hop
    clock, coming = begin.copy(), np.zeros(n)

    def until_death() -> None:
        if dies is not None:
            clock[clock >= dies] = np.inf  # what it would do now never happens

    for _ in range(turns_a_hop if rounds.own else 0):
        until_death()
        clock += own
    freed = np.zeros((WINDOW_SLOTS, n))
    for turn in range(turns):
        slot = turn % WINDOW_SLOTS
        if turn >= WINDOW_SLOTS:
            until_death()
            np.maximum(clock, np.roll(freed[slot], -1) + latency, out=clock)
        until_death()
        clock += fabric.post_ns
        if_far = np.maximum(clock + latency, coming) + crosses
        clock += leaves
        arrives = np.where(far, if_far, clock + latency)
        coming = np.where(far, if_far, coming)
        until_death()
        np.maximum(clock, np.roll(arrives, 1), out=clock)
        until_death()
        clock += (3 if turn < reducing else 1) * own
        if turn + WINDOW_SLOTS < turns:
            until_death()
            clock += fabric.post_ns
            freed[slot] = clock
    return np.where(np.isinf(clock), np.nan, clock)
