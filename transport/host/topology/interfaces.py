"""The network interfaces: what they are, whether they are up, how fast, where they sit, their addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from zbmd.transport.host.topology.kernel_files import (
    PciLocation,
    entries,
    link_name,
    place_of,
    read_fields,
    read_int,
    read_text,
)

# The IP addresses of this machine's interfaces, from the kernel by rtnetlink (RFC 3549, rtnetlink(7)).

_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_UNUSABLE: Final = 0x08 | 0x40 | 0x20
"""IFA_F_DADFAILED, IFA_F_TENTATIVE, IFA_F_DEPRECATED: no peer should get such an address."""

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type

ANSWER_BYTES_MAX: Final = 1 << 16
ANSWERS_MAX: Final = 1024
ANSWER_S_MAX: Final = 1.0

Addresses = Mapping[int, tuple[str, ...]]
"""By the interface's index: IPv4 first, then IPv6; a link-local one without its zone."""


def interface_addresses() -> dict[int, tuple[str, ...]]:
    """The addresses that can be used, by the interface's index; empty where the kernel does not say."""
    found: dict[int, list[str]] = {}
    with contextlib.suppress(OSError):
        for message in _dump():
            for index, address in parse_addresses(message):
                found.setdefault(index, []).append(address)
    return {index: tuple(sorted(each, key=_version)) for index, each in found.items()}


def parse_addresses(data: bytes) -> Iterator[tuple[int, str]]:
    """Each (interface index, address) of RTM_NEWADDR messages; what does not parse ends the iteration."""
    for kind, body in _messages(data):
        if kind != _RTM_NEWADDR or len(body) < _ADDRESS.size:
            continue
        _, _, flags, _, index = _ADDRESS.unpack_from(body)
        attributes = dict(_attributes(body[_ADDRESS.size :]))
        if len(long_flags := attributes.get(_IFA_FLAGS, b"")) == 4:
            flags = int.from_bytes(long_flags, "little" if _LITTLE else "big")
        # On a point-to-point interface IFA_ADDRESS is the peer's; IFA_LOCAL is always ours.
        packed = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b""))
        if len(packed) in (4, 16) and not flags & _UNUSABLE:
            yield index, str(ipaddress.ip_address(packed))


_LITTLE: Final = struct.pack("=H", 1) == b"\x01\x00"


def _version(address: str) -> tuple[int, bool]:
    parsed = ipaddress.ip_address(address)
    return parsed.version, parsed.is_link_local


def _dump() -> Iterator[bytes]:
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
    ) as sock:
        sock.settimeout(ANSWER_S_MAX)
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        flags = _NLM_F_REQUEST | _NLM_F_DUMP
        sock.send(_HEADER.pack(_HEADER.size + len(body), _RTM_GETADDR, flags, 1, 0) + body)
        for _ in range(ANSWERS_MAX):
            data = sock.recv(ANSWER_BYTES_MAX)
            yield data
            if any(kind in (_NLMSG_DONE, _NLMSG_ERROR) for kind, _ in _messages(data)):
                return


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, at)
        if not _HEADER.size <= length <= len(data) - at:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += _aligned(length)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if not _ATTRIBUTE.size <= length <= len(data) - at:
            return
        yield kind & 0x3FFF, data[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


_IFF_UP, _IFF_LOOPBACK, _IFF_POINT_TO_POINT, _IFF_RUNNING = 0x1, 0x8, 0x10, 0x40
_CONTAINER_NETWORKS = ("docker", "br-", "virbr", "veth", "cni", "cali", "flannel", "lxc", "lxd", "podman")


class InterfaceKind(Enum):
    """The kind of an interface, best first for reaching another host."""

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
    place: PciLocation | None
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
