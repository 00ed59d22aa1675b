"""Which link two processes use, and why (pure).

Shared memory within a host; between hosts RDMA where both have it, else TCP over the best interface. Each
choice comes with its reason, and with what would make a better one possible.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from zbmd.transport.errors import UserError
from zbmd.transport.host_facts import HostFacts
from zbmd.transport.topology.interfaces import Interface, InterfaceKind
from zbmd.transport.topology.pci import Place
from zbmd.transport.topology.rdma import RdmaDevice

INTERFACES_VARIABLE: Final = "ZBMD_SOCKET_IFNAME"
INSTALL_VERBS: Final = "apt install python3-pyverbs"


class Transport(Enum):
    """What carries a link."""

    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"


LINKS_BUILT: Final = frozenset({Transport.SHM, Transport.TCP})
"""The links that this version has; the others are chosen once it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFilter:
    """Which interfaces may be used, as the user says. names: prefixes, or whole names with `exact`."""

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
    """What may be chosen. built: the links of this version; interfaces: those that the user admits."""

    built: frozenset[Transport] = LINKS_BUILT
    interfaces: InterfaceFilter = InterfaceFilter()
    peer_interfaces: InterfaceFilter = InterfaceFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChoice:
    """The decision and its reason. device and peer_device: an interface or RDMA device, None for shm.

    better: what could be done to get a faster link, one sentence each.
    """

    transport: Transport
    reason: str
    device: str | None = None
    peer_device: str | None = None
    better: tuple[str, ...] = ()


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
    layer = _common_layer(a, b)
    if layer is not None:
        ours, theirs = _best_device(a, layer), _best_device(b, layer)
        missing = list(_rdma_missing(a, b, can))
        if not missing:
            return LinkChoice(
                transport=Transport.RDMA,
                reason=f"both hosts have RDMA: {_words(ours, layer)} and {_words(theirs, layer)}",
                device=ours.name,
                peer_device=theirs.name,
                better=tuple(better),
            )
        better += missing
    elif not same_kernel:
        better += _ports_down(a, b)
    return _tcp(a, b, can, better)


def choose_between(host: str, peer_host: str) -> LinkChoice:
    """The link between processes of two hosts of which no more than the names is known.

    Hosts get their names so that processes which can share memory are on one.
    """
    if host == peer_host:
        return LinkChoice(transport=Transport.SHM, reason="one host: memory is shared")
    return LinkChoice(transport=Transport.TCP, reason=f"different hosts, {host!r} and {peer_host!r}")


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


def _near(place: Place | None, numa_node: int | None) -> bool:
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


def _common_layer(a: HostFacts, b: HostFacts) -> str | None:
    """The link layer on which both sides have an active port, the faster one of two, or None."""
    return max(
        _layers(a) & _layers(b),
        key=lambda layer: (min(_host_gbps(a, layer), _host_gbps(b, layer)), layer),
        default=None,
    )


def _layers(host: HostFacts) -> set[str]:
    return {port.link_layer for device in host.rdma_devices for port in device.ports if port.active}


def _host_gbps(host: HostFacts, layer: str) -> float:
    return max(_rate_gbps(device, layer) for device in host.rdma_devices)


def _rate_gbps(device: RdmaDevice, layer: str) -> float:
    """Of its fastest active port of that layer; below zero without one."""
    rates = [port.rate_gbps or 0.0 for port in device.ports if port.active and port.link_layer == layer]
    return max(rates, default=-1.0)


def _best_device(host: HostFacts, layer: str) -> RdmaDevice:
    """The fastest, then the nearest, then the first by name."""
    return min(
        host.rdma_devices,
        key=lambda each: (-_rate_gbps(each, layer), not _near(each.place, host.numa_node), each.name),
    )


def _words(device: RdmaDevice, layer: str) -> str:
    return f"{device.name} ({layer}, {_rate_gbps(device, layer):g} Gbit/s)"


def _rdma_missing(a: HostFacts, b: HostFacts, can: Capabilities) -> Iterator[str]:
    """What keeps two hosts with active devices from RDMA."""
    for host in (a, b):
        if host.verbs_missing is not None:
            yield (
                f"{host.name} has an active RDMA device, but pyverbs is missing: {INSTALL_VERBS} "
                f"({host.verbs_missing})"
            )
    if Transport.RDMA not in can.built:
        yield "both hosts have an active RDMA device, but this version of zbmd has no RDMA links yet"


def _ports_down(a: HostFacts, b: HostFacts) -> Iterator[str]:
    """What keeps two hosts that both have RDMA devices from using them."""
    if not (a.rdma_devices and b.rdma_devices):
        return
    if _layers(a) and _layers(b):
        yield "the RDMA devices of the two hosts speak different link layers"
    for host in (a, b):
        for device in host.rdma_devices if not _layers(host) else ():
            for port in device.ports:
                yield (
                    f"port {port.number} of {device.name} on {host.name} is {port.state}: check its cable, "
                    "its driver and, for InfiniBand, the subnet manager"
                )


# --- TCP ------------------------------------------------------------------------------------------------


def _tcp(a: HostFacts, b: HostFacts, can: Capabilities, better: list[str]) -> LinkChoice:
    within = _one_network(a, b)
    ours, theirs = _usable(a, can.interfaces, within=within), _usable(b, can.peer_interfaces, within=within)
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


def _usable(host: HostFacts, wanted: InterfaceFilter, *, within: bool) -> list[Interface]:
    """What leads out of the host, best first; `within` one network namespace, loopback before all else."""
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
