"""Finding a member to join: of the addresses that a node was given, one whose member admits it.

All are tried at once, over a client connection: which of our addresses the member's host sees, the
cluster's recovery budget and any objection are known before an incarnation begins.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from zbmd.actors.cluster.node.contracts import ADMIN_ACTOR, AdmissionReply, AdmissionRequest
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import fingerprints
from zbmd.actors.errors import ActorError
from zbmd.actors.system import ActorSystem
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_VARIABLE, Deadlines, format_duration
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, UserError, ZbmdError
from zbmd.transport.handshake.cookie import cookie_path
from zbmd.transport.handshake.hello import ContractsDiffer, WrongCookie, WrongVersion
from zbmd.transport.host.topology.interfaces import read_interfaces
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, TcpSettings
from zbmd.transport.tcp.sockets import HostUnknown, resolve

# --- whether a node may join, judged by the member that it asks -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinApplication:
    """A node's statement about itself before it joins.

    host: numeric, where it would be dialed; recovery_budget_ns: 0 to take the cluster's; witnessed: whether
    it asks a witness who may go on with half of a view; run: the name of the run that its cluster is made
    for, empty for a cluster that any job may be given to.
    """

    node_id: int
    name: str
    host: str
    recovery_budget_ns: int
    witnessed: bool = False
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRefusal:
    """Why a node may not join. passes: whether the reason may go away by itself, so that retrying helps."""

    reason: str
    passes: bool


def is_loopback(host: str) -> bool:
    """Whether a numeric host is a loopback address."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def refuse_join(
    application: JoinApplication,
    view: ClusterView,
    me: Node,
    own_host: str,
    budget_ns: int,
    *,
    witnessed: bool = False,
    run: str = "",
) -> JoinRefusal | None:
    """Return why the node may not join, judged by the newest known view; None if it may.

    own_host: where others dial us; budget_ns, witnessed, run: the cluster's.
    """
    if application.run != run:
        return JoinRefusal(reason=_other_run(application.run, run), passes=False)
    if application.recovery_budget_ns not in (0, budget_ns):
        ours, theirs = format_duration(budget_ns), format_duration(application.recovery_budget_ns)
        return JoinRefusal(
            reason=f"the cluster's recovery budget is {ours}, this node's {theirs}, and all deadlines follow "
            f"from it: leave --recovery-budget (and {RECOVERY_BUDGET_VARIABLE}) away, or give {ours}",
            passes=False,
        )
    if application.witnessed != witnessed:
        has = "asks a witness" if witnessed else "asks no witness"
        do = "give this node the same --store" if witnessed else "leave --store away, or give it to all nodes"
        return JoinRefusal(
            reason=f"the cluster {has} which half of it may go on, and all nodes have to do the same: {do}",
            passes=False,
        )
    if is_loopback(application.host) and not is_loopback(own_host):
        return JoinRefusal(
            reason=f"it would be known at {application.host}, which on every other host means that host "
            "itself. Give --listen HOST:PORT with an address that the others reach (`ip addr` shows them); if"
            f" HOST is a name, /etc/hosts maps it to {application.host}",
            passes=False,
        )
    for node in view.nodes:
        if application.name and node.name == application.name and node.id != application.node_id:
            return JoinRefusal(
                reason=f"{node} at {node.address} has the name {application.name!r} already. Give --name "
                "another; if that node is dead, it loses its place in a moment",
                passes=True,
            )
    return None


def _other_run(wanted: str, run: str) -> str:
    """Return why a node of one run may not join a cluster that was made for another, or for any job."""
    if not run:
        return (
            f"it belongs to a cluster that is there for any job, and this node was started for {wanted}: give"
            " its job to that cluster by `zbmd-node submit`, or the run another address (--rdzv-endpoint)"
        )
    if not wanted:
        return f"it belongs to {run}, which has a cluster of its own: join another one"
    return (
        f"it belongs to {run}, and this node was started for {wanted}. Two runs have met at one address: give"
        " each an --rdzv-endpoint of its own. Nodes of one run are started with the same --rdzv-id, or "
        "without one with the same script and arguments"
    )


def has_namesake(node: Node, view: ClusterView) -> Node | None:
    """Return another member with the same name as `node`."""
    return next((n for n in view.nodes if node.name and n.name == node.name and n.id != node.id), None)


