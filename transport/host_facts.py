"""What a process knows of its own host, and tells a peer so that both choose the same link."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from zbmd.transport.kernel_files import read_text
from zbmd.transport.rdma_devices import verbs_missing
from zbmd.transport.topology.interfaces import Interface, read_interfaces
from zbmd.transport.topology.netlink import Addresses
from zbmd.transport.topology.pci import link_name
from zbmd.transport.topology.rdma import RdmaDevice, read_rdma_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One process on its host.

    boot_id: of the running kernel; namespaces: which networks and processes it can see, so containers of one
    host differ; numa_node: where its memory and devices are, None if it may run anywhere; verbs_missing: why
    RDMA cannot be used although a device may be there, None if it can.
    """

    name: str
    boot_id: str
    namespaces: tuple[str, ...]
    uid: int
    numa_node: int | None = None
    interfaces: tuple[Interface, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    verbs_missing: str | None = None


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
        verbs_missing=verbs_missing() if devices else None,
    )
