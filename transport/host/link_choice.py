"""The choice of the link between two processes, and of a process's RDMA device, with reasons (pure).

Shared memory within a host; between hosts RDMA where both have it, else TCP over the best interface. Each
choice comes with its reason, and with what would make a better one possible. Ranks and `zbmd-node doctor`
both ask here, so they say the same.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv6Address
from typing import Final, TypeVar

from zbmd.transport.errors import UserError
from zbmd.transport.host.topology import HostFacts
from zbmd.transport.host.topology.devices import Gid, RdmaDevice, RdmaPort
from zbmd.transport.host.topology.interfaces import Interface, InterfaceKind
from zbmd.transport.host.topology.kernel_files import PciLocation

# ---- which RDMA device a process uses for other hosts, or why it uses none

T = TypeVar("T")

DEVICES_VARIABLE: Final = "ZBMD_RDMA_DEVICES"
"""The RDMA devices that may be used, with commas between them: DEVICE, or DEVICE@ADDRESS."""
ETHERNET: Final = "Ethernet"
ROCE_V2: Final = "RoCE v2"
LOCKED_BYTES_MIN: Final = 96 << 20
"""Bytes that a rank locks with an arena and an inbox of the usual sizes, and a few links."""
LINK_LOCKED_BYTES: Final = 1 << 20
"""Of each link: its buffers, on both of its queue pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedDevice:
    """A device that the user admits. address: of its interface, None for any."""

    name: str
    address: str | None = None


def parse_wanted_devices(text: str) -> tuple[WantedDevice, ...]:
    """The devices in `mlx5_0,mlx5_1@10.0.1.1`; none in an empty text. Raises `UserError`."""
    found: list[WantedDevice] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, at, address = part.partition("@")
        try:
            given = str(ipaddress.ip_address(address)) if at else None
        except ValueError:
            given = ""
        if not name or given == "":
            raise UserError(
                f"{DEVICES_VARIABLE}={text!r}: {part!r} is no device. Give names such as mlx5_0, or "
                "mlx5_0@10.0.0.1 for the one address of it to use, with commas between them."
            )
        found.append(WantedDevice(name=name, address=given))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPath:
    """A port that can be used. address: what picks its GID when the device is opened, None for any."""

    device: str
    port: int
    link_layer: str
    rate_gbps: float
    near: bool
    """To the process's memory."""
    address: str | None

    def __str__(self) -> str:
        """Such as `mlx5_0 (Ethernet, 400 Gbit/s)`."""
        return f"{self.device} ({self.link_layer}, {self.rate_gbps:g} Gbit/s)"


def rdma_paths(host: HostFacts, wanted: Sequence[WantedDevice] = ()) -> tuple[RdmaPath, ...]:
    """Return the usable ports, best first: the fastest, then the nearest, then by name, so that all agree."""
    found = [path for device in host.rdma_devices for path in _paths(device, host.numa_node, wanted)]
    return tuple(sorted(found, key=lambda path: (-path.rate_gbps, not path.near)))


def why_no_rdma(
    host: HostFacts, wanted: Sequence[WantedDevice] = (), *, locked_bytes: int = LOCKED_BYTES_MIN
) -> str | None:
    """Why `host` uses no RDMA, with what helps; None if it can. locked_bytes: what its process locks."""
    if not host.rdma_devices:
        return f"{host.name} has no RDMA device"
    if not any(_admitted(device, wanted) for device in host.rdma_devices):
        known = ", ".join(device.name for device in host.rdma_devices)
        return f"{DEVICES_VARIABLE} admits none of the RDMA devices of {host.name} ({known})"
    if host.verbs_missing is not None:
        return f"{host.name} has an RDMA device, but {host.verbs_missing}"
    if not rdma_paths(host, wanted):
        return "; ".join(dict.fromkeys(_unfit(host, wanted)))
    limit = host.locked_bytes_max
    if limit is not None and limit < locked_bytes:
        return (
            f"a process of {host.name} may lock {limit >> 10} KiB and RDMA needs {-(-locked_bytes >> 10)}: "
            "raise it with ulimit -l unlimited"
        )
    return None


def share_of(paths: Sequence[RdmaPath], turn: int) -> RdmaPath:
    """The path of the process with this number on its host: those that are equally good are taken in turn."""
    best = [path for path in paths if (path.rate_gbps, path.near) == (paths[0].rate_gbps, paths[0].near)]
    return best[turn % len(best)]


