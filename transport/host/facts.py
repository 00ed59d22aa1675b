"""Facts of a process's own host, which it sends to a peer so that both choose the same link."""

from __future__ import annotations

import importlib.util
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.transport.host.topology.devices import RdmaDevice, read_rdma_devices, verbs_missing
from zbmd.transport.host.topology.interfaces import Addresses, Interface, read_interfaces
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
