"""The doctor's look at RDMA: what would be used, and what each device, port and network lacks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from zbmd.tools.doctor.report import Finding, Section
from zbmd.transport.errors import UserError
from zbmd.transport.host.link_choice import (
    DEVICES_VARIABLE,
    ETHERNET,
    LOCKED_BYTES_MIN,
    ROCE_V2,
    WantedDevice,
    fits,
    parse_wanted_devices,
    rdma_paths,
    why_no_rdma,
)
from zbmd.transport.host.topology import INSTALL_VERBS, HostFacts, RdmaDevice, RdmaPort, Topology
from zbmd.transport.host.topology.devices import LOSS_COUNTERS, SHORTAGE_COUNTERS

HEADERS_BYTES: Final = 96
"""Overhead of a RoCE message in an interface's MTU (`iboe_get_mtu` of Linux)."""
MTUS: Final = (4096, 2048, 1024, 512, 256)
UNLIMITED: Final = (
    "ulimit -l unlimited; for all logins memlock in /etc/security/limits.conf, for a service "
    "LimitMEMLOCK=infinity, for a container --ulimit memlock=-1"
)
LOSSLESS: Final = (
    "have the switch and the card keep RoCE lossless: flow control for its priority (PFC: dcb pfc show "
    "dev {0}, or mlnx_qos -i {0}) and marks of congestion (ECN)"
)


def read_wanted(environment: Mapping[str, str] = os.environ) -> tuple[WantedDevice, ...]:
    """The devices that the user admits; all if that cannot be read, which `rdma_findings` tells."""
    try:
        return parse_wanted_devices(environment.get(DEVICES_VARIABLE, ""))
    except UserError:
        return ()


def rdma_findings(
    topology: Topology, facts: HostFacts, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Whether links to other hosts will be RDMA, and each device and port; one line where there is none."""
    if not topology.rdma_devices:
        yield Section.RDMA.note("device", "none; links to other hosts are TCP")
        return
    for device in topology.rdma_devices:
        yield _device(device)
        for port in device.ports:
            yield _port(device, port)
            yield from _message_bytes(topology, device, port)
            yield from _trouble(device, port)
        yield from _flow_control(device)
    if facts.verbs_missing is None:
        yield Section.RDMA.ok("libraries", "pyverbs can be imported, and zbmd was built with libibverbs")
    else:
        yield Section.RDMA.note("libraries", facts.verbs_missing, INSTALL_VERBS)
    yield _locked(facts)
    yield _verdict(facts, environment)


def _verdict(facts: HostFacts, environment: Mapping[str, str]) -> Finding:
    """By what ranks decide."""
    name = "to other hosts"
    try:
        wanted = parse_wanted_devices(environment.get(DEVICES_VARIABLE, ""))
    except UserError as error:
        return Section.RDMA.not_ok(name, str(error), "correct or unset it")
    why = why_no_rdma(facts, wanted)
    if why is not None:
        return Section.RDMA.note(name, f"TCP: {why}")
    paths = ", ".join(str(path) for path in rdma_paths(facts, wanted))
    return Section.RDMA.ok(name, f"RDMA, where the other host has it too, by {paths}")


def _device(device: RdmaDevice) -> Finding:
    where = "in software" if device.place is None else device.place.address
    firmware = f"firmware {device.firmware or 'unknown'}"
    return Section.RDMA.note(device.name, ", ".join(filter(None, (where, device.board, firmware))))


def _port(device: RdmaDevice, port: RdmaPort) -> Finding:
    name = f"{device.name} port {port.number}"
    rate = "rate unknown" if port.rate_gbps is None else f"{port.rate_gbps:g} Gbit/s"
    kinds = sorted({gid.kind for gid in port.gids if gid.kind is not None})
    parts = [port.state, port.link_layer, rate, *device.interfaces, *kinds]
    detail = ", ".join(parts)
    if not port.active:
        advice = "check its cable, its driver and, for InfiniBand, the subnet manager"
        return Section.RDMA.note(name, detail, advice)
    if port.link_layer == ETHERNET and not any(fits(gid, port) for gid in port.gids):
        interface = device.interfaces[0] if device.interfaces else "its interface"
        advice = f"give {interface} an IP address: ip address add 10.0.0.1/24 dev {interface}"
        return Section.RDMA.note(name, f"{detail}; no {ROCE_V2} address (GID)", advice)
    return Section.RDMA.ok(name, detail)


def _message_bytes(topology: Topology, device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Over Ethernet the interface's MTU decides how much a packet carries."""
    if port.link_layer != ETHERNET or not port.active:
        return
    for each in topology.interfaces:
        if each.name not in device.interfaces:
            continue
        most = next((mtu for mtu in MTUS if mtu <= each.mtu - HEADERS_BYTES), 0)
        name, detail = (
            f"{device.name} MTU",
            f"{most} of {MTUS[0]} bytes a packet ({each.name} mtu {each.mtu})",
        )
        if most == MTUS[0]:
            yield Section.RDMA.ok(name, detail)
        else:
            advice = f"if the switches take it too: ip link set {each.name} mtu 9000, on all hosts"
            yield Section.RDMA.note(name, detail, advice)


def _trouble(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Yield what its counters show, since the driver was loaded."""
    found = [(name, value) for name, value in port.counters if value]
    lost = [f"{name} {value}" for name, value in found if name in LOSS_COUNTERS]
    short = [f"{name} {value}" for name, value in found if name in SHORTAGE_COUNTERS]
    name = f"{device.name} port {port.number}"
    if lost:
        advice = "look at its cable and at the subnet's error counters (ibqueryerrors)"
        if port.link_layer == ETHERNET:
            advice = LOSSLESS.format(device.interfaces[0] if device.interfaces else "INTERFACE")
        yield Section.RDMA.note(f"{name} losses", f"packets have been sent again: {', '.join(lost)}", advice)
    if short:
        detail = f"a receiver had no buffer for a while: {', '.join(short)}"
        yield Section.RDMA.note(f"{name} buffers", detail, "look for a process that is stopped or starved")
    downs = dict(found).get("link_downed", 0)
    if downs:
        yield Section.RDMA.note(f"{name} cable", f"times it has gone down: {downs}", "check its cable")


def _flow_control(device: RdmaDevice) -> Iterator[Finding]:
    if device.place is None or not any(port.link_layer == ETHERNET and port.active for port in device.ports):
        return  # of a device in software nothing is to be set
    name = f"{device.name} flow control"
    advice = LOSSLESS.format(device.interfaces[0] if device.interfaces else "INTERFACE")
    if device.ecn is None:
        yield Section.RDMA.note(name, "the driver does not tell of PFC and ECN", advice)
    elif not device.ecn:
        yield Section.RDMA.note(name, "marks of congestion (ECN) are answered in no priority", advice)
    else:
        yield Section.RDMA.ok(name, f"ECN in priorities {', '.join(map(str, device.ecn))}")


def _locked(facts: HostFacts) -> Finding:
    most = facts.locked_bytes_max
    if most is None:
        return Section.RDMA.ok("locked memory", "unlimited")
    detail = f"{most >> 10} KiB may be locked; a rank of an arena of 64 MiB needs {LOCKED_BYTES_MIN >> 10}"
    if most >= LOCKED_BYTES_MIN:
        return Section.RDMA.ok("locked memory", detail, UNLIMITED)
    return Section.RDMA.note("locked memory", detail, UNLIMITED)