def choose_address(device: str, address: str | None, usable: Iterable[tuple[IPv6Address, T]]) -> T:
    """Return what goes with the address to use of `device`: one that is not link-local, if there is one.

    address: the one that is asked for, or None for any. usable: the GIDs of active ports that `fits` admits.
    Raises `UserError` if there is none, or none with `address`.
    """
    wanted = None if address is None else ipaddress.ip_address(address)
    found = [
        (gid.is_link_local, each)
        for gid, each in usable
        if wanted is None or wanted in (gid, gid.ipv4_mapped)
    ]
    if not found:
        which = f" with the address {address}" if address else ""
        raise UserError(f"the RDMA device {device} has no active port{which}.")
    return min(found, key=lambda each: each[0])[1]


def fits(gid: Gid, port: RdmaPort) -> bool:
    """Whether the address can be used: over Ethernet only RoCE v2 passes routers, and is what we speak."""
    return port.link_layer != ETHERNET or gid.kind == ROCE_V2


def _admitted(device: RdmaDevice, wanted: Sequence[WantedDevice]) -> list[str | None]:
    """The addresses of it that the user admits: [None] for any, none if it is not admitted."""
    if not wanted:
        return [None]
    return [each.address for each in wanted if each.name == device.name]


def _paths(device: RdmaDevice, numa_node: int | None, wanted: Sequence[WantedDevice]) -> Iterator[RdmaPath]:
    for asked in _admitted(device, wanted):
        for port in device.ports:
            addresses = sorted(_addresses(port), key=lambda each: ipaddress.ip_address(each).is_link_local)
            if asked is not None:
                addresses = [each for each in addresses if each == asked]
            if not port.active or (not addresses and (asked is not None or port.link_layer == ETHERNET)):
                continue
            yield RdmaPath(
                device=device.name,
                port=port.number,
                link_layer=port.link_layer,
                rate_gbps=port.rate_gbps or 0.0,
                near=_near(device.place, numa_node),
                address=addresses[0] if addresses else None,
            )


def _addresses(port: RdmaPort) -> Iterator[str]:
    """The addresses that peers can use, as IP addresses."""
    for gid in port.gids:
        if fits(gid, port):
            try:
                parsed = ipaddress.IPv6Address(gid.gid)
            except ValueError:
                continue
            yield str(parsed.ipv4_mapped or parsed)


def _unfit(host: HostFacts, wanted: Sequence[WantedDevice]) -> Iterator[str]:
    """Yield the fault of each port that the user admits."""
    for device in host.rdma_devices:
        for asked in _admitted(device, wanted):
            for port in device.ports:
                name = f"port {port.number} of {device.name} on {host.name}"
                if not port.active:
                    yield (
                        f"{name} is {port.state}: check its cable, its driver and, for InfiniBand, the "
                        "subnet manager"
                    )
                elif asked is not None:
                    yield f"{name} has no usable address {asked}: look at ip address and rdma link"
                else:
                    kinds = ", ".join(sorted({gid.kind or "unknown" for gid in port.gids})) or "none"
                    yield (
                        f"{name} has no {ROCE_V2} address (it has: {kinds}): give its interface an IP address"
                    )


INTERFACES_VARIABLE: Final = "ZBMD_SOCKET_IFNAME"


class Transport(Enum):
    """The carrier of a link."""

    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFilter:
    """The user's choice of interfaces. names: prefixes, or whole names with `exact`."""

    names: tuple[str, ...] = ()
    exact: bool = False
    excluding: bool = False

    def admits(self, name: str) -> bool:
        """Whether the user lets this interface be used."""
        if not self.names:
            return True
        named = name in self.names if self.exact else name.startswith(self.names)
        return named is not self.excluding

    def __str__(self) -> str:
        """As the user has written it."""
        return "^" * self.excluding + "=" * self.exact + ",".join(self.names)


