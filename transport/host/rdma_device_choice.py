"""Which RDMA device a process uses for other hosts, or why it uses none (pure).

Ranks, the choice of a link between two hosts and `zbmd-node doctor` all ask here, so they say the same.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Final, TypeVar

from zbmd.transport.errors import UserError
from zbmd.transport.host.facts import HostFacts
from zbmd.transport.host.topology.kernel_files import PciLocation
from zbmd.transport.host.topology.rdma import Gid, RdmaDevice, RdmaPort

T = TypeVar("T")

DEVICES_VARIABLE: Final = "ZBMD_RDMA_DEVICES"
"""The RDMA devices that may be used, with commas between them: DEVICE, or DEVICE@ADDRESS."""
ETHERNET: Final = "Ethernet"
ROCE_V2: Final = "RoCE v2"
LOCKED_BYTES_MIN: Final = 96 << 20
"""What a rank locks with an arena and an inbox of the usual sizes, and a few links."""
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
    """What can be used, best first: the fastest, then the nearest, then by name, so that all agree."""
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


def _near(place: PciLocation | None, numa_node: int | None) -> bool:
    return numa_node is not None and place is not None and place.numa_node == numa_node


def _unfit(host: HostFacts, wanted: Sequence[WantedDevice]) -> Iterator[str]:
    """What is wrong with each port that the user admits."""
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
