"""The network interfaces: what they are, whether they are up, how fast, where they sit, their addresses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zbmd.transport.host.topology.kernel_files import entries, read_fields, read_int, read_text
from zbmd.transport.host.topology.netlink import Addresses, interface_addresses
from zbmd.transport.host.topology.pci import Place, link_name, place_of

_IFF_UP, _IFF_LOOPBACK, _IFF_POINT_TO_POINT, _IFF_RUNNING = 0x1, 0x8, 0x10, 0x40
_INFINIBAND_TYPE = 32  # ARPHRD_INFINIBAND
_CONTAINER_NETWORKS = ("docker", "br-", "virbr", "veth", "cni", "cali", "flannel", "lxc", "lxd", "podman")


class InterfaceKind(Enum):
    """What an interface is, best first for reaching another host."""

    HARDWARE = "hardware"
    AGGREGATE = "bond or vlan"
    VIRTUAL = "virtual"  # a container's own end, a tunnel
    CONTAINERS = "network of containers"  # leads to containers of this host only
    LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One interface. speed_mbps: None if it does not say; place: None unless it is a PCI device's.

    addresses: IPv4 first, then IPv6, link-local ones last.
    """

    name: str
    kind: InterfaceKind
    up: bool
    speed_mbps: int | None
    mtu: int
    driver: str | None
    infiniband: bool
    place: Place | None
    addresses: tuple[str, ...]


def read_interfaces(root: Path = Path("/"), addresses: Addresses | None = None) -> tuple[Interface, ...]:
    """The interfaces in `root`'s sysfs; addresses: by index, by default the running kernel's."""
    by_index = interface_addresses() if addresses is None else addresses
    return tuple(
        _read(path, by_index) for path in entries(root / "sys/class/net") if (path / "flags").exists()
    )


def _read(path: Path, addresses: Addresses) -> Interface:
    flags = read_int(path / "flags", 0) or 0
    # Some drivers tell no carrier state: theirs is "unknown", and being up must do.
    running = read_text(path / "operstate") in ("up", "unknown", None) and read_int(path / "carrier") != 0
    speed_mbps = read_int(path / "speed")
    return Interface(
        name=path.name,
        kind=_kind(path, flags),
        up=bool(flags & _IFF_UP) and running,
        speed_mbps=speed_mbps if speed_mbps is not None and 0 < speed_mbps < 2**31 else None,
        mtu=read_int(path / "mtu") or 0,
        driver=link_name(path / "device/driver"),
        infiniband=read_int(path / "type") == _INFINIBAND_TYPE,
        place=place_of(path / "device") if (path / "device").exists() else None,
        addresses=addresses.get(read_int(path / "ifindex") or 0, ()),
    )


def _kind(path: Path, flags: int) -> InterfaceKind:
    if flags & _IFF_LOOPBACK:
        return InterfaceKind.LOOPBACK
    if path.name.startswith(_CONTAINER_NETWORKS):
        return InterfaceKind.CONTAINERS
    if (path / "device").exists():
        return InterfaceKind.HARDWARE
    if (path / "bonding").exists() or read_fields(path / "uevent", "=").get("DEVTYPE") in ("vlan", "bond"):
        return InterfaceKind.AGGREGATE
    return InterfaceKind.VIRTUAL
