"""Which ranks are on which host, also after some are gone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.scale.fabric import Fabric


@dataclass(frozen=True, slots=True)
class Placement:
    """`hosts[r]` is the host of rank r, `ports[r]` its port to the network."""

    hosts: tuple[int, ...]
    ports: tuple[int, ...]
    fabric: Fabric

    @property
    def n(self) -> int:
        """Ranks."""
        return len(self.hosts)

    @property
    def host_array(self) -> NDArray[np.int32]:
        """int32 (n,)."""
        return np.array(self.hosts, np.int32)

    @property
    def port_array(self) -> NDArray[np.int32]:
        """int32 (n,)."""
        return np.array(self.ports, np.int32)

    @property
    def port_count(self) -> int:
        """Of all hosts."""
        return (max(self.hosts) + 1) * self.fabric.ports

    def without(self, gone: Collection[int]) -> Placement:
        """The group of the others, numbered anew; they stay where they are."""
        left = [rank for rank in range(self.n) if rank not in gone]
        return Placement(
            tuple(self.hosts[rank] for rank in left), tuple(self.ports[rank] for rank in left), self.fabric
        )


def place(n: int, fabric: Fabric) -> Placement:
    """`n` ranks, host after host."""
    each, ports = fabric.ranks_per_host, fabric.ports
    hosts = tuple(rank // each for rank in range(n))
    return Placement(hosts, tuple(hosts[rank] * ports + rank % each % ports for rank in range(n)), fabric)