def advertised(addresses: tuple[TcpAddress, ...], towards_cluster: str | None) -> TcpAddress:
    """Return the listening address that is advertised to the other members.

    towards_cluster: our end of a connection to a member, numeric; None for who founds a cluster.
    """
    outside = [address for address in addresses if not is_loopback(address.host)]
    if towards_cluster is not None and not (is_loopback(towards_cluster) and outside):
        for address in addresses:
            if address.host.partition("%")[0] == towards_cluster.partition("%")[0]:
                return address
    return (outside or list(addresses))[0]


JOIN_ADDRESSES_MAX: Final = 64
AGAIN_S: Final = 0.1
"""Pause after a failed attempt that may succeed later; grows with each, up to `AGAIN_S_MAX`."""
AGAIN_S_MAX: Final = 1.0
AGAIN_GROWTH: Final = 1.2
ANSWER_S: Final = 2.0
NOBODY_ERRNOS: Final = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
_visitors: Final = itertools.count(1)


class JoinFailed(UserError):
    """No member admitted this node; the message gives the reason for each address."""


class JoinTimedOut(JoinFailed):
    """No member admitted this node in time, though at least one might have later."""


class _Closed(Enum):
    FOR_GOOD = auto()
    FOR_NOW = auto()
    NOBODY = auto()
    """For a founder: no member is there. Nobody listens, or only a node that is in no cluster either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOffer:
    """A member that admits this node. node: the member; own_host: our end of the link to it, numeric."""

    node: Node
    own_host: str
    recovery_budget_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """A node that looks for a member to join. host: where it listens, numeric; empty if everywhere.

    names_may_come: a host that no name server knows is tried again, as one that has not been started yet.
    founds: it founds the cluster if there is none. run: see `JoinApplication`; runs_at, age_ns: see
    `AdmissionRequest`.
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
    run: str = ""
    runs_at: Node | None = None
    age_ns: int = 0


def client_endpoint(cookie: bytes, deadlines: Deadlines) -> Endpoint:
    """Return the endpoint of a client: a process that is not a node."""
    identity = Identity(
        name=f"visitor-{os.getpid()}-{next(_visitors)}",
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=1,
        contracts=fingerprints(),
    )
    return Endpoint(identity=identity, cookie=cookie, deadlines=deadlines)


async def find_member(
    join_addresses: Sequence[TcpAddress], seeker: Joiner, tell: Callable[[str], None], timeout_ns: int
) -> JoinOffer:
    """Return the first member that admits this node. tell: takes each new reason for a failure.

    Raises `JoinFailed` when all refused for good, `JoinTimedOut` when the time is up. A founder
    (`Joiner.founds`) waits only for addresses at which a member answers.
    """
    failure = JoinFailed
    reasons: dict[TcpAddress, str] = {}

    def note_failure(join_address: TcpAddress, reason: str) -> None:
        if reasons.get(join_address) != reason:
            reasons[join_address] = reason
            tell(f"{join_address}: {reason}")

    loop = asyncio.get_running_loop()
    deadline_ns = now_ns() + timeout_ns
    trying = {
        loop.create_task(_try(join_address, seeker, note_failure, deadline_ns))
        for join_address in join_addresses
    }
    try:
        while trying:
            done, trying = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                found = task.result()
                if isinstance(found, JoinOffer):
                    return found
                if found is _Closed.FOR_NOW:
                    failure = JoinTimedOut
    finally:
        for task in trying:
            task.cancel()
        if trying:
            await asyncio.wait(trying)
    reasons_text = "; ".join(f"{join_address}: {reason}" for join_address, reason in reasons.items())
    raise failure(f"no member of a cluster has let this node in. {reasons_text}.")