def parse_interface_filter(text: str) -> InterfaceFilter:
    """`eth,ib` for names that begin so, `=eth0` for this one, `^docker` for all but those.

    The spelling is that of NCCL_SOCKET_IFNAME. Raises `UserError` if it names nothing.
    """
    rest = text.strip()
    excluding, rest = rest.startswith("^"), rest.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    names = tuple(name for part in rest.split(",") if (name := part.strip()))
    if not names:
        raise UserError(
            f"{INTERFACES_VARIABLE}={text!r} names no interface. Give one such as eth0, the beginning of "
            "several such as eth, =eth0 for exactly that one, or ^docker for all but those."
        )
    return InterfaceFilter(names=names, exact=exact, excluding=excluding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The options for a link. interfaces and rdma_devices: those that the user admits, all by default."""

    interfaces: InterfaceFilter = InterfaceFilter()
    peer_interfaces: InterfaceFilter = InterfaceFilter()
    rdma_devices: tuple[WantedDevice, ...] = ()
    peer_rdma_devices: tuple[WantedDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChoice:
    """The decision and its reason. device and peer_device: an interface or RDMA device, None for shm.

    better: what could be done to get a faster link, one sentence each. no_rdma: of a TCP link, why it is not
    RDMA, in a line; empty if that is not known yet.
    """

    transport: Transport
    reason: str
    device: str | None = None
    peer_device: str | None = None
    better: tuple[str, ...] = ()
    no_rdma: str = ""


def choose_link(a: HostFacts, b: HostFacts, capabilities: Capabilities | None = None) -> LinkChoice:
    """The link between a process of `a` and one of `b`; both sides come to the same transport.

    Raises `UserError` if no interface leads from one to the other.
    """
    can = Capabilities() if capabilities is None else capabilities
    better: list[str] = []
    same_kernel = a.boot_id == b.boot_id != ""
    if same_kernel:
        apart = _apart(a, b)
        if apart is None:
            return LinkChoice(transport=Transport.SHM, reason="one host, one user: memory is shared")
        better.append(apart)
    rdma = _rdma(a, b, can)
    if not isinstance(rdma, str):
        ours, theirs = rdma
        return LinkChoice(
            transport=Transport.RDMA,
            reason=f"both hosts have RDMA: {ours} and {theirs}",
            device=ours.device,
            peer_device=theirs.device,
            better=tuple(better),
        )
    if a.rdma_devices and b.rdma_devices:
        better.append(rdma)
    return dataclasses.replace(_tcp(a, b, can, better), no_rdma=rdma)


def rank_interfaces(
    interfaces: Sequence[Interface], wanted: InterfaceFilter, numa_node: int | None = None
) -> list[Interface]:
    """Those that can be used to reach another host, best first.

    Up, with an address, and admitted by the user; hardware before what is virtual, networks of containers
    and loopback last; then the fastest; then the one near `numa_node`; then by name, so that all agree.
    """
    usable = [each for each in interfaces if each.up and each.addresses and wanted.admits(each.name)]
    return sorted(
        usable,
        key=lambda each: (
            _CLASS[each.kind],
            all(map(_is_link_local, each.addresses)),
            -(each.speed_mbps or 0),
            not _near(each.place, numa_node),
            each.name,
        ),
    )


_CLASS: Final = {
    InterfaceKind.HARDWARE: 0,
    InterfaceKind.AGGREGATE: 0,
    InterfaceKind.VIRTUAL: 1,
    InterfaceKind.CONTAINERS: 2,
    InterfaceKind.LOOPBACK: 3,
}


def _near(place: PciLocation | None, numa_node: int | None) -> bool:
    return numa_node is not None and place is not None and place.numa_node == numa_node


def _apart(a: HostFacts, b: HostFacts) -> str | None:
    """Why two processes under one kernel cannot share memory; None if they can."""
    if a.uid != b.uid:
        return f"the processes belong to users {a.uid} and {b.uid}; as one user they would share memory"
    if a.namespaces != b.namespaces:
        return (
            "the processes are in different containers of one host; with one network and one pid namespace "
            "(docker run --network host --pid host) they would share memory"
        )
    return None


# --- RDMA -----------------------------------------------------------------------------------------------


def _rdma(a: HostFacts, b: HostFacts, can: Capabilities) -> tuple[RdmaPath, RdmaPath] | str:
    """The ports of both sides that make the fastest link; or why there is none, in a line."""
    why = [each for each in (why_no_rdma(a, can.rdma_devices), why_no_rdma(b, can.peer_rdma_devices)) if each]
    if why:
        return "; ".join(why)
    ours, theirs = rdma_paths(a, can.rdma_devices), rdma_paths(b, can.peer_rdma_devices)
    pairs = [
        (mine, next(each for each in theirs if each.link_layer == mine.link_layer))
        for mine in ours
        if any(each.link_layer == mine.link_layer for each in theirs)
    ]
    if not pairs:
        return f"the RDMA devices of {a.name} and {b.name} speak different link layers"
    return max(pairs, key=lambda pair: (min(pair[0].rate_gbps, pair[1].rate_gbps), pair[0].link_layer))


# --- TCP ------------------------------------------------------------------------------------------------


def _tcp(a: HostFacts, b: HostFacts, can: Capabilities, better: list[str]) -> LinkChoice:
    within = _one_network(a, b)
    ours, theirs = (
        _usable_interfaces(a, can.interfaces, within=within),
        _usable_interfaces(b, can.peer_interfaces, within=within),
    )
    # For each family both sides' best interface; of two families the one with the better interfaces.
    found = [
        (ours.index(mine) + theirs.index(other), family, mine, other)
        for family in (4, 6)
        for mine in [next((each for each in ours if family in _families(each)), None)]
        for other in [next((each for each in theirs if family in _families(each)), None)]
        if mine is not None and other is not None
    ]
    if not found:
        raise UserError(
            f"no interface leads from {a.name} ({_names(ours)}) to {b.name} ({_names(theirs)}): one has only "
            "IPv4 and the other only IPv6. Give both an address of one kind, or name other interfaces in "
            f"{INTERFACES_VARIABLE}."
        )
    _, _, mine, other = min(found, key=lambda each: each[:2])
    return LinkChoice(
        transport=Transport.TCP,
        reason=_tcp_reason(a, b, mine, ours, can),
        device=mine.name,
        peer_device=other.name,
        better=(*better, *passed_over(a, mine)),
    )


def _one_network(a: HostFacts, b: HostFacts) -> bool:
    """Whether the two share a network namespace, so that loopback leads from one to the other."""
    return a.boot_id == b.boot_id != "" and a.namespaces[:1] == b.namespaces[:1]


def _usable_interfaces(host: HostFacts, wanted: InterfaceFilter, *, within: bool) -> list[Interface]:
    """Return the interfaces that lead out of the host, best first; `within` one namespace, loopback first."""
    ranked = rank_interfaces(host.interfaces, wanted, host.numa_node)
    loopback = [each for each in ranked if each.kind is InterfaceKind.LOOPBACK]
    others = [each for each in ranked if each.kind is not InterfaceKind.LOOPBACK]
    usable = loopback + others if within else others
    if usable:
        return usable
    known = ", ".join(f"{each.name} ({_why_not(each)})" for each in host.interfaces) or "none"
    chosen = f" that {INTERFACES_VARIABLE}={wanted} admits" if wanted.names else ""
    raise UserError(
        f"{host.name} has no interface{chosen} that is up, has an address and leads to other hosts. "
        f"It has: {known}."
    )


def _why_not(interface: Interface) -> str:
    if not interface.up:
        return "down"
    return "up" if interface.addresses else "without an address"


def _tcp_reason(
    a: HostFacts, b: HostFacts, mine: Interface, ours: Sequence[Interface], can: Capabilities
) -> str:
    where = "one host, but memory cannot be shared" if a.boot_id == b.boot_id != "" else "different hosts"
    rivals = [each for each in ours if each is not mine and _CLASS[each.kind] == _CLASS[mine.kind]]
    speed_mbps = max((each.speed_mbps or 0 for each in rivals), default=0)
    if can.interfaces.names:
        why = f"{INTERFACES_VARIABLE}={can.interfaces} admits it"
    elif mine.kind is InterfaceKind.LOOPBACK:
        why = "it leads to every process of this host"
    elif not rivals:
        why = "the only one of its kind that is up"
    elif (mine.speed_mbps or 0) > speed_mbps:
        why = "the fastest that is up"
    elif _near(mine.place, a.numa_node) and not any(_near(each.place, a.numa_node) for each in rivals):
        why = f"the nearest to NUMA node {a.numa_node}"
    else:
        why = "the first of several alike"
    return f"{where}; {interface_words(mine)}: {why}"


def interface_words(interface: Interface) -> str:
    """Such as `eth0 (25 Gbit/s, 192.0.2.1)`."""
    speed = "speed unknown" if interface.speed_mbps is None else f"{interface.speed_mbps / 1000:g} Gbit/s"
    address = interface.addresses[0] if interface.addresses else "no address"
    return f"{interface.name} ({speed}, {address})"


def passed_over(host: HostFacts, mine: Interface) -> list[str]:
    """Faster hardware that the user's word or the peer's addresses have kept out."""
    if mine.kind is InterfaceKind.LOOPBACK:
        return []
    return [
        f"{interface_words(each)} is faster; {INTERFACES_VARIABLE}={each.name} on both sides uses it, if its "
        "network leads to the peer"
        for each in rank_interfaces(host.interfaces, InterfaceFilter(), host.numa_node)
        if _CLASS[each.kind] == 0 and (each.speed_mbps or 0) > (mine.speed_mbps or 0)
    ]


def _families(interface: Interface) -> set[int]:
    """4 and 6, as far as its addresses can be reached from another host."""
    return {
        ipaddress.ip_address(each).version for each in interface.addresses if not _is_link_local(each)
    } or {6 for each in interface.addresses if ":" in each}


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local


def _names(interfaces: Sequence[Interface]) -> str:
    return ", ".join(f"{each.name}: {' '.join(each.addresses)}" for each in interfaces)
