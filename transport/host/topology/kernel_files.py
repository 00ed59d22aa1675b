"""Small readers of the kernel's text files and of PCI devices. What cannot be read is None, never an error.

A file of sysfs may refuse to be read (`speed` of an interface that is down gives EINVAL), and one that is
read on another machine may hold anything: so each reader takes what it can use and leaves the rest.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

# ---- PCI devices, where they sit, and how far two of them are from each other

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Distance(Enum):
    """The bridges between two devices, nearest first, by the names of `nvidia-smi topo -m`."""

    SELF = "X"
    PIX = "PIX"  # at most one PCIe bridge or switch
    PXB = "PXB"  # several PCIe bridges, not the host bridge
    PHB = "PHB"  # a PCIe host bridge, within a processor
    NODE = "NODE"  # host bridges of one NUMA node
    SYS = "SYS"  # the link between NUMA nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLocation:
    """The position of a device. path: the host bridge, every bridge below it, then the device itself."""

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
    """Return the distance between two devices.

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


TEXT_BYTES_MAX: Final = 1 << 20
"""No file that is read here is nearly as large."""
CPUS_MAX: Final = 1 << 16
CLOCK_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
ENTRIES_MAX: Final = 4096
"""Of a folder: more devices than any machine has."""

_CHOSEN: Final = re.compile(r"\[([a-z_]+)\]")


def read_text(path: Path) -> str | None:
    """The file's text without surrounding white space; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(TEXT_BYTES_MAX).decode(errors="replace").strip()
    except (OSError, ValueError):  # a name that another file gave, with a null character, say
        return None


@cache
def clock_counts_ticks() -> bool:
    """Whether the kernel's clock goes by the processor's counter: it found it even, and alike everywhere."""
    return read_text(CLOCK_SOURCE) == "tsc"


def read_int(path: Path, base: int = 10) -> int | None:
    """The number in the file; None if there is none. With base 0 also `0x1f`."""
    return parse_int(read_text(path) or "", base)


def parse_int(text: str, base: int = 10) -> int | None:
    """The number that `text` spells, or None."""
    try:
        return int(text, base)
    except ValueError:
        return None


def read_chosen(path: Path) -> str | None:
    """The word in brackets of `always [madvise] never`; None if there is none."""
    found = _CHOSEN.search(read_text(path) or "")
    return found[1] if found is not None else None


def read_fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """Lines of `key value`, split at the first `separator` (default: white space); others are left out."""
    fields: dict[str, str] = {}
    for line in (read_text(path) or "").splitlines():
        parts = line.strip().split(separator, 1)
        if len(parts) == 2:
            fields[parts[0].strip()] = parts[1].strip()
    return fields


def entries(folder: Path) -> list[Path]:
    """List a folder in natural order (`eth2` before `eth10`); empty if it cannot be read."""
    try:
        found = [path for path, _ in zip(folder.iterdir(), range(ENTRIES_MAX), strict=False)]
    except (OSError, ValueError):
        return []
    return sorted(found, key=lambda path: natural(path.name))


def natural(name: str) -> list[str | int]:
    """A key that sorts the numbers in a name by their value."""
    parts = re.split(r"(\d+)", name)  # text and digits in turn, so keys compare part by part
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def read_cpu_list(path: Path) -> tuple[int, ...]:
    """The numbers in a list such as `0-3,8`; empty if there is no such file."""
    return parse_cpu_list(read_text(path) or "")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers in `0-3,8`, ascending, each below `CPUS_MAX`; parts that are no range are left out."""
    numbers: set[int] = set()
    for part in text.split(","):
        first_text, dash, last_text = part.strip().partition("-")
        first = parse_int(first_text)
        last = parse_int(last_text) if dash else first
        if first is not None and last is not None and 0 <= first <= last < CPUS_MAX:
            numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: tuple[int, ...]) -> str:
    """`0-3,8` for (0, 1, 2, 3, 8); `none` for ()."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"
