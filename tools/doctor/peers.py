"""`zbmd-node doctor --peer HOST[:PORT]`: is the host there, over which interface, and if not, what fails.

The name is resolved and every address of it tried, as a TCP link would: from each interface that the user has
named, else by the way that the kernel's routes choose. A host that refuses the connection is there: only
nobody listens.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from zbmd.actors.cluster.node.client import admin_over
from zbmd.actors.cluster.node.contracts import ClockReply, ClockRequest
from zbmd.actors.cluster.node.incarnation import clocks_apart, wall_ns
from zbmd.actors.cluster.node.join import client_endpoint
from zbmd.actors.errors import ActorError
from zbmd.tools.doctor.report import Finding, FindingState, PairLink, Section
from zbmd.transport.clock.deadlines import derive, format_duration
from zbmd.transport.errors import DeadlineExceeded, UserError, ZbmdError
from zbmd.transport.handshake.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.host.link_choice import (
    INTERFACES_VARIABLE,
    Capabilities,
    LinkChoice,
    Transport,
    choose_link,
    interface_words,
    passed_over,
    rank_interfaces,
    why_no_rdma,
)
from zbmd.transport.host.topology import HostFacts, Interface, InterfaceKind
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, tcp_settings

# Clocks: ask the node of a peer for its time, and compare.

CLOCK_S: Final = 2.0
"""For a node to answer: who listens there may be no node."""
_MILLISECOND_NS: Final = 1_000_000


async def compare_clocks(
    address: TcpAddress, here: str, *, clock_ns: Callable[[], int] = wall_ns, timeout_s: float = CLOCK_S
) -> Finding:
    """Compare the clock of the node at `address` with ours. here: the name of this host."""
    try:
        async with asyncio.timeout(timeout_s):
            reply, ahead_ns = await _ask(address, clock_ns)
    except (ZbmdError, ActorError, OSError, TimeoutError) as error:
        return _not_compared(address, error)
    there = f"{reply.node.name or reply.node.key} ({address})"
    text = clocks_apart(there, here, ahead_ns)
    if text is not None:
        what, _, advice = text.partition(". ")
        return Section.LINKS.note(str(address), what, advice)
    apart = format_duration(abs(ahead_ns) // _MILLISECOND_NS * _MILLISECOND_NS)
    return Section.LINKS.ok(str(address), f"the clock of {there} agrees with ours to {apart}")


async def _ask(address: TcpAddress, clock_ns: Callable[[], int]) -> tuple[ClockReply, int]:
    """The answer, and how far that clock is ahead: it was read half a round trip ago."""
    if not cookie_path().exists():
        raise UserError("there is no cookie here to ask with (`zbmd-node token` there prints how to get it)")
    endpoint = client_endpoint(load_or_create_cookie(), derive())
    link = await tcp.dial(address, endpoint, settings=tcp_settings())
    async with admin_over(link, endpoint) as admin:
        asked_ns = clock_ns()
        reply = await admin.actor.ask(ClockRequest(), reply=ClockReply, timeout=CLOCK_S)
        return reply, reply.wall_ns - (asked_ns + clock_ns()) // 2


def _not_compared(address: TcpAddress, error: Exception) -> Finding:
    silent = isinstance(error, TimeoutError | DeadlineExceeded)
    why = "who listens there does not answer as a node" if silent else str(error)
    return Section.LINKS.note(str(address), f"not compared: {why}")


PORT_DEFAULT: Final = 29400
"""Of `--rdzv-endpoint`, as torchrun has it."""
ADDRESSES_MAX: Final = 8
INTERFACES_MAX: Final = 8
PEERS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A host as the user names it. given_port: whether the port was named, so that somebody must listen."""

    text: str
    host: str
    port: int
    given_port: bool


def parse_peer(text: str) -> Peer:
    """`host`, `host:port`, `192.0.2.1:29400`, `[2001:db8::1]:29400` or `2001:db8::1`. Raises `UserError`."""
    host, port_text = text.strip(), ""
    if host.startswith("["):
        host, bracket, rest = host[1:].partition("]")
        port_text = rest.removeprefix(":")
        broken = not bracket or (rest != "" and not rest.startswith(":")) or rest == ":"
    elif host.count(":") == 1:
        host, _, port_text = host.partition(":")
        broken = not port_text
    else:
        broken = False
    port = int(port_text) if port_text.isdecimal() else 0
    if broken or not host or (port_text and not 0 < port < 2**16):
        raise UserError(
            f"--peer {text!r} is no host and port. Give HOST, HOST:PORT or [IPV6]:PORT, with a port of "
            "1 to 65535."
        )
    return Peer(text=text, host=host, port=port or PORT_DEFAULT, given_port=bool(port_text))


class Reachability(Enum):
    """The answer of one address."""

    CONNECTED = "connected"
    REFUSED = "refused"
    SILENT = "no answer"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A route to an address. interface: None if unknown; source: ours, None for the kernel's choice."""

    address: str
    interface: Interface | None
    source: str | None

    def __str__(self) -> str:
        """Such as `eth0 to 192.0.2.7`."""
        return f"{'the default route' if self.interface is None else self.interface.name} to {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to connect. words: what happened, for a person."""

    way: Way
    answer: Reachability
    words: str

    @property
    def reached(self) -> bool:
        """Whether the host itself answered."""
        return self.answer in (Reachability.CONNECTED, Reachability.REFUSED)


