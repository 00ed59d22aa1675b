"""The ring over all ranks, a vector of ranks at a time.

At 10,000 ranks the flat ring's programs have 10^9 instructions. All ranks walk the same ones, and no two
share a port of the network, so each instruction is done for all ranks at once: the same additions as the
timeline's, to the same results (`tests/collectives/test_scale.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.ring import WINDOW_SLOTS
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.scale.placement import Placement

Times = NDArray[np.float64]
RANKS_MIN = WINDOW_SLOTS + 1
"""In a smaller ring nobody says that a slot is free."""


def ring_instructions(n: int, turns_a_hop: int) -> int:
    """Of all ranks together."""
    turns = 2 * (n - 1) * turns_a_hop
    return n * (3 * turns + 2 * (turns - WINDOW_SLOTS))


def ring_ends(placement: Placement, *, chunk_bytes: float, turns_a_hop: int, begin: Times) -> Times:
    """When each rank has ended its part of a ring all-reduce, ns. Blocks are of `turns_a_hop` chunks.

    begin: float64 (n,), when each sets out. Raises `ProgramError` for fewer than `RANKS_MIN` ranks.
    """
    n, fabric = placement.n, placement.fabric
    if n < RANKS_MIN:
        raise ProgramError(f"a ring of {n} ranks needs no window: it is walked one rank at a time")
    hosts = placement.host_array
    far = hosts != np.roll(hosts, -1)  # from a rank to the one that follows
    latency = np.where(far, fabric.far_ns, fabric.near_ns)
    leaves = chunk_bytes / np.where(far, fabric.far_bytes_per_ns, fabric.near_bytes_per_ns)
    crosses = np.where(far, leaves, 0.0)  # a port takes a chunk in for as long as one goes out
    own = chunk_bytes / fabric.own_bytes_per_ns
    turns = 2 * (n - 1) * turns_a_hop
    clock, coming = begin.copy(), np.zeros(n)
    freed = np.zeros((WINDOW_SLOTS, n))
    for turn in range(turns):
        slot = turn % WINDOW_SLOTS
        if turn >= WINDOW_SLOTS:
            np.maximum(clock, np.roll(freed[slot], -1) + latency, out=clock)
        clock += fabric.post_ns
        if_far = np.maximum(clock + latency, coming) + crosses
        clock += leaves
        arrives = np.where(far, if_far, clock + latency)
        coming = np.where(far, if_far, coming)
        np.maximum(clock, np.roll(arrives, 1), out=clock)
        clock += (3 if turn < turns // 2 else 1) * own
        if turn + WINDOW_SLOTS < turns:
            clock += fabric.post_ns
            freed[slot] = clock
    return clock
