"""What this machine is made of: cores, memory nodes, GPUs, network interfaces, RDMA devices, and how near
they are to each other.

Every reader takes a `root`, where `proc` and `sys` are mounted, so that any machine can be read from a tree
of files. What the kernel does not tell is None or empty, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zbmd.transport.host.topology.cpus import (
    Cpus,
    HostPages,
    NumaNode,
    read_cpus,
    read_numa_nodes,
    read_pages,
)
from zbmd.transport.host.topology.devices import (
    Gpu,
    RdmaDevice,
    RdmaPort,
    nvidia_driver_version,
    read_gpus,
    read_rdma_devices,
)
from zbmd.transport.host.topology.interfaces import Addresses, Interface, InterfaceKind, read_interfaces
from zbmd.transport.host.topology.kernel_files import Distance, PciLocation, distance

__all__ = [
    "Affinity",
    "Distance",
    "Gpu",
    "Interface",
    "InterfaceKind",
    "HostPages",
    "PciLocation",
    "RdmaDevice",
    "RdmaPort",
    "Topology",
    "affinities",
    "distance",
    "nvidia_driver_version",
    "read_topology",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One machine."""

    cpus: Cpus
    numa_nodes: tuple[NumaNode, ...]
    pages: HostPages
    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]
    rdma_devices: tuple[RdmaDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """The distance of a GPU from a network device."""

    gpu: str
    device: str
    distance: Distance


def read_topology(root: Path = Path("/"), *, addresses: Addresses | None = None) -> Topology:
    """The machine whose `proc` and `sys` are in `root`; addresses: see `read_interfaces`."""
    return Topology(
        cpus=read_cpus(root),
        numa_nodes=read_numa_nodes(root),
        pages=read_pages(root),
        gpus=read_gpus(root),
        interfaces=read_interfaces(root, addresses),
        rdma_devices=read_rdma_devices(root),
    )


def affinities(topology: Topology) -> tuple[Affinity, ...]:
    """Each GPU (`gpu0`, by PCI address) with each network device in hardware, an RDMA one by its own name."""
    carried = {name for device in topology.rdma_devices for name in device.interfaces}
    places = [(device.name, device.place) for device in topology.rdma_devices]
    places += [(each.name, each.place) for each in topology.interfaces if each.name not in carried]
    return tuple(
        Affinity(gpu=f"gpu{number}", device=name, distance=distance(gpu.place, place))
        for number, gpu in enumerate(topology.gpus)
        for name, place in places
        if place is not None
    )
