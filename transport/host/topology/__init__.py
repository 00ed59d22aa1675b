"""The parts of this machine: cores, memory nodes, GPUs, network interfaces, RDMA devices; their distances.

`HostFacts` are what a process sends of its host to a peer, so that both choose the same link.

Every reader takes a `root`, where `proc` and `sys` are mounted, so that any machine can be read from a tree
of files. What the kernel does not tell is None or empty, never an error.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.transport.host.topology.cpus import Cpus, NumaNode, read_cpus, read_numa_nodes, read_pages
from zbmd.transport.host.topology.cpus import HostPages as HostPages
from zbmd.transport.host.topology.devices import Gpu as Gpu
from zbmd.transport.host.topology.devices import RdmaDevice as RdmaDevice
from zbmd.transport.host.topology.devices import RdmaPort as RdmaPort
from zbmd.transport.host.topology.devices import nvidia_driver_version as nvidia_driver_version
from zbmd.transport.host.topology.devices import read_gpus, read_rdma_devices, verbs_missing
from zbmd.transport.host.topology.interfaces import Addresses, read_interfaces
from zbmd.transport.host.topology.interfaces import Interface as Interface
from zbmd.transport.host.topology.interfaces import InterfaceKind as InterfaceKind
from zbmd.transport.host.topology.kernel_files import Distance as Distance
from zbmd.transport.host.topology.kernel_files import PciLocation as PciLocation
from zbmd.transport.host.topology.kernel_files import distance as distance
from zbmd.transport.host.topology.kernel_files import link_name, parse_int, read_fields, read_text

INSTALL_VERBS: Final = "apt install python3-pyverbs"
CAP_IPC_LOCK: Final = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One process on its host.

    boot_id: of the running kernel; namespaces: which networks and processes it can see, so containers of one
    host differ; numa_node: where its memory and devices are, None if it may run anywhere; verbs_missing: what
    of the libraries for RDMA is missing, None if nothing is; locked_bytes_max: what a process may lock, None
    without a limit.
    """

    name: str
    boot_id: str
    namespaces: tuple[str, ...]
    uid: int
    numa_node: int | None = None
    interfaces: tuple[Interface, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    verbs_missing: str | None = None
    locked_bytes_max: int | None = None


def read_host_facts(
    root: Path = Path("/"), *, addresses: Addresses | None = None, numa_node: int | None = None
) -> HostFacts:
    """The facts of this process; addresses: see `read_interfaces`. pyverbs is imported only for a device."""
    devices = read_rdma_devices(root)
    return HostFacts(
        name=socket.gethostname(),
        boot_id=read_text(root / "proc/sys/kernel/random/boot_id") or "",
        # A robust futex holds a thread's number, which means nothing in another pid namespace; and an
        # abstract socket is found only within the network namespace.
        namespaces=tuple(link_name(root / "proc/self/ns" / kind) or "" for kind in ("net", "pid")),
        uid=os.getuid(),
        numa_node=numa_node,
        interfaces=read_interfaces(root, addresses),
        rdma_devices=devices,
        verbs_missing=libraries_missing() if devices else None,
        locked_bytes_max=locked_bytes_max(root),
    )


def libraries_missing() -> str | None:
    """What RDMA lacks in this process, and how to get it; None if nothing."""
    missing = verbs_missing()
    if missing is not None:
        return f"pyverbs is missing: {INSTALL_VERBS} ({missing})"
    if importlib.util.find_spec("zbmd.transport.rdma.native._rdma") is None:
        return "zbmd was built without libibverbs: apt install libibverbs-dev, then install zbmd again"
    return None


def locked_bytes_max(root: Path = Path("/")) -> int | None:
    """The bytes that this process may lock; None without a limit, as for who has CAP_IPC_LOCK."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = parse_int(read_fields(root / "proc/self/status", ":").get("CapEff", ""), 16) or 0
    return None if soft == resource.RLIM_INFINITY or capabilities >> CAP_IPC_LOCK & 1 else soft


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
