"""Finding a door: of the addresses that a node was given, one where a member lets it in.

All are tried at once, by a link that is a visitor's: what the door's host sees of us, what budget the cluster
has and whether anything stands against us is known before a life begins.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from zbmd.actors.cluster.membership.admission import is_loopback
from zbmd.actors.cluster.node.contracts import DESK, DoorReply, DoorRequest
from zbmd.actors.cluster.node_id import Node
from zbmd.actors.contracts import fingerprints
from zbmd.actors.errors import ActorError
from zbmd.actors.system import ActorSystem
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, UserError, ZbmdError
from zbmd.transport.handshake.cookie import cookie_path
from zbmd.transport.handshake.hello import ContractsDiffer, WrongCookie, WrongVersion
from zbmd.transport.host.topology.interfaces import read_interfaces
from zbmd.transport.identity import Identity
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, TcpSettings
from zbmd.transport.tcp.sockets import HostUnknown, resolve

DOORS_MAX: Final = 64
AGAIN_S: Final = 0.1
"""From a try at a door that failed in a way that may pass to the next; longer with each, up to:"""
AGAIN_S_MAX: Final = 1.0
AGAIN_GROWTH: Final = 1.2
ANSWER_S: Final = 2.0
NOBODY_ERRNOS: Final = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
_visitors: Final = itertools.count(1)


class JoinFailed(UserError):
    """No member has let this node in; the text has each door's reason."""


class NotLetInYet(JoinFailed):
    """The same, and a door at least was not shut for good when the time was up."""


class _Shut(Enum):
    FOR_GOOD = auto()
    FOR_NOW = auto()
    NOBODY = auto()
    """For who founds: no member is behind it. Nobody listens there, or one who is in no cluster either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorway:
    """An open door. node: who keeps it; own_host: our end of the link to it, numeric."""

    node: Node
    own_host: str
    recovery_budget_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeker:
    """Who looks for a door. host: where it listens, numeric; empty if everywhere.

    names_may_come: a host that no name server knows is tried again, as one that has not been started yet.
    founds: it founds the cluster if there is none.
    """

    node_id: int
    name: str
    host: str
    recovery_budget_ns: int
    cookie: bytes
    settings: TcpSettings
    deadlines: Deadlines
    witnessed: bool = False
    names_may_come: bool = False
    founds: bool = False


def visitor(cookie: bytes, deadlines: Deadlines) -> Endpoint:
    """The endpoint of a process that is no node."""
    identity = Identity(
        name=f"visitor-{os.getpid()}-{next(_visitors)}",
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=1,
        contracts=fingerprints(),
    )
    return Endpoint(identity=identity, cookie=cookie, deadlines=deadlines)


async def find_door(
    doors: Sequence[TcpAddress], seeker: Seeker, tell: Callable[[str], None], timeout_ns: int
) -> Doorway:
    """The first door that opens. tell: takes in words what stands in the way, each once.

    Raises `JoinFailed` when all have refused for good, `NotLetInYet` when the time is up. Who founds a
    cluster where there is none (`Seeker.founds`) waits for no door but those that a member keeps.
    """
    failure = JoinFailed
    reasons: dict[TcpAddress, str] = {}

    def stands_in_the_way(door: TcpAddress, reason: str) -> None:
        if reasons.get(door) != reason:
            reasons[door] = reason
            tell(f"{door}: {reason}")

    loop = asyncio.get_running_loop()
    deadline_ns = now_ns() + timeout_ns
    trying = {loop.create_task(_try(door, seeker, stands_in_the_way, deadline_ns)) for door in doors}
    try:
        while trying:
            done, trying = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                found = task.result()
                if isinstance(found, Doorway):
                    return found
                if found is _Shut.FOR_NOW:
                    failure = NotLetInYet
    finally:
        for task in trying:
            task.cancel()
        if trying:
            await asyncio.wait(trying)
    told = "; ".join(f"{door}: {reason}" for door, reason in reasons.items())
    raise failure(f"no member of a cluster has let this node in. {told}.")


async def _try(
    door: TcpAddress, seeker: Seeker, stands: Callable[[TcpAddress, str], None], deadline_ns: int
) -> Doorway | _Shut:
    """Knock until the door opens, is shut for good, or the time is up."""
    pause_s, silent_ns = AGAIN_S, now_ns() + seeker.deadlines.view_ns
    while True:  # ends at the deadline
        is_member = False
        try:
            found = await _knock(door, seeker)
        except (PeerLost, LinkClosed, DeadlineExceeded, ActorError) as error:
            stands(door, _advice(door, error))
            if seeker.founds and (_says_nobody(error) or now_ns() >= silent_ns):
                return _Shut.NOBODY
        except (ZbmdError, OSError) as error:
            stands(door, _advice(door, error))
            if not (seeker.names_may_come and isinstance(error, HostUnknown)):
                return _Shut.FOR_GOOD
        else:
            if isinstance(found, Doorway):
                return found
            stands(door, found.refused or f"{found.node} is no member of a cluster itself yet")
            if found.refused and not found.passes:
                return _Shut.FOR_GOOD
            is_member = bool(found.refused)
            if seeker.founds and not is_member:
                return _Shut.NOBODY
        if now_ns() + pause_s * 1e9 >= deadline_ns:
            return _Shut.FOR_NOW if is_member or not seeker.founds else _Shut.NOBODY
        await asyncio.sleep(pause_s)
        pause_s = min(AGAIN_S_MAX, pause_s * AGAIN_GROWTH)


async def _knock(door: TcpAddress, seeker: Seeker) -> Doorway | DoorReply:
    endpoint = visitor(seeker.cookie, seeker.deadlines)
    link = await tcp.dial(door, endpoint, settings=seeker.settings)
    own_host = link.local_address.host
    system = ActorSystem(endpoint.identity.name)
    try:
        system.attach(link)
        desk = system.ref(f"{link.peer.name}/{DESK}")
        request = DoorRequest(
            node_id=seeker.node_id,
            name=seeker.name,
            host=seeker.host or _advertised_host(own_host),
            recovery_budget_ns=seeker.recovery_budget_ns,
            witnessed=seeker.witnessed,
        )
        reply = await desk.ask(request, reply=DoorReply, timeout=ANSWER_S)
    finally:
        await system.stop()
    if reply.refused or not reply.member:
        return reply
    return Doorway(node=reply.node, own_host=own_host, recovery_budget_ns=reply.recovery_budget_ns)


def _says_nobody(error: Exception) -> bool:
    """Whether the network has answered that nobody listens there, or that there is no such host."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in NOBODY_ERRNOS


