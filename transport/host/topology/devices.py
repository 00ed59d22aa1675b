"""GPUs and RDMA devices with their ports, from sysfs and the drivers: what can be known without a library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from zbmd.transport.errors import UserError
from zbmd.transport.host.topology.kernel_files import (
    PciDevice,
    PciLocation,
    entries,
    parse_int,
    place_of,
    read_fields,
    read_int,
    read_pci_devices,
    read_text,
)

# ---- GPUs: NVIDIA's and AMD's, from what their drivers and the PCI bus show

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
    """The facts of a GPU that its vendor's driver reports."""

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
        reported = known[vendor].get(device.place.address)
        gpus.append(
            Gpu(
                vendor=vendor,
                model=reported.model if reported is not None else f"{_NAMELESS[vendor]} {device.device:04x}",
                place=device.place,
                driver=device.driver,
                usable=reported is not None,
                uuid=reported.uuid if reported is not None else None,
                memory_bytes=reported.memory_bytes if reported is not None else None,
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


# ---- RDMA devices by pyverbs, which is imported only when it is asked for
#
# pyverbs belongs to the distribution's rdma-core (`apt install python3-pyverbs`, for the distribution's own
# Python); its source on PyPI builds only against a matching libibverbs.


def verbs_missing() -> str | None:
    """Why pyverbs cannot be used here, in a few words; None if it can."""
    try:
        import_module("pyverbs.device")
    except ImportError as error:
        return str(error)
    return None


def rdma_devices() -> tuple[str, ...]:
    """The names of the RDMA devices, such as `mlx5_0` or `rxe0`; empty if there is none.

    Raises `UserError` if pyverbs is missing, does not fit this Python, or cannot list devices.
    """
    try:
        verbs = import_module("pyverbs.device")
    except ImportError as error:
        raise UserError(
            f"RDMA needs pyverbs, which cannot be imported ({error}). Install the distribution's "
            "python3-pyverbs, or pip install 'zbmd[rdma]' where libibverbs and its headers are."
        ) from error
    try:
        devices: list[Any] = verbs.get_device_list()
    except (OSError, RuntimeError) as error:
        raise UserError(f"the RDMA devices cannot be listed: {error}. Is the driver loaded?") from error
    return tuple(device.name.decode() for device in devices)


GIDS_MAX: Final = 32
"""Of a port; a RoCE port has one for each address, VLAN and version."""
FREE_GIDS_MAX: Final = 64
"""In a row, and a table counts as read: new ones take the first free place, and tables of 1024 have few."""

LOSS_COUNTERS: Final = (
    "packet_seq_err",
    "out_of_sequence",
    "local_ack_timeout_err",
    "rcvd_seq_err",
    "out_of_seq_request",
    "completer_retry_err",
)
"""Of packets that were lost on the way."""
SHORTAGE_COUNTERS: Final = ("out_of_buffer", "rnr_nak_retry_err", "rcvd_rnr_err")
"""Of messages for which no receive was posted."""
COUNTERS: Final = (*LOSS_COUNTERS, *SHORTAGE_COUNTERS, "link_downed")
"""Of a port, those that tell of trouble, as mlx5, rxe and others call them; since the driver was loaded."""
PRIORITIES: Final = 8

_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_EMPTY_GIDS = frozenset(
    {"0000:0000:0000:0000:0000:0000:0000:0000", "fe80:0000:0000:0000:0000:0000:0000:0000"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An address of a port. kind: `IB/RoCE v1` or `RoCE v2`; interface: the one it belongs to, for RoCE."""

    index: int
    gid: str
    kind: str | None
    interface: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port. state: such as ACTIVE or DOWN; link_layer: InfiniBand or Ethernet; rate: in Gbit/s.

    counters: those of `COUNTERS` that its driver has.
    """

    number: int
    state: str
    link_layer: str
    rate_gbps: float | None
    gids: tuple[Gid, ...]
    counters: tuple[tuple[str, int], ...] = ()

    @property
    def active(self) -> bool:
        """Whether it carries traffic."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """One device, such as `mlx5_0`. place: None for one in software; interfaces: its network interfaces.

    board: the vendor's name of the card; ecn: the priorities in which its interfaces answer marks of
    congestion, None if the driver does not tell.
    """

    name: str
    place: PciLocation | None
    firmware: str | None
    interfaces: tuple[str, ...]
    ports: tuple[RdmaPort, ...]
    board: str | None = None
    ecn: tuple[int, ...] | None = None

    @property
    def active(self) -> bool:
        """Whether any of its ports carries traffic."""
        return any(port.active for port in self.ports)


def read_rdma_devices(root: Path = Path("/")) -> tuple[RdmaDevice, ...]:
    """The devices in `root`'s sysfs."""
    return tuple(_device(path, root) for path in entries(root / "sys/class/infiniband"))


def _device(path: Path, root: Path) -> RdmaDevice:
    ports = tuple(
        _port(folder, number)
        for folder in entries(path / "ports")
        if (number := parse_int(folder.name)) is not None
    )
    # A device in software has no hardware of its own: `parent` names the interface it was made on.
    parent = read_text(path / "parent")
    named = [folder.name for folder in entries(path / "device/net")] or ([parent] if parent else [])
    named += [gid.interface for port in ports for gid in port.gids if gid.interface is not None]
    interfaces = tuple(dict.fromkeys(named))
    return RdmaDevice(
        name=path.name,
        place=place_of(path / "device") if (path / "device").exists() else None,
        firmware=read_text(path / "fw_ver") or None,
        interfaces=interfaces,
        ports=ports,
        board=read_text(path / "board_id") or None,
        ecn=_ecn(root, interfaces),
    )


def _ecn(root: Path, interfaces: tuple[str, ...]) -> tuple[int, ...] | None:
    """As NVIDIA's own driver tells it; the kernel's does so by debugfs, which is root's."""
    folders = [root / "sys/class/net" / name / "ecn/roce_np/enable" for name in interfaces]
    found = [(number, read_int(folder / str(number))) for folder in folders for number in range(PRIORITIES)]
    if all(value is None for _, value in found):
        return None
    return tuple(sorted({number for number, value in found if value}))


def _port(folder: Path, number: int) -> RdmaPort:
    state = (read_text(folder / "state") or "").rpartition(":")[2].strip()  # "4: ACTIVE"
    rate = _RATE.match(read_text(folder / "rate") or "")
    return RdmaPort(
        number=number,
        state=state or "unknown",
        link_layer=read_text(folder / "link_layer") or "unknown",
        rate_gbps=float(rate[1]) if rate is not None else None,
        gids=_gids(folder),
        counters=tuple(
            (name, value)
            for name in COUNTERS
            for value in [read_int(folder / "hw_counters" / name), read_int(folder / "counters" / name)]
            if value is not None
        ),
    )


def _gids(folder: Path) -> tuple[Gid, ...]:
    found: list[Gid] = []
    free = 0
    for path in entries(folder / "gids"):
        gid, index = read_text(path), parse_int(path.name)
        free += 1
        if free > FREE_GIDS_MAX:
            break
        if gid is None or index is None or gid in _EMPTY_GIDS:
            continue
        free = 0
        attributes = folder / "gid_attrs"
        found.append(
            Gid(
                index=index,
                gid=gid,
                kind=read_text(attributes / "types" / path.name),
                interface=read_text(attributes / "ndevs" / path.name),
            )
        )
        if len(found) == GIDS_MAX:
            break
    return tuple(found)
