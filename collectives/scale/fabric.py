"""The network that collectives are simulated on: hosts of a few ranks, fast inside, slower between them.

Between hosts the model is LogGP's (Alexandrov, Ionescu, Schauser and Scheiman, J. Parallel Distrib. Comput.
44(1), 1997) with full-duplex ports that take one chunk at a time, and a core that never blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.transport.errors import UserError


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