def _advertised_host(own_host: str) -> str:
    """Where who listens everywhere will be dialed: not at loopback if it has another address."""
    if not is_loopback(own_host):
        return own_host
    others = [host for each in read_interfaces() for host in each.addresses if not is_loopback(host)]
    return others[0] if others else own_host


def _advice(door: TcpAddress, error: Exception) -> str:
    match error:
        case WrongCookie():
            return (
                "it belongs to a cluster with another cookie. On a member of the cluster that you mean, "
                f"`zbmd-node token` prints the line to paste here; or copy its cookie file to {cookie_path()}"
            )
        case ContractsDiffer() | WrongVersion():
            return f"it runs another release of zbmd: run the same on all nodes ({error})"
        case DeadlineExceeded():
            return (
                f"{error}. Check the address, and that TCP port {door.port} is open there "
                f"(`zbmd-node doctor --peer {door}`)"
            )
        case PeerLost(reason=reason):
            return reason
        case _:
            return str(error)


async def own_addresses(
    doors: Sequence[TcpAddress], listen: TcpAddress, timeout_ns: int
) -> tuple[TcpAddress, ...]:
    """Of these doors, those that are the address that we shall listen at ourselves."""
    if not listen.port or all(door.port != listen.port for door in doors):
        return ()
    deadline_ns = now_ns() + timeout_ns
    if listen.host:
        here = await _hosts(listen, deadline_ns)
    else:
        here = {address for each in read_interfaces() for address in each.addresses}
    found: list[TcpAddress] = []
    for door in doors:
        hosts = await _hosts(door, deadline_ns) if door.port == listen.port else set[str]()
        # A name of several hosts, such as a headless service's, leads to others too.
        if hosts and all(host in here or (not listen.host and is_loopback(host)) for host in hosts):
            found.append(door)
    return tuple(found)


async def loopback_name(listen: TcpAddress, timeout_ns: int) -> str | None:
    """If we listen at a name that means loopback alone, and does not say so: the address that it means."""
    if not listen.host or listen.is_numeric or listen.host.split(".")[0] in ("localhost", "ip6-localhost"):
        return None
    hosts = await _hosts(listen, now_ns() + timeout_ns)
    loopback = sorted(host for host in hosts if host == "::1" or host.startswith("127."))
    return loopback[0] if loopback and len(loopback) == len(hosts) else None


async def _hosts(address: TcpAddress, deadline_ns: int) -> set[str]:
    try:
        return {str(sockaddr[0]) for _, sockaddr in await resolve(address, deadline_ns)}
    except (UserError, DeadlineExceeded, socket.gaierror):
        return set()  # told when it is dialed
