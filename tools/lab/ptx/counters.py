"""Count what accesses cost: passes over shared memory's banks, and sectors of device memory.

An access of a warp to shared memory takes as many passes as the busiest of the 32 banks has distinct words;
accesses of 8 and 16 bytes are served by half and quarter warps. Device memory moves in sectors of 32 bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from zbmd.tools.lab.ptx.clocks import WARP, Ints

BANKS: Final = 32
BANK_BYTES: Final = 4
SECTOR_BYTES: Final = 32


@dataclass(slots=True)
class Cost:
    """The passes or sectors of some accesses, and how many they would take at best."""

    taken: int = 0
    best: int = 0

    @property
    def ratio(self) -> float:
        """Return 1 for accesses that waste nothing."""
        return self.taken / self.best if self.best else 1.0


@dataclass(slots=True)
class Counters:
    """Counts of one launch. Costs by source line and instruction; instructions of warps by opcode."""

    shared: dict[str, Cost] = field(default_factory=dict)
    sectors: dict[str, Cost] = field(default_factory=dict)
    instructions: Counter[str] = field(default_factory=Counter)

    def ratio(self, costs: dict[str, Cost]) -> float:
        """Return the ratio of all accesses in `costs` together."""
        taken, best = sum(one.taken for one in costs.values()), sum(one.best for one in costs.values())
        return Cost(taken, best).ratio

    def count_shared(self, where: str, addresses: Ints, threads: Ints, size: int) -> None:
        """Count one access of `size` bytes by each of `threads`, to addresses of their own blocks."""
        per = WARP * BANK_BYTES // max(size, BANK_BYTES)
        slots = threads // per
        words = addresses[:, None] // BANK_BYTES + np.arange(max(1, size // BANK_BYTES))
        # Distinct words of each group of lanes, then the busiest bank of each group.
        span = int(words.max()) + 1
        distinct = np.unique((slots[:, None] * span + words).reshape(-1))
        group, bank = distinct // span, distinct % span % BANKS
        numbers, places = np.unique(group, return_inverse=True)
        table = np.bincount(places.reshape(-1) * BANKS + bank, minlength=len(numbers) * BANKS)
        cost = self.shared.setdefault(where, Cost())
        cost.taken += int(table.reshape(-1, BANKS).max(axis=1).sum())
        cost.best += len(numbers)

    def count_sectors(self, where: str, addresses: Ints, threads: Ints, size: int) -> None:
        """Count one access of `size` bytes by each of `threads`; one address is fetched once a warp."""
        warp = threads // WARP
        low = int(addresses.min()) // SECTOR_BYTES * SECTOR_BYTES
        pieces = (addresses[:, None] - low) + np.arange(0, size, min(size, SECTOR_BYTES))
        span = int(pieces.max()) // SECTOR_BYTES + 2
        sectors = np.unique((warp[:, None] * span + pieces // SECTOR_BYTES).reshape(-1))
        unique = np.unique(warp * np.int64(int(addresses.max()) - low + 1) + (addresses - low))
        per_warp = np.bincount(np.searchsorted(np.unique(warp), unique // (int(addresses.max()) - low + 1)))
        cost = self.sectors.setdefault(where, Cost())
        cost.taken += len(sectors)
        cost.best += int((-(-per_warp * size // SECTOR_BYTES)).sum())