async def _try(
    join_address: TcpAddress, seeker: Joiner, stands: Callable[[TcpAddress, str], None], deadline_ns: int
) -> JoinOffer | _Closed:
    """Ask until the member admits this node, refuses for good, or the time is up."""
    pause_s, silent_ns = AGAIN_S, now_ns() + seeker.deadlines.view_ns
    while True:  # ends at the deadline
        is_member = False
        try:
            found = await _knock(join_address, seeker)
        except (PeerLost, LinkClosed, DeadlineExceeded, ActorError) as error:
            stands(join_address, _advice(join_address, error))
            if seeker.founds and (_says_nobody(error) or now_ns() >= silent_ns):
                return _Closed.NOBODY
        except (ZbmdError, OSError) as error:
            stands(join_address, _advice(join_address, error))
            if not (seeker.names_may_come and isinstance(error, HostUnknown)):
                return _Closed.FOR_GOOD
        else:
            if isinstance(found, JoinOffer):
                return found
            stands(join_address, found.refused or f"{found.node} is no member of a cluster itself yet")
            if found.refused and not found.passes:
                return _Closed.FOR_GOOD
            is_member = bool(found.refused)
            if seeker.founds and not is_member:
                return _Closed.NOBODY
        if now_ns() + pause_s * 1e9 >= deadline_ns:
            return _Closed.FOR_NOW if is_member or not seeker.founds else _Closed.NOBODY
        await asyncio.sleep(pause_s)
        pause_s = min(AGAIN_S_MAX, pause_s * AGAIN_GROWTH)


async def _knock(join_address: TcpAddress, seeker: Joiner) -> JoinOffer | AdmissionReply:
    reply, own_host = await ask_admission(join_address, seeker)
    if reply.refused or not reply.member:
        return reply
    return JoinOffer(node=reply.node, own_host=own_host, recovery_budget_ns=reply.recovery_budget_ns)


async def ask_admission(join_address: TcpAddress, seeker: Joiner) -> tuple[AdmissionReply, str]:
    """Ask a node whether it admits this one; return its answer and our end of the link, numeric.

    Raises `ZbmdError` and OSError.
    """
    endpoint = client_endpoint(seeker.cookie, seeker.deadlines)
    link = await tcp.dial(join_address, endpoint, settings=seeker.settings)
    own_host = link.local_address.host
    system = ActorSystem(endpoint.identity.name)
    try:
        system.attach(link)
        admin = system.ref(f"{link.peer.name}/{ADMIN_ACTOR}")
        request = AdmissionRequest(
            node_id=seeker.node_id,
            name=seeker.name,
            host=seeker.host or _advertised_host(own_host),
            recovery_budget_ns=seeker.recovery_budget_ns,
            witnessed=seeker.witnessed,
            run=seeker.run,
            runs_at=seeker.runs_at,
            age_ns=seeker.age_ns,
        )
        return await admin.ask(request, reply=AdmissionReply, timeout=ANSWER_S), own_host
    finally:
        await system.stop()


def _says_nobody(error: Exception) -> bool:
    """Whether the network answered that nobody listens there, or that there is no such host."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in NOBODY_ERRNOS


def _advertised_host(own_host: str) -> str:
    """Return where a node that listens everywhere is dialed: not loopback if it has another address."""
    if not is_loopback(own_host):
        return own_host
    others = [host for each in read_interfaces() for host in each.addresses if not is_loopback(host)]
    return others[0] if others else own_host


def _advice(join_address: TcpAddress, error: Exception) -> str:
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
                f"{error}. Check the address, and that TCP port {join_address.port} is open there "
                f"(`zbmd-node doctor --peer {join_address}`)"
            )
        case PeerLost(reason=reason):
            return reason
        case _:
            return str(error)


async def own_addresses(
    join_addresses: Sequence[TcpAddress], listen: TcpAddress, timeout_ns: int
) -> tuple[TcpAddress, ...]:
    """Return those of the join addresses that are this node's own listening address."""
    if not listen.port or all(join_address.port != listen.port for join_address in join_addresses):
        return ()
    deadline_ns = now_ns() + timeout_ns
    if listen.host:
        here = await _hosts(listen, deadline_ns)
    else:
        here = {address for each in read_interfaces() for address in each.addresses}
    found: list[TcpAddress] = []
    for join_address in join_addresses:
        hosts = await _hosts(join_address, deadline_ns) if join_address.port == listen.port else set[str]()
        # A name of several hosts, such as a headless service's, leads to others too.
        if hosts and all(host in here or (not listen.host and is_loopback(host)) for host in hosts):
            found.append(join_address)
    return tuple(found)


async def loopback_name(listen: TcpAddress, timeout_ns: int) -> str | None:
    """Return the loopback address that a name other than localhost resolves to; None if there is none."""
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