async def examine(
    peer: Peer, facts: HostFacts, can: Capabilities, timeout_s: float
) -> tuple[PairLink, list[Finding]]:
    """The link to a peer, and what was found on the way: `timeout_s` to resolve, as long to connect."""
    between = (facts.name, peer.text)
    try:
        addresses = await _resolve(peer, timeout_s)
    except UserError as error:
        return PairLink(between=between, choice=None, error=str(error)), []
    if _is_own(addresses, facts):
        return PairLink(between=between, choice=choose_link(facts, facts, can)), []
    ways = find_ways(addresses, peer.port, facts, can)
    if not ways:
        none = (
            f"no interface that {INTERFACES_VARIABLE}={can.interfaces} admits leads to "
            f"{', '.join(addresses)}: none is up and has an address of that family"
        )
        return PairLink(between=between, choice=None, error=none), []
    attempts = await asyncio.gather(*(attempt(way, peer.port, timeout_s) for way in ways))
    findings = [
        Section.LINKS.finding(
            str(each.way), FindingState.OK if each.reached else FindingState.NOTE, each.words
        )
        for each in attempts
    ]
    best = next((each for each in attempts if each.answer is Reachability.CONNECTED), None)
    if best is not None:
        findings.append(await compare_clocks(TcpAddress(host=best.way.address, port=peer.port), facts.name))
    return _verdict(peer, facts, can, attempts), findings


def _verdict(peer: Peer, facts: HostFacts, can: Capabilities, attempts: Sequence[Attempt]) -> PairLink:
    between = (facts.name, peer.text)
    best = next((each for each in attempts if each.answer is Reachability.CONNECTED), None)
    there = best or next((each for each in attempts if each.reached), None)
    if there is None:
        words = "; ".join(dict.fromkeys(each.words for each in attempts))
        return PairLink(between=between, choice=None, error=f"{peer.text} cannot be reached: {words}")
    if best is None and peer.given_port:
        return PairLink(between=between, choice=None, error=f"{there.way.address} answers, but {there.words}")
    used = there.way.interface
    words = "the default route" if used is None else interface_words(used)
    why = why_no_rdma(facts, can.rdma_devices)
    return PairLink(
        between=between,
        choice=LinkChoice(
            transport=Transport.TCP,
            reason=f"another host; {words} leads to {there.way.address}, {there.words}",
            device=None if used is None else used.name,
            better=(
                *(passed_over(facts, used) if used is not None else ()),
                *(() if why else (f"RDMA is used if {peer.text} has it too: run the doctor there",)),
            ),
            no_rdma=why or "",
        ),
    )


def find_ways(addresses: Sequence[str], port: int, facts: HostFacts, can: Capabilities) -> list[Way]:
    """The ways to these addresses, best first: over the interfaces that the user has named, or as routed."""
    if not can.interfaces.names:
        return [
            Way(address=address, interface=_routed(address, port, facts), source=None)
            for address in addresses
        ]
    ranked = rank_interfaces(facts.interfaces, can.interfaces, facts.numa_node)
    outward = [each for each in ranked if each.kind is not InterfaceKind.LOOPBACK][:INTERFACES_MAX]
    return [
        Way(address=address, interface=each, source=source)
        for address in addresses
        for each in outward
        if (source := _source(each, address)) is not None
    ]


def _routed(address: str, port: int, facts: HostFacts) -> Interface | None:
    """The interface that the kernel would use; connecting a datagram socket asks it and sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, port))
            source = str(sock.getsockname()[0]).partition("%")[0]
    except OSError:
        return None
    return next((each for each in facts.interfaces if source in each.addresses), None)


async def _resolve(peer: Peer, timeout_s: float) -> list[str]:
    """The addresses of a name, in the order of preference. Raises `UserError`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise UserError(
            f"the name {peer.host!r} was not resolved in {timeout_s:g} s: the name server does not answer. "
            "Give an IP address, or look at /etc/resolv.conf."
        ) from None
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise UserError(
            f"the name {peer.host!r} cannot be resolved: {why}. Check the spelling, or give an IP address."
        ) from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))[:ADDRESSES_MAX]


def _is_own(addresses: Sequence[str], facts: HostFacts) -> bool:
    own = {address for each in facts.interfaces for address in each.addresses}
    return any(each in own or ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def _source(interface: Interface, address: str) -> str | None:
    """The interface's address of the same family as `address`, with its zone; None if it has none."""
    target = ipaddress.ip_address(address.partition("%")[0])
    for each in map(ipaddress.ip_address, interface.addresses):
        if each.version == target.version and each.is_link_local == target.is_link_local:
            zone = f"%{interface.name}" if each.version == 6 and each.is_link_local else ""
            return f"{each}{zone}"
    return None


async def attempt(way: Way, port: int, timeout_s: float) -> Attempt:
    """Try to connect, for `timeout_s` at most."""
    family = socket.AF_INET6 if ":" in way.address else socket.AF_INET
    started_ns = time.monotonic_ns()
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        try:
            if way.source is not None:
                sock.bind((way.source, 0))
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, (way.address, port))
        except TimeoutError:
            answer = Reachability.SILENT
            words = f"no answer in {timeout_s:g} s: a firewall drops it, or there is no such host"
        except ConnectionRefusedError:
            answer = Reachability.REFUSED
            words = f"nobody listens at port {port}: start the node there, or name its port"
        except OSError as error:
            answer, words = Reachability.FAILED, _why(error)
        else:
            took_ms = (time.monotonic_ns() - started_ns) / 1e6
            answer, words = Reachability.CONNECTED, f"port {port} accepts, in {took_ms:.1f} ms"
    return Attempt(way=way, answer=answer, words=words)


def _why(error: OSError) -> str:
    match error.errno:
        case errno.ENETUNREACH:
            return "no route leads there: look at ip route"
        case errno.EHOSTUNREACH:
            return "its network is there, but the host is not: it may be down"
        case errno.EADDRNOTAVAIL:
            return "the interface has lost its address"
        case number:
            return os.strerror(number) if number else str(error)
