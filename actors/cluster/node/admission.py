"""Whether a node may join as it is: checked by the member that it asks, before its incarnation begins."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_VARIABLE, format_duration
from zbmd.transport.tcp.address import TcpAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinApplication:
    """What a node states about itself before it joins.

    host: numeric, where it would be dialed; recovery_budget_ns: 0 to take the cluster's; witnessed: whether
    it asks a witness who may go on with half of a view.
    """

    node_id: int
    name: str
    host: str
    recovery_budget_ns: int
    witnessed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRefusal:
    """Why a node may not join. passes: whether the reason may go away by itself, so that retrying helps."""

    reason: str
    passes: bool


def is_loopback(host: str) -> bool:
    """Whether a numeric host is a loopback address."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def refuse_join(
    wish: JoinApplication,
    view: ClusterView,
    me: Node,
    own_host: str,
    budget_ns: int,
    *,
    witnessed: bool = False,
) -> JoinRefusal | None:
    """Return why the node may not join, judged by the newest known view; None if it may.

    own_host: where others dial us; budget_ns, witnessed: the cluster's.
    """
    if wish.recovery_budget_ns not in (0, budget_ns):
        ours, theirs = format_duration(budget_ns), format_duration(wish.recovery_budget_ns)
        return JoinRefusal(
            reason=f"the cluster's recovery budget is {ours}, this node's {theirs}, and all deadlines follow "
            f"from it: leave --recovery-budget (and {RECOVERY_BUDGET_VARIABLE}) away, or give {ours}",
            passes=False,
        )
    if wish.witnessed != witnessed:
        has = "asks a witness" if witnessed else "asks no witness"
        do = "give this node the same --store" if witnessed else "leave --store away, or give it to all nodes"
        return JoinRefusal(
            reason=f"the cluster {has} which half of it may go on, and all nodes have to do the same: {do}",
            passes=False,
        )
    if is_loopback(wish.host) and not is_loopback(own_host):
        return JoinRefusal(
            reason=f"it would be known at {wish.host}, which on every other host means that host itself. "
            "Give --listen HOST:PORT with an address that the others reach (`ip addr` shows them); if HOST "
            f"is a name, /etc/hosts maps it to {wish.host}",
            passes=False,
        )
    for node in view.nodes:
        if wish.name and node.name == wish.name and node.id != wish.node_id:
            return JoinRefusal(
                reason=f"{node} at {node.address} has the name {wish.name!r} already. Give --name another; "
                "if that node is dead, it loses its place in a moment",
                passes=True,
            )
    return None


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
