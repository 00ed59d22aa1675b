"""The accelerators of a machine: NVIDIA's and AMD's, from what their drivers and the PCI bus show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zbmd.transport.host.topology.kernel_files import (
    PciDevice,
    PciLocation,
    entries,
    parse_int,
    read_fields,
    read_pci_devices,
    read_text,
)

NVIDIA, AMD = "NVIDIA", "AMD"
_VENDORS = {0x10DE: NVIDIA, 0x1002: AMD}
_DISPLAY, _ACCELERATOR = 0x03, 0x12
_NAMELESS = {NVIDIA: "NVIDIA GPU", AMD: "AMD GPU"}
_KFD_HEAPS_OF_VRAM = frozenset({"1", "2"})  # FB_PUBLIC and FB_PRIVATE in kfd's heap_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. driver: the kernel's, None if none is bound; usable: whether this container may see it."""

    vendor: str
    model: str
    place: PciLocation
    driver: str | None
    usable: bool
    uuid: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What a vendor's driver says of a GPU."""

    model: str
    uuid: str | None = None
    memory_bytes: int | None = None


def read_gpus(root: Path = Path("/"), devices: tuple[PciDevice, ...] | None = None) -> tuple[Gpu, ...]:
    """The GPUs in the order of their PCI addresses, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    devices: what `read_pci_devices` has found, if it has been asked already.
    """
    known = {NVIDIA: _nvidia(root), AMD: _amd(root)}
    gpus: list[Gpu] = []
    for device in read_pci_devices(root) if devices is None else devices:
        vendor = _VENDORS.get(device.vendor)
        if vendor is None or device.device_class >> 16 not in (_DISPLAY, _ACCELERATOR):
            continue
        said = known[vendor].get(device.place.address)
        gpus.append(
            Gpu(
                vendor=vendor,
                model=said.model if said is not None else f"{_NAMELESS[vendor]} {device.device:04x}",
                place=device.place,
                driver=device.driver,
                usable=said is not None,
                uuid=said.uuid if said is not None else None,
                memory_bytes=said.memory_bytes if said is not None else None,
            )
        )
    return tuple(gpus)


def nvidia_driver_version(root: Path = Path("/")) -> str | None:
    """The version of NVIDIA's kernel module, such as `550.54.15`; None if it is not loaded."""
    for line in (read_text(root / "proc/driver/nvidia/version") or "").splitlines():
        if line.startswith("NVRM version:"):
            return next((w for w in line.split() if w.count(".") and w.replace(".", "").isdecimal()), None)
    return None


def _nvidia(root: Path) -> dict[str, _Known]:
    """By PCI address. A container is shown only the GPUs that it was given."""
    found: dict[str, _Known] = {}
    for folder in entries(root / "proc/driver/nvidia/gpus"):
        fields = read_fields(folder / "information", ":")
        model = fields.get("Model", _NAMELESS[NVIDIA])
        found[folder.name.lower()] = _Known(model=model, uuid=fields.get("GPU UUID"))
    return found


def _amd(root: Path) -> dict[str, _Known]:
    """By PCI address, from kfd's topology, where a cpu is a node too, with `simd_count` 0."""
    found: dict[str, _Known] = {}
    for node in entries(root / "sys/class/kfd/kfd/topology/nodes"):
        properties = read_fields(node / "properties")
        location = parse_int(properties.get("location_id", ""))
        if location is None or properties.get("simd_count", "0") == "0":
            continue
        domain = parse_int(properties.get("domain", "0")) or 0
        bus, slot, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
        banks = [read_fields(bank / "properties") for bank in entries(node / "mem_banks")]
        sizes = [
            parse_int(bank.get("size_in_bytes", "")) or 0
            for bank in banks
            if bank.get("heap_type") in _KFD_HEAPS_OF_VRAM
        ]
        found[f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"] = _Known(
            model=f"{_NAMELESS[AMD]} {read_text(node / 'name') or ''}".strip(),
            uuid=properties.get("unique_id"),
            memory_bytes=sum(sizes) or None,
        )
    return found
