"""The simulated network of collectives at scale: hosts of a few ranks, fast inside, slower between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import UserError


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of ranks: `hosts[r]` is the host of rank r, `ports[r]` its port to the network."""

    hosts: tuple[int, ...]
    ports: tuple[int, ...]
    fabric: Fabric

    @property
    def n(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts)

    @property
    def host_array(self) -> NDArray[np.int32]:
        """Return the hosts, int32 (n,)."""
        return np.array(self.hosts, np.int32)

    @property
    def port_array(self) -> NDArray[np.int32]:
        """Return the ports, int32 (n,)."""
        return np.array(self.ports, np.int32)

    @property
    def port_count(self) -> int:
        """Return the number of ports of all hosts."""
        return (max(self.hosts) + 1) * self.fabric.ports

    def without(self, gone: Collection[int]) -> Placement:
        """Return the group of the other ranks, renumbered; they stay on their hosts."""
        left = [rank for rank in range(self.n) if rank not in gone]
        return Placement(
            tuple(self.hosts[rank] for rank in left), tuple(self.ports[rank] for rank in left), self.fabric
        )


def place(n: int, fabric: Fabric) -> Placement:
    """Return `n` ranks, host after host."""
    each, ports = fabric.ranks_per_host, fabric.ports
    hosts = tuple(rank // each for rank in range(n))
    return Placement(hosts, tuple(hosts[rank] * ports + rank % each % ports for rank in range(n)), fabric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Latencies in ns, rates in bytes a ns (GB/s). The defaults: eight accelerators a host, 400 Gb/s between.

    near_*: between ranks of a host. far_*: between hosts, a port. own: reading or reducing own memory. post:
    what it takes a rank to post a put, a notification or a read. `ports`: how many a host has; rank i of it
    uses port i mod ports.
    """

    ranks_per_host: int = 8
    ports: int = 1
    near_ns: float = 1_000.0
    far_ns: float = 5_000.0
    post_ns: float = 200.0
    near_bytes_per_ns: float = 300.0
    far_bytes_per_ns: float = 50.0
    own_bytes_per_ns: float = 1_000.0

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1 or not 1 <= self.ports <= self.ranks_per_host:
            raise UserError(
                f"a host of {self.ranks_per_host} ranks and {self.ports} ports: "
                "give a rank or more, and at most a port for each"
            )
        rates = (self.near_bytes_per_ns, self.far_bytes_per_ns, self.own_bytes_per_ns)
        if min(rates) <= 0 or min(self.near_ns, self.far_ns, self.post_ns) < 0:
            raise UserError("a network's rates are above 0, and its latencies not below")

    def __str__(self) -> str:
        return (
            f"hosts of {self.ranks_per_host} ranks, {self.near_bytes_per_ns:g} GB/s and "
            f"{self.near_ns / 1e3:g} us inside; {self.ports} x {8 * self.far_bytes_per_ns:g} Gb/s a host and "
            f"{self.far_ns / 1e3:g} us between"
        )
