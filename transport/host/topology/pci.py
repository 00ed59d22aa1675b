"""PCI devices, where they sit, and how far two of them are from each other."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zbmd.transport.host.topology.kernel_files import entries, read_int

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Distance(Enum):
    """What lies between two devices, nearest first, by the names of `nvidia-smi topo -m`."""

    SELF = "X"
    PIX = "PIX"  # at most one PCIe bridge or switch
    PXB = "PXB"  # several PCIe bridges, not the host bridge
    PHB = "PHB"  # a PCIe host bridge, within a processor
    NODE = "NODE"  # host bridges of one NUMA node
    SYS = "SYS"  # the link between NUMA nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLocation:
    """Where a device sits. path: the host bridge, then every bridge on the way, then the device itself."""

    path: tuple[str, ...]
    numa_node: int | None

    @property
    def address(self) -> str:
        """Such as `0000:17:00.0`."""
        return self.path[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One device of the bus. `device_class` as in the specification: 0x030200 is a 3D controller."""

    place: PciLocation
    vendor: int
    device: int
    device_class: int
    driver: str | None


def read_pci_devices(root: Path = Path("/")) -> tuple[PciDevice, ...]:
    """Every PCI device that sysfs shows."""
    found: list[PciDevice] = []
    for path in entries(root / "sys/bus/pci/devices"):
        place = place_of(path)
        numbers = [read_int(path / name, 16) for name in ("vendor", "device", "class")]
        vendor, device, device_class = numbers
        if place is None or vendor is None or device is None or device_class is None:
            continue
        found.append(
            PciDevice(
                place=place,
                vendor=vendor,
                device=device,
                device_class=device_class,
                driver=link_name(path / "driver"),
            )
        )
    return tuple(found)


def place_of(path: Path) -> PciLocation | None:
    """The place of the PCI device that `path` (or what it links to) is or belongs to; None if there is none.

    A network device of virtio is a child of a PCI device: the nearest one above counts.
    """
    real = Path(os.path.realpath(path))
    parts = real.parts
    last = max((i for i, part in enumerate(parts) if _ADDRESS.fullmatch(part)), default=None)
    if last is None:
        return None
    first = next((i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), last)
    node = read_int(Path(*parts[: last + 1]) / "numa_node")
    numa_node = node if node is not None and node >= 0 else None
    chain = tuple(part for part in parts[first : last + 1] if part and not part.startswith("virtio"))
    return PciLocation(path=chain, numa_node=numa_node)


def link_name(path: Path) -> str | None:
    """The last part of what a symbolic link points to, such as a driver's name."""
    try:
        return Path(os.readlink(path)).name
    except OSError:
        return None


def distance(a: PciLocation, b: PciLocation) -> Distance:
    """What lies between two devices.

    The bridges that their paths share decide, as in `nvidia-smi topo -m` and NCCL's `pciDistance`: a shared
    switch is PIX, a shared bridge further up PXB, only the host bridge PHB; with different host bridges,
    NODE in one NUMA node and SYS otherwise.
    """
    if a.path == b.path:
        return Distance.SELF
    if a.path[0] != b.path[0]:
        return Distance.NODE if a.numa_node == b.numa_node else Distance.SYS
    shared = 0
    while shared < min(len(a.path), len(b.path)) and a.path[shared] == b.path[shared]:
        shared += 1
    if shared == 1:
        return Distance.PHB
    below = max(len(a.path), len(b.path)) - shared  # the device and, below a switch, its downstream port
    return Distance.PIX if below <= 2 else Distance.PXB
