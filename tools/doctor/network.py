"""The doctor's look at the network: interfaces, RDMA devices, and the link of each pair of processes."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from zbmd.actors.contracts import fingerprints
from zbmd.tools.doctor.report import Finding, FindingState, PairLink, Section
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.host.facts import HostFacts
from zbmd.transport.host.link_choice import (
    INTERFACES_VARIABLE,
    Capabilities,
    InterfaceFilter,
    choose_link,
    interface_words,
    parse_interface_filter,
    rank_interfaces,
)
from zbmd.transport.host.topology import Interface, InterfaceKind, Topology
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, Link
from zbmd.transport.native._native import now_ns
from zbmd.transport.shm.connect import dial, listen

ROUND_TRIPS: Final = 200
PROBE_FRAME: Final = b"doctor"


def read_interface_filter(environment: Mapping[str, str]) -> tuple[InterfaceFilter, Finding | None]:
    """The user's choice of interfaces; the finding tells of one that names none."""
    text = environment.get(INTERFACES_VARIABLE)
    if text is None:
        return InterfaceFilter(), None
    try:
        return parse_interface_filter(text), None
    except UserError as error:
        return InterfaceFilter(), _finding(
            Section.NETWORK, INTERFACES_VARIABLE, FindingState.NOT_OK, str(error)
        )


def _finding(section: Section, name: str, state: FindingState, detail: str, advice: str = "") -> Finding:
    return Finding(section=section, name=name, state=state, detail=detail, advice=advice)


def network_findings(topology: Topology, wanted: InterfaceFilter) -> Iterator[Finding]:
    """Each interface, and the one that links to other hosts would use."""
    for each in topology.interfaces:
        yield _finding(Section.NETWORK, each.name, FindingState.NOTE, _interface(each))
    ranked = [
        each
        for each in rank_interfaces(topology.interfaces, wanted)
        if each.kind is not InterfaceKind.LOOPBACK
    ]
    name = "to other hosts"
    if ranked:
        because = f" ({INTERFACES_VARIABLE}={wanted})" if wanted.names else ""
        yield _finding(
            Section.NETWORK,
            name,
            FindingState.OK,
            f"{interface_words(ranked[0])} is the first choice{because}",
        )
    elif wanted.names:
        names = ", ".join(each.name for each in topology.interfaces)
        detail = f"{INTERFACES_VARIABLE}={wanted} admits no interface that is up and has an address"
        yield _finding(
            Section.NETWORK, name, FindingState.NOT_OK, detail, f"unset it, or name one of: {names}"
        )
    else:
        detail = "no interface is up and has an address: jobs stay on this host"
        yield _finding(Section.NETWORK, name, FindingState.NOTE, detail)


def _interface(interface: Interface) -> str:
    parts = ["up" if interface.up else "down", interface.kind.value]
    if interface.speed_mbps is not None:
        parts.append(f"{interface.speed_mbps / 1000:g} Gbit/s")
    parts.append(f"mtu {interface.mtu}")
    if interface.driver is not None:
        parts.append(interface.driver)
    if interface.place is not None:
        node = "" if interface.place.numa_node is None else f" on NUMA node {interface.place.numa_node}"
        parts.append(f"{interface.place.address}{node}")
    return ", ".join((*parts, *interface.addresses))


# --- links ----------------------------------------------------------------------------------------------


def local_link(facts: HostFacts, can: Capabilities) -> PairLink:
    """The link of each two ranks of this host."""
    between = ("any rank here", "any other")
    try:
        return PairLink(between=between, choice=choose_link(facts, facts, can))
    except UserError as error:
        return PairLink(between=between, choice=None, error=str(error))


def link_findings(links: tuple[PairLink, ...]) -> Iterator[Finding]:
    """Each pair's link and its reason, and what would make it better."""
    for link in links:
        name = " - ".join(link.between)
        if link.choice is None:
            yield _finding(Section.LINKS, name, FindingState.NOT_OK, link.error)
            continue
        detail = f"{link.choice.transport.value}: {link.choice.reason}"
        if link.choice.no_rdma:
            detail += f"; no RDMA: {link.choice.no_rdma}"
        yield _finding(Section.LINKS, name, FindingState.OK, detail, "; ".join(link.choice.better))


async def probe_finding(deadlines: Deadlines) -> Finding:
    """Whether a link can really be made here: listen, dial, hello, and frames to and fro."""
    name = "a link made now"
    try:
        median_ns = await _round_trip_ns(deadlines)
    except (ZbmdError, OSError, TimeoutError) as error:
        detail = f"{type(error).__name__}: {error}"
        return _finding(
            Section.LINKS, name, FindingState.NOT_OK, detail, "allow unix sockets, memfd and eventfd"
        )
    detail = f"shm between two ends in this process: {median_ns / 1000:.0f} us a frame's round trip"
    return _finding(Section.LINKS, name, FindingState.OK, f"{detail}, median of {ROUND_TRIPS}")


async def _round_trip_ns(deadlines: Deadlines) -> float:
    address = f"zbmd-doctor-{os.getuid()}-{os.getpid()}"
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = listen(address, accepted.set_result, _endpoint("doctor-listener", deadlines))
    links: list[Link] = []
    try:
        links.append(await dial(address, _endpoint("doctor-dialer", deadlines)))
        async with asyncio.timeout(deadlines.dial_ns / 1e9):
            links.append(await accepted)
            return statistics.median([await _round_trip(*links) for _ in range(ROUND_TRIPS)])
    finally:
        for link in links:
            link.close()
        listener.close()
        await listener.wait_closed()


async def _round_trip(a: Link, b: Link) -> int:
    back = asyncio.get_running_loop().create_future()
    b.on_frame = lambda *_: b.send(PROBE_FRAME)
    a.on_frame = lambda *_: back.set_result(None)
    started_ns = now_ns()
    a.send(PROBE_FRAME)
    await back
    return now_ns() - started_ns


def _endpoint(name: str, deadlines: Deadlines) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, contracts=fingerprints())
    return Endpoint(identity=identity, cookie=load_or_create_cookie(), deadlines=deadlines)
